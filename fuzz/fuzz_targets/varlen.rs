//! Packed sequences of any lengths, with offsets that are right or not: the bits of separate calls on any number of threads, or an error
//! and nothing written. One input in 16 is large enough for several threads, and for chunks of keys.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionPlan, AttentionShape, CuSeqlens, Element, Mask, Parallelism,
    SERIAL_BELOW_FLOPS, TensorView, VarlenPlan, Window, attention_varlen, attention_varlen_into,
};
use fused_attention_fuzz::answer::{POOL, POOL_THREADS, outputs};
use fused_attention_fuzz::packed::assert_separate;
use fused_attention_fuzz::scores::{Visible, sinks, slopes};
use fused_attention_fuzz::{
    Memory, Number, Real, Size, Special, Tensor, for_types, instruction_sets, normal, put_specials,
};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Case {
    /// Of Q and the output, and of K and V.
    types: u8,
    /// One input in 16 is large, begins with a sequence of these queries and keys, and runs on one instruction set.
    is_large: u8,
    first: [u16; 2],
    num_kv_heads: u8,
    group_size: u8,
    head_dim: u8,
    value_dim: u8,
    memory: [Memory; 4],
    visible: Visible,
    softcap: bool,
    slopes: Option<[u8; 2]>,
    sinks: Option<[u8; 2]>,
    /// Queries and keys of each sequence.
    lens: Vec<[u8; 2]>,
    /// Rows behind the last sequence.
    behind: [u8; 2],
    fault: Option<Fault>,
    seed: u64,
    special: Option<Special>,
}

/// One thing that may be wrong; some of these faults change nothing.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Fault {
    /// Another offset in the list of the queries, or of the keys.
    Offset {
        of_keys: bool,
        index: u8,
        value: Size,
    },
    /// A list that ends early.
    Cut {
        of_keys: bool,
        len: u8,
    },
    /// Two entries instead of one.
    Batch,
    /// Lengths, a mask or a bias, which are for padded batches.
    Operand(u8),
    LogsumexpLen(u8),
}

const MOST_SEQUENCES: usize = 12;

/// Keys of the first sequence of a large input: up to three chunks of them in decode, two in prefill.
const MOST_KEYS: usize = 2600;

/// Multiply-adds of an input, and of a large one: twice as many operations, which several threads share.
const MOST_WORK: usize = 1 << 15;
const MOST_LARGE_WORK: usize = 1 << 19;
const _: () = assert!(2 * MOST_LARGE_WORK as u64 >= 2 * SERIAL_BELOW_FLOPS, "no input is shared among threads");

fuzz_target!(
    init: {
        assert_large_ones_are_cut();
    },
    |case: Case| {
        for_types!(case.types, run, &case);
    }
);

/// That large inputs can be what they are for, whatever the library's limits have become.
fn assert_large_ones_are_cut() {
    let sizes = |num_heads, q_len| AttentionShape {
        batch: 1,
        num_heads,
        num_kv_heads: 1,
        q_len,
        kv_len: MOST_KEYS - 1,
        head_dim: 9,
        value_dim: 9,
    };
    for (shape, chunks) in [(sizes(1, 8), "(3 chunks"), (sizes(3, 3), "(2 chunks")] {
        assert!(shape.num_heads * shape.q_len * shape.kv_len * 18 <= MOST_LARGE_WORK, "too large itself");
        let plan = AttentionPlan::new(&shape, &AttentionConfig::full()).expect("a valid call").to_string();
        assert!(plan.contains(chunks), "{plan}, but not {chunks}");
    }
}

