//! Masks, windows, score modifiers and packed sequences: small calls on every instruction set against the reference in f64.
//!
//! The bound of a row is that of `fused_attention_fuzz::bounds`.

#![no_main]

use arbitrary::Arbitrary;
use fused_attention::reference;
use fused_attention::{
    AttentionConfig, AttentionInputs, AttentionShape, Element, KvPadding, TensorView, attention_into,
};
use fused_attention_fuzz::answer::{assert_right, outputs};
use fused_attention_fuzz::bounds::Bounds;
use fused_attention_fuzz::packed::assert_separate;
use fused_attention_fuzz::scores::{Visible, sinks, slopes};
use fused_attention_fuzz::{Memory, Number, Real, Special, Tensor, for_types, instruction_sets, normal, put_specials};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Case {
    /// Of Q and the output, and of K and V.
    types: u8,
    /// Few rows against so many keys that they are cut into chunks.
    is_long: bool,
    batch: u8,
    num_kv_heads: u8,
    group_size: u8,
    q_len: u8,
    kv_len: u16,
    head_dim: u8,
    value_dim: u8,
    memory: [Memory; 4],
    visible: Visible,
    scale: Option<u8>,
    softcap: Option<u8>,
    mask: Option<Operand>,
    bias: Option<Operand>,
    slopes: Option<[u8; 2]>,
    sinks: Option<[u8; 2]>,
    kv_lens: Option<[u16; 2]>,
    left_padding: bool,
    /// Where packed sequences end, of the queries and of the keys.
    ends: Option<[[u16; 2]; 4]>,
    seed: u64,
    specials: [Option<Special>; 2],
}

/// Mask or bias.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Operand {
    memory: Memory,
    /// The axes of size 1.
    broadcast: u8,
    pattern: u8,
}

const SCALES: [f64; 8] = [0.0, 0.125, 0.5, 1.0, 2.5, -0.125, -1.0, 1e-3];
const SOFTCAPS: [f64; 8] = [50.0, 30.0, 5.0, 1.0, 0.1, 1e-3, 1e6, 1e30];

impl Operand {
    fn tensor<T: Copy>(&self, full: [usize; 4], between: T, value: impl FnMut([usize; 4]) -> T) -> Option<Tensor<T>> {
        let shape = [0, 1, 2, 3].map(|axis| if self.broadcast & (1 << axis) == 0 { full[axis] } else { 1 });
        Tensor::new(shape, self.memory.input_strides(shape), between, value)
    }

    fn mask(&self, full: [usize; 4]) -> Option<Tensor<bool>> {
        self.tensor(full, self.pattern & 0x80 == 0, |index| {
            let [.., query, key] = index;
            match self.pattern % 8 {
                0 => mix(index) % 4 > 0,
                1 => mix(index) % 16 == 0,
                2 => query / 7 == key / 7,
                3 => key / 40 % 2 == query / 9 % 2,
                4 => key % 300 > 250 || mix(index) % 64 == 0,
                5 => key == 0 || key + 1 == full[3],
                6 => query % 5 > 1,
                _ => true,
            }
        })
    }

    fn bias<T: Number>(&self, full: [usize; 4], state: &mut u64) -> Option<Tensor<T>> {
        // One bit less than infinity.
        let largest = [f64::INFINITY, f64::NEG_INFINITY].map(|x| T::from_low_bits(T::rounded(x).bits() - 1));
        let hidden = T::rounded(f64::NEG_INFINITY);
        self.tensor(full, T::CANARY, |index| {
            let (bias, mix) = (normal(state), mix(index));
            match self.pattern % 8 {
                0 if mix % 4 == 0 => hidden,
                1 if mix % 16 > 0 => hidden,
                2 if index[3] / 40 % 2 == 0 => hidden,
                3 if mix % 3 == 0 => largest[1],
                4 => largest[1],
                5 if mix % 32 == 0 => largest[mix % 2],
                6 => T::rounded(30.0 * bias),
                7 if mix % 512 == 0 => T::rounded(f64::NAN),
                _ => T::rounded(bias),
            }
        })
    }
}

fn mix([batch, head, query, key]: [usize; 4]) -> usize {
    let mixed = (batch * 0x9e37 + head * 0x79b9 + query * 0x85eb + key * 0xca6b) as u32;
    (mixed.wrapping_mul(0x9e37_79b1) >> 16) as usize
}

fuzz_target!(|case: Case| {
    for_types!(case.types, run, &case);
});

