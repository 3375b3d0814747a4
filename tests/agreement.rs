//! A few calls of every path against the reference, for builds without threads: the laws, which say the same of everything, take minutes to build and
//! are built with all features.

mod common;

#[cfg(not(feature = "rayon"))]
#[test]
fn calls_of_every_path_agree_with_the_reference() {
    use common::{Expected, Number, Problem, instruction_sets, run_on};
    use fused_attention::{AttentionConfig, AttentionShape, bf16, f16};

    fn check<T: Number, K: Number<Real = T::Real>>() {
        // At once, decode, decode and prefill in chunks, prefill of a panel and of several blocks.
        for (q_len, kv_len) in [(2, 2), (3, 100), (1, 1100), (20, 1600), (9, 9), (40, 230)] {
            let shape =
                AttentionShape { batch: 2, num_heads: 4, num_kv_heads: 2, q_len, kv_len, head_dim: 20, value_dim: 17 };
            let problem = Problem::<T, K>::normal(&shape, 5);
            for config in [AttentionConfig::causal(), AttentionConfig::full(), AttentionConfig::sliding_window(70)] {
                let expected = Expected::new(&problem, &config);
                for set in instruction_sets() {
                    expected.assert_met_by(&run_on(set, &problem, &config), &(set, q_len, kv_len, config));
                }
            }
        }
    }
    check::<f32, f32>();
    check::<f32, f16>();
    check::<bf16, bf16>();
    check::<f64, f64>();
}