fn run<T: Number, K: Number + Element<Acc = T::Acc>>(case: &Case) -> Option<()> {
    let num_kv_heads = 1 + usize::from(case.num_kv_heads % 3);
    let num_heads = num_kv_heads * usize::from(1 + case.group_size % 4);
    let dim = |dim: u8| usize::from(dim % if dim < 0xe0 { 9 } else { 40 });
    let [head_dim, value_dim] = [1 + dim(case.head_dim), dim(case.value_dim)];
    // Most sequences are short, a few are long enough for several blocks.
    let len = |len: u8| usize::from(if len < 0xf0 { len % 24 } else { len });
    let mut lens: Vec<[usize; 2]> = case.lens.iter().take(MOST_SEQUENCES).map(|lens| lens.map(len)).collect();
    let work_of = |lens: &[[usize; 2]]| -> usize {
        let scores: usize = lens.iter().map(|[queries, keys]| queries.saturating_mul(*keys)).sum();
        scores.saturating_mul(num_heads * (head_dim + value_dim))
    };
    let is_large = case.is_large % 16 == 15;
    if is_large {
        lens.insert(0, [1 + usize::from(case.first[0] % 40), usize::from(case.first[1]) % MOST_KEYS]);
        while work_of(&lens) > MOST_LARGE_WORK {
            let [queries, keys] = lens.iter_mut().max_by_key(|[queries, keys]| queries * keys)?;
            *if *queries > 1 { queries } else { keys } /= 2;
        }
    }
    let mut cu_seqlens = [vec![0], vec![0]];
    for lens in lens {
        for (offsets, len) in cu_seqlens.iter_mut().zip(lens) {
            offsets.push(offsets.last().unwrap_or(&0) + len);
        }
    }
    let [total_q, total_k] =
        [0, 1].map(|side| cu_seqlens[side].last().unwrap_or(&0) + usize::from(case.behind[side] % 8));
    if !is_large && work_of(&[[total_q, total_k]]) > MOST_WORK {
        return None;
    }

    let mut is_right = true;
    let mut batch = 1;
    match case.fault {
        Some(Fault::Offset { of_keys, index, value }) => {
            let offsets = &mut cu_seqlens[usize::from(of_keys)];
            let index = usize::from(index) % offsets.len();
            offsets[index] = value.get();
        }
        Some(Fault::Cut { of_keys, len }) => {
            let offsets = &mut cu_seqlens[usize::from(of_keys)];
            offsets.truncate(usize::from(len) % (offsets.len() + 1));
        }
        Some(Fault::Batch) => (batch, is_right) = (2, false),
        Some(Fault::Operand(_)) => is_right = false,
        Some(Fault::LogsumexpLen(_)) | None => {}
    }
    let [cu_q, cu_k] = &cu_seqlens;
    let rises = |offsets: &[usize], total: usize| {
        offsets.first() == Some(&0) && offsets.is_sorted() && offsets.last().is_some_and(|&last| last <= total)
    };
    is_right &= rises(cu_q, total_q) && rises(cu_k, total_k) && cu_q.len() == cu_k.len();
    let lens: Vec<[usize; 2]> =
        cu_q.windows(2).zip(cu_k.windows(2)).map(|(q, k)| [q, k].map(|ends| ends[1].saturating_sub(ends[0]))).collect();
    // Another offset can make a large one larger.
    if is_right && work_of(&lens) > MOST_LARGE_WORK {
        return None;
    }

    let mut state = case.seed | 1;
    let q = tensor::<T>(case, &mut state, 0, [batch, num_heads, total_q, head_dim])?;
    let k = tensor::<K>(case, &mut state, 1, [batch, num_kv_heads, total_k, head_dim])?;
    let v = tensor::<K>(case, &mut state, 2, [batch, num_kv_heads, total_k, value_dim])?;
    let slopes = case.slopes.map(|choice| slopes(choice, num_heads));
    let sinks = case.sinks.map(|choice| sinks(choice, num_heads));
    let mut inputs = AttentionInputs::new(q.view(), k.view(), v.view());
    inputs.alibi_slopes = slopes.as_deref();
    inputs.sinks = sinks.as_deref();
    let (shown, zero) = ([true], [T::rounded(0.0)]);
    let full = [1, num_heads, total_q, total_k];
    match case.fault {
        Some(Fault::Operand(0..=84)) => inputs.kv_lens = Some(&[0]),
        Some(Fault::Operand(85..=169)) => inputs.mask = Some(TensorView::with_strides(&shown, full, [0; 4]).ok()?),
        Some(Fault::Operand(_)) => inputs.bias = Some(TensorView::with_strides(&zero, full, [0; 4]).ok()?),
        _ => {}
    }

    let mut config = case.visible.config();
    if case.softcap {
        config = config.with_softcap(5.0);
    }
    let logsumexp_len = match case.fault {
        Some(Fault::LogsumexpLen(len)) => usize::from(len),
        _ => batch * num_heads * total_q,
    };
    is_right &= logsumexp_len == batch * num_heads * total_q;
    let out_shape = [batch, num_heads, total_q, value_dim];
    let strides = case.memory[3].strides(out_shape)?;
    if is_right {
        assert_threads(&inputs, [cu_q, cu_k], &config, 2 * work_of(&lens) as u64);
    }
    let mut sets = instruction_sets();
    if is_large {
        // All of them would take longer than the small inputs together.
        sets = vec![sets[usize::from(case.is_large / 16) % sets.len()]];
    }
    for set in sets {
        let config = config.with_instruction_set(set);
        let offsets = CuSeqlens::new(cu_q, cu_k);
        let call = |config: &AttentionConfig| {
            let mut out = Tensor::new(out_shape, Some(strides), T::CANARY, |_| T::CANARY)?;
            let mut logsumexp = vec![T::Acc::real(-0.0); logsumexp_len];
            let result = attention_varlen_into(&inputs, &mut outputs(&mut out, &mut logsumexp), offsets, config);
            let out: Vec<u64> = out.data.iter().map(|x| x.bits()).collect();
            Some((result, out, logsumexp.iter().map(|x| x.to_f64().to_bits()).collect::<Vec<u64>>()))
        };
        let (result, out, logsumexp) = call(&config.with_parallelism(Parallelism::Serial))?;
        match result {
            Ok(()) => assert!(is_right, "taken: {cu_seqlens:?}"),
            Err(error) => {
                assert!(!is_right, "{error}");
                assert!(!error.to_string().is_empty());
                assert!(out.iter().all(|&x| x == T::CANARY.bits()), "{error}, and wrote");
                assert!(logsumexp.iter().all(|&x| x == (-0.0f64).to_bits()), "{error}, and wrote");
                // Of the outputs it has none that could be too short.
                let has_room = matches!(case.fault, Some(Fault::LogsumexpLen(_)));
                assert_eq!(attention_varlen(&inputs, offsets, &config).is_ok(), has_room);
                continue;
            }
        }
        // Gaps hold canaries in both.
        let (result, pooled_out, pooled_logsumexp) = POOL.install(|| call(&config))?;
        result.expect("the same call");
        assert!(out == pooled_out && logsumexp == pooled_logsumexp, "bits change with threads");
        assert_separate(&inputs, &config, [cu_q, cu_k]);
    }
    Some(())
}