fn run<T: Number, K: Number + Element<Acc = T::Acc>>(case: &Case) -> Option<()> {
    let batch = 1 + usize::from(case.batch % 2);
    let num_kv_heads = 1 + usize::from(case.num_kv_heads % 2);
    let num_heads = num_kv_heads * usize::from(1 + case.group_size % 4);
    // Mostly small dims, so that long sequences stay cheap.
    let dim = |dim: u8| usize::from(dim % if dim < 0xe0 { 9 } else { 40 });
    let [head_dim, value_dim] = [1 + dim(case.head_dim), dim(case.value_dim)];
    let (mut q_len, mut kv_len) = (usize::from(case.q_len % 70), usize::from(case.kv_len % 450));
    if case.is_long {
        (q_len, kv_len) = (q_len % 9, usize::from(case.kv_len % 2500));
    }
    while batch * num_heads * q_len * kv_len * (head_dim + value_dim) > 1 << 15 {
        if q_len > if case.is_long { 1 } else { 4 } { q_len /= 2 } else { kv_len /= 2 }
    }

    let mut config = case.visible.config();
    if let Some(choice) = case.scale {
        config = config.with_softmax_scale(SCALES[usize::from(choice % 8)]);
    }
    if let Some(choice) = case.softcap {
        config = config.with_softcap(SOFTCAPS[usize::from(choice % 8)]);
    }
    if case.left_padding {
        config = config.with_kv_padding(KvPadding::Left);
    }
    let mut state = case.seed | 1;
    let q = tensor::<T>(case, &mut state, 0, [batch, num_heads, q_len, head_dim])?;
    let k = tensor::<K>(case, &mut state, 1, [batch, num_kv_heads, kv_len, head_dim])?;
    let v = tensor::<K>(case, &mut state, 2, [batch, num_kv_heads, kv_len, value_dim])?;
    let scores = [batch, num_heads, q_len, kv_len];
    let mask = case.mask.and_then(|mask| mask.mask(scores));
    let bias = case.bias.and_then(|bias| bias.bias::<T>(scores, &mut state));
    let slopes = case.slopes.map(|choice| slopes(choice, num_heads));
    let sinks = case.sinks.map(|choice| sinks(choice, num_heads));
    let kv_lens = case.kv_lens.map(|lens| lens.map(|len| usize::from(len) % (kv_len + 1)));

    let mut plain = AttentionInputs::new(q.view(), k.view(), v.view());
    plain.alibi_slopes = slopes.as_deref();
    plain.sinks = sinks.as_deref();
    let mut inputs = plain;
    inputs.mask = mask.as_ref().map(Tensor::view);
    inputs.bias = bias.as_ref().map(Tensor::view);
    inputs.kv_lens = kv_lens.as_ref().map(|lens| &lens[..batch]);
    let shape = AttentionShape::of(&inputs).expect("the sizes agree");

    let reference = reference::attention(&inputs, &config).expect("a valid call");
    let indices =
        (0..batch * num_heads * q_len).map(|row| [row / q_len / num_heads, row / q_len % num_heads, row % q_len]);
    let rows: Vec<Bounds> = indices
        .zip(reference.logsumexp.iter())
        .map(|(row, &logsumexp)| Bounds::new(&inputs, &config, &shape, row, logsumexp))
        .collect();

    let out_shape = [batch, num_heads, q_len, value_dim];
    let strides = case.memory[3].strides(out_shape);
    for set in instruction_sets() {
        let config = config.with_instruction_set(set);
        let mut out = Tensor::new(out_shape, strides, T::CANARY, |_| T::CANARY)?;
        let mut logsumexp = vec![T::Acc::NAN; batch * num_heads * q_len];
        attention_into(&inputs, &mut outputs(&mut out, &mut logsumexp), &config).expect("a valid call");
        let out_bound = |i: usize| rows[i / value_dim].out[i % value_dim];
        assert_right(set, &out, &logsumexp, &reference, out_bound, |i| rows[i].logsumexp);
        if let Some(ends) = case.ends {
            packed(&plain, &config, ends);
        }
    }
    Some(())
}

/// The first batch entry cut into sequences.
fn packed<T: Number, K: Number + Element<Acc = T::Acc>>(
    inputs: &AttentionInputs<'_, T, K>,
    config: &AttentionConfig,
    ends: [[u16; 2]; 4],
) {
    let [total_q, total_k] = [inputs.q.shape()[2], inputs.k.shape()[2]];
    let mut cu_seqlens = [0, 1].map(|side| {
        let total = [total_q, total_k][side];
        ends.map(|end| usize::from(end[side]) % (total + 1))
    });
    cu_seqlens.iter_mut().for_each(|offsets| {
        offsets.sort_unstable();
        offsets[0] = 0;
    });
    let mut all = *inputs;
    (all.q, all.k, all.v) = (first_entry(&inputs.q), first_entry(&inputs.k), first_entry(&inputs.v));
    assert_separate(&all, config, [&cu_seqlens[0], &cu_seqlens[1]]);
}

fn first_entry<'a, T: Copy>(view: &TensorView<'a, T>) -> TensorView<'a, T> {
    let [_, heads, len, dim] = view.shape();
    TensorView::with_strides(view.data(), [1, heads, len, dim], view.strides()).expect("a part")
}

fn tensor<T: Number>(case: &Case, state: &mut u64, which: usize, shape: [usize; 4]) -> Option<Tensor<T>> {
    let strides = case.memory[which].input_strides(shape);
    let mut tensor = Tensor::new(shape, strides, T::CANARY, |_| T::rounded(normal(state)))?;
    put_specials(&case.specials, which, &mut tensor.data);
    Some(tensor)
}
