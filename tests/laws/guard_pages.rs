//! Nothing is read or written outside the slices: they end, or begin, at memory that may not be touched.

use crate::common::{Layout, Number, Problem, by_types, for_each_pair, instruction_sets, masks_for, one_head, run_on};
use crate::guarded::{Guard, Guarded, now_running, one_at_a_time};
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionOutputs, AttentionShape, Parallelism, TensorView, TensorViewMut,
    attention_into,
};

/// Runs with all five slices at guards; the result must be that on ordinary memory.
fn check<T: Number, K: Number<Real = T::Real>>(problem: &Problem<T, K>, out_layout: Layout, config: &AttentionConfig) {
    let expected = crate::common::run_into(problem, config, out_layout);
    for guard in [Guard::Before, Guard::After] {
        now_running(format_args!("{guard:?} {:?} out {out_layout:?} {config:?}", problem.shape()));
        let q = Guarded::new(&problem.q.data, guard);
        let [k, v] = [&problem.k, &problem.v].map(|tensor| Guarded::new(&tensor.data, guard));
        let inputs = AttentionInputs::new(
            TensorView::with_strides(q.as_slice(), problem.q.shape, problem.q.strides).unwrap(),
            TensorView::with_strides(k.as_slice(), problem.k.shape, problem.k.strides).unwrap(),
            TensorView::with_strides(v.as_slice(), problem.v.shape, problem.v.strides).unwrap(),
        );
        let unwritten = crate::common::Tensor::<T>::unwritten(problem.out_shape(), out_layout);
        let mut out = Guarded::new(&unwritten.data, guard);
        let mut logsumexp = Guarded::new(&vec![T::Real::CANARY; expected.logsumexp.len()], guard);
        let view = TensorViewMut::with_strides(out.as_mut_slice(), unwritten.shape, unwritten.strides).unwrap();
        let mut outputs = AttentionOutputs::new(view).with_logsumexp(logsumexp.as_mut_slice());
        attention_into(&inputs, &mut outputs, config).unwrap();
        assert_eq!(crate::common::bits(out.as_slice()), crate::common::bits(&expected.out.data));
        assert_eq!(crate::common::bits(logsumexp.as_slice()), crate::common::bits(&expected.logsumexp));
    }
}

/// The layouts in which a tensor's last element is the last of its slice in each of its ways.
const LAYOUTS: [Layout; 4] = [Layout::Bhsd, Layout::Bshd, Layout::PaddedRows, Layout::Transposed];

fn check_on_every_set<T: Number, K: Number<Real = T::Real>>(shape: &AttentionShape) {
    let problem = Problem::<T, K>::normal(shape, 1);
    for layout in LAYOUTS {
        let problem = problem.in_layout(layout);
        for set in instruction_sets() {
            for config in masks_for::<T, K>() {
                check(&problem, layout, &config.with_instruction_set(set).with_parallelism(Parallelism::Serial));
            }
        }
    }
}

#[test]
fn lengths_around_tiles_and_panels_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(lengths_around_tiles_and_panels_stay_inside_the_slices_for);
}

fn lengths_around_tiles_and_panels_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    let all = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33];
    for len in by_types::<T, K, _>(all.to_vec(), vec![1, 7, 13, 17]) {
        for (q_len, kv_len) in [(len, len), (3, len), (len, 5)] {
            let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, ..one_head(q_len, kv_len, 5, 6) };
            check_on_every_set::<T, K>(&shape);
        }
    }
}

#[test]
fn head_dims_around_tiles_and_vectors_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(head_dims_around_tiles_and_vectors_stay_inside_the_slices_for);
}

fn head_dims_around_tiles_and_vectors_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for dim in by_types::<T, K, _>(vec![1, 2, 3, 7, 8, 15, 16, 17, 31, 40, 64, 67], vec![1, 7, 31, 40]) {
        for (head_dim, value_dim) in [(dim, dim), (5, dim), (dim, 3)] {
            check_on_every_set::<T, K>(&AttentionShape {
                num_heads: 4,
                num_kv_heads: 2,
                ..one_head(7, 9, head_dim, value_dim)
            });
        }
    }
}

#[test]
fn lengths_around_blocks_stay_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(lengths_around_blocks_stay_inside_the_slices_for);
}

fn lengths_around_blocks_stay_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for kv_len in by_types::<T, K, _>(vec![95, 96, 97, 127, 129, 191, 192, 193, 385], vec![97, 193]) {
        for (q_len, dim) in by_types::<T, K, _>(vec![(9, 3), (9, 8), (1, 3), (1, 8)], vec![(9, 3), (1, 8)]) {
            check_on_every_set::<T, K>(&one_head(q_len, kv_len, dim, dim));
        }
    }
}

/// The variant that selects where edge blocks hold NaN reads V in its own way.
#[test]
fn nan_in_an_edge_block_stays_inside_the_slices() {
    let _one = one_at_a_time();
    for_each_pair!(nan_in_an_edge_block_stays_inside_the_slices_for);
}

fn nan_in_an_edge_block_stays_inside_the_slices_for<T: Number, K: Number<Real = T::Real>>() {
    for dim in by_types::<T, K, _>(vec![1, 3, 7, 8, 31, 40, 67], vec![7, 40]) {
        for q_len in [3, 9] {
            let mut problem = Problem::<T, K>::normal(&one_head(q_len, 14, dim, dim), 1);
            problem.v.fill_row([0, 0, 13], K::exactly(f64::NAN));
            for set in instruction_sets() {
                let config = AttentionConfig::causal().with_instruction_set(set).with_parallelism(Parallelism::Serial);
                check(&problem, Layout::Bhsd, &config);
                assert!(run_on(set, &problem, &config).row_values([0, 0, q_len - 1]).0.iter().all(|x| x.is_nan()));
            }
        }
    }
}