/// That no small call is shared in the pool, and that a large one is wherever every score counts.
fn assert_threads<T: Number, K: Number + Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    [cu_q, cu_k]: [&[usize]; 2],
    config: &AttentionConfig,
    most_flops: u64,
) {
    let shape = AttentionShape::of(inputs).expect("the sizes agree");
    let plan = || VarlenPlan::<T::Acc>::with_accumulator(&shape, CuSeqlens::new(cu_q, cu_k), config);
    let threads = POOL.install(plan).expect("a valid call").threads();
    if most_flops < SERIAL_BELOW_FLOPS {
        assert_eq!(threads, 1, "{most_flops} operations");
    } else if config.mask == Mask::Full && config.window == Window::default() {
        // Each KV head of a sequence is a task at least.
        let sequences = cu_q.windows(2).filter(|queries| queries[0] < queries[1]).count();
        assert!(threads >= POOL_THREADS.min(shape.num_kv_heads * sequences), "{most_flops} operations");
    }
}

fn tensor<T: Number>(case: &Case, state: &mut u64, which: usize, shape: [usize; 4]) -> Option<Tensor<T>> {
    let strides = case.memory[which].input_strides(shape);
    let mut tensor = Tensor::new(shape, strides, T::CANARY, |_| T::rounded(normal(state)))?;
    put_specials(&[case.special], which, &mut tensor.data);
    Some(tensor)
}
