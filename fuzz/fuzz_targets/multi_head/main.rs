//! Layers: small ones of any sizes, storages and operands, whole and in steps over a cache, against the textbook in f64; and hostile sizes,
//! positions and rotary numbers, which give a result or an error.
//!
//! The bound of a row is that of `fused_attention_fuzz::bounds`, carried through the projections by `fused_attention_fuzz::layer`.

#![no_main]

mod hostile;

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionConfig, AttentionError, Capacity, CausalAlignment, Element, KvCache, KvPadding, Mask, MultiHeadAttention,
    MultiHeadInputs, MultiHeadShape, MultiHeadWorkspace, Rotary, RotaryPairing, RotaryScaling, TensorView, bf16, f16,
};
use fused_attention_fuzz::layer::{Attended, Layer, Sequence, Turn, assert_heads_near, assert_near};
use fused_attention_fuzz::{CANARY, Number, normal};
use hostile::Hostile;
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Case {
    Small(Small),
    Hostile(Hostile),
}

#[derive(Debug, Arbitrary)]
struct Small {
    /// Of the weights and of the cache.
    types: u8,
    d_model: u8,
    /// Cross-attention, to tokens of so many features; `d_model` where the projections are fused.
    source: Option<u8>,
    num_kv_heads: u8,
    group_size: u8,
    dims: [u8; 2],
    /// Of Q, K, V and the output: stored `[out, in]`, and has a bias.
    storages: u8,
    biases: u8,
    is_fused: bool,
    rotary: Option<[u8; 4]>,
    batch: u8,
    lens: [u8; 2],
    own_lens: Option<[u8; 3]>,
    left_padding: bool,
    first_position: u16,
    visible: [u8; 4],
    softcap: bool,
    mask: Option<u8>,
    bias: Option<u8>,
    slopes: bool,
    sinks: bool,
    seed: u64,
    capacity: u8,
    is_growing: bool,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    Tokens(u8, Option<[u8; 3]>),
    Truncate(u8),
    TruncateSequence(u8, u8),
}

fuzz_target!(|case: Case| {
    match case {
        Case::Small(case) => match case.types % 9 {
            0 => case.run::<f32, f32>(),
            1 => case.run::<f32, f16>(),
            2 => case.run::<f32, bf16>(),
            3 => case.run::<f16, f32>(),
            4 => case.run::<f16, f16>(),
            5 => case.run::<f16, bf16>(),
            6 => case.run::<bf16, f32>(),
            7 => case.run::<bf16, f16>(),
            _ => case.run::<bf16, bf16>(),
        },
        Case::Hostile(case) => drop(case.run()),
    }
});

const BASES: [f64; 4] = [10_000.0, 500_000.0, 1.0, 0.5];
const SCALINGS: [RotaryScaling; 4] = [
    RotaryScaling::None,
    RotaryScaling::Linear { factor: 4.0 },
    RotaryScaling::Ntk { factor: 8.0 },
    RotaryScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 64 },
];

impl Small {
    fn shape(&self) -> MultiHeadShape {
        let d_model = usize::from(self.d_model % 40);
        let num_kv_heads = 1 + usize::from(self.num_kv_heads % 3);
        MultiHeadShape {
            d_model,
            d_source: self.source.filter(|_| !self.is_fused).map_or(d_model, |features| usize::from(features % 40)),
            num_heads: num_kv_heads * usize::from(1 + self.group_size % 4),
            num_kv_heads,
            head_dim: 1 + usize::from(self.dims[0] % 20),
            value_dim: usize::from(self.dims[1] % 20),
        }
    }

    fn rotary(&self, head_dim: usize) -> Option<Rotary> {
        let [dim, pairing, base, scaling] = self.rotary?;
        let pairing = if pairing % 2 == 0 { RotaryPairing::HalfSplit } else { RotaryPairing::Interleaved };
        let pairs = head_dim / 2;
        let dim = 2 * (1 + usize::from(dim) % pairs.max(1));
        let rotary = Rotary::new(dim, pairing).expect("even");
        let rotary = rotary.with_base(BASES[usize::from(base % 4)]).expect("ordinary");
        let rotary = rotary.with_scaling(SCALINGS[usize::from(scaling % 4)]).expect("ordinary");
        (pairs > 0).then_some(rotary)
    }

    fn config(&self) -> AttentionConfig {
        let [kind, offset, left, right] = self.visible;
        let limit = |n: u8| (n & 3 == 3).then_some(usize::from(n >> 2) % 24);
        let causal = AttentionConfig::causal();
        let config = match kind % 4 {
            0 => AttentionConfig::full(),
            1 => causal,
            2 => causal.with_causal_alignment(CausalAlignment::TopLeft),
            _ => causal.with_causal_alignment(CausalAlignment::Offset(isize::from(offset as i8 % 24))),
        };
        let config = config.with_window(limit(left), limit(right)).with_prefix_len(usize::from(kind >> 4) % 5);
        let config = if self.softcap { config.with_softcap(5.0) } else { config };
        if self.left_padding { config.with_kv_padding(KvPadding::Left) } else { config }
    }

    fn run<T: Number + Element<Acc = f32>, K: Number + Element<Acc = f32>>(&self) {
        let shape = self.shape();
        let mut state = self.seed | 1;
        let rotary = self.rotary(shape.head_dim);
        let turn = rotary.as_ref().map(|rotary| Turn {
            frequencies: rotary.frequencies().to_vec(),
            is_interleaved: self.rotary.is_some_and(|[_, pairing, ..]| pairing % 2 == 1),
        });
        let layer = Layer::<T>::normal(shape, self.biases, turn, &mut state);
        let mut built = layer.build(self.is_fused, self.storages);
        if let Some(rotary) = rotary {
            built = built.with_rotary(rotary).expect("no larger than a head");
        }
        let operands = Operands {
            slopes: self.slopes.then(|| (0..shape.num_heads).map(|head| 0.3 / (head + 1) as f32).collect()),
            sinks: self.sinks.then(|| (0..shape.num_heads).map(|head| head as f32 - 1.5).collect()),
            mask: self.mask,
            bias: self.bias,
        };
        self.whole(&layer, &built, &operands, &mut state);
        if shape.d_source == shape.d_model {
            self.in_steps::<T, K>(&layer, &built, &operands, &mut state);
        }
    }

    /// Self- or cross-attention.
    fn whole<T: Number + Element<Acc = f32>>(
        &self,
        layer: &Layer<T>,
        built: &MultiHeadAttention<'_, T>,
        operands: &Operands,
        state: &mut u64,
    ) {
        let MultiHeadShape { d_model, d_source, num_heads, .. } = layer.shape;
        let is_cross = self.source.is_some() || d_source != d_model;
        let batch = usize::from(self.batch % 4);
        let q_len = usize::from(self.lens[0] % 24);
        let kv_len = if is_cross { usize::from(self.lens[1] % 24) } else { q_len };
        let lens = self.own_lens.map(|lens| [0, 1, 2].map(|i| usize::from(lens[i]) % (kv_len + 1)));
        let lens = lens.as_ref().map(|lens| &lens[..batch]);
        let config = self.config();
        // Padding holds NaN: nobody may see it.
        let tokens_of = |sequence: usize| match lens {
            None => 0..kv_len,
            Some(lens) if self.left_padding => kv_len - lens[sequence]..kv_len,
            Some(lens) => 0..lens[sequence],
        };
        let mut tokens = |count: usize, features: usize, is_padded: bool| -> Vec<f32> {
            let row = |i: usize| tokens_of(i / count.max(1)).contains(&(i % count.max(1)));
            (0..batch * count)
                .flat_map(|i| {
                    let is_token = !is_padded || row(i);
                    (0..features).map(|_| if is_token { normal(state) as f32 } else { f32::NAN }).collect::<Vec<_>>()
                })
                .collect()
        };
        let x = tokens(q_len, d_model, !is_cross && lens.is_some());
        let source = is_cross.then(|| tokens(kv_len, d_source, lens.is_some()));
        let scores = [batch, num_heads, q_len, kv_len];
        let (mask, bias) = (operands.mask(scores), operands.bias(scores));
        let mut inputs = MultiHeadInputs::new(&x, [batch, q_len, d_model]);
        if let Some(source) = &source {
            inputs = inputs.with_source(source, [batch, kv_len, d_source]);
        }
        inputs.lens = lens;
        inputs.first_position = self.first_position.into();
        operands.attach(&mut inputs, &mask, &bias);

        let mut workspace = MultiHeadWorkspace::new();
        let mut out = vec![f32::from_bits(CANARY); x.len()];
        built.forward_into(&inputs, &mut out, &config, &mut workspace).expect("a valid call");
        let heads = built.project(&inputs, &config, &mut workspace).expect("a valid call");
        for sequence in 0..batch {
            let keys = tokens_of(sequence);
            let queries = if is_cross { 0..q_len } else { keys.clone() };
            let first = usize::from(self.first_position);
            let rows = &x[(sequence * q_len + queries.start) * d_model..][..queries.len() * d_model];
            let key_rows = match &source {
                Some(source) => &source[(sequence * kv_len + keys.start) * d_source..][..keys.len() * d_source],
                None => rows,
            };
            let of = Sequence { index: sequence, queries: queries.clone(), keys: keys.clone() };
            let [k, v] = [heads.k, heads.v].map(|view| of.keys_of(&view));
            let key_first = if is_cross { 0 } else { first };
            assert_heads_near(&layer.project(1, key_rows, keys.len(), key_first), &k, "keys");
            assert_heads_near(&layer.project(2, key_rows, keys.len(), key_first), &v, "values");
            let q = layer.project(0, rows, queries.len(), first);
            let attended = Attended { config, q, k, v, inputs: &inputs, of };
            let expected = layer.output(&attended);
            let found = &out[sequence * q_len * d_model..][..q_len * d_model];
            assert_near(&expected, &found[queries.start * d_model..queries.end * d_model], "out");
            let padding = found[..queries.start * d_model].iter().chain(&found[queries.end * d_model..]);
            assert!(padding.into_iter().all(|&x| x.to_bits() == 0), "padding is not zeros");
        }
    }

    /// Over a cache.
    fn in_steps<T: Number + Element<Acc = f32>, K: Number + Element<Acc = f32>>(
        &self,
        layer: &Layer<T>,
        built: &MultiHeadAttention<'_, T>,
        operands: &Operands,
        state: &mut u64,
    ) {
        let MultiHeadShape { d_model, num_heads, .. } = layer.shape;
        let batch = usize::from(self.batch % 4);
        let capacity = usize::from(self.capacity % 40);
        let kind = if self.is_growing { Capacity::Growing(capacity) } else { Capacity::Fixed(capacity) };
        let mut cache = KvCache::<K>::new(&layer.shape.kv_cache_shape(2, batch), kind).expect("small");
        // What it holds of each sequence, as tokens.
        let mut held: Vec<Vec<f32>> = vec![Vec::new(); batch];
        let len = |tokens: &Vec<f32>| tokens.len() / d_model;
        let mut workspace = MultiHeadWorkspace::new();
        let first = usize::from(self.first_position);
        if d_model == 0 {
            return; // the model counts tokens by their features
        }
        for step in self.steps.iter().take(8) {
            let (new, own) = match *step {
                Step::Truncate(to) => {
                    let to = usize::from(to) % 24;
                    let is_possible = held.iter().all(|tokens| len(tokens) >= to);
                    // The other layer is empty.
                    assert_eq!(cache.truncate(to).is_ok(), (is_possible && to == 0) || batch == 0);
                    if to == 0 {
                        held.iter_mut().for_each(Vec::clear);
                    }
                    continue;
                }
                Step::TruncateSequence(sequence, to) => {
                    let (sequence, to) = (usize::from(sequence % 4), usize::from(to) % 2);
                    let result = cache.truncate_sequence(sequence, to);
                    assert_eq!(result.is_ok(), sequence < batch && to == 0);
                    if result.is_ok() {
                        held[sequence].clear();
                    }
                    continue;
                }
                Step::Tokens(new, own) => (usize::from(new % 12), own),
            };
            let own = own.map(|own| [0, 1, 2].map(|i| usize::from(own[i]) % (new + 1)));
            let own = own.as_ref().map(|own| &own[..batch]);
            let tokens_of = |sequence: usize| match own {
                None => 0..new,
                Some(own) if self.left_padding => new - own[sequence]..new,
                Some(own) => 0..own[sequence],
            };
            let mut x = vec![f32::NAN; batch * new * d_model];
            for sequence in 0..batch {
                let tokens = tokens_of(sequence);
                let rows = &mut x[sequence * new * d_model..][tokens.start * d_model..tokens.end * d_model];
                rows.iter_mut().for_each(|x| *x = normal(state) as f32);
            }
            let after: Vec<usize> =
                held.iter().enumerate().map(|(sequence, tokens)| len(tokens) + tokens_of(sequence).len()).collect();
            let longest = after.iter().copied().max().unwrap_or(0);
            let scores = [batch, num_heads, new, longest];
            let (mask, bias) = (operands.mask(scores), operands.bias(scores));
            let mut inputs = MultiHeadInputs::new(&x, [batch, new, d_model]);
            inputs.lens = own;
            inputs.first_position = first;
            operands.attach(&mut inputs, &mask, &bias);
            let mut out = vec![f32::from_bits(CANARY); x.len()];
            let config = self.config();
            let result = built.step_into(&inputs, &mut out, &mut cache, 1, &config, &mut workspace);
            if !self.is_growing && longest > capacity {
                assert!(matches!(result, Err(AttentionError::CacheFull { .. })), "{result:?}");
                assert!(out.iter().all(|x| x.to_bits() == CANARY));
                assert!(cache.lens(1).expect("a layer").iter().copied().eq(held.iter().map(len)));
                continue;
            }
            result.expect("a valid step");
            assert_eq!(cache.lens(1).expect("a layer"), after);
            for sequence in 0..batch {
                let tokens = tokens_of(sequence);
                let rows = &x[(sequence * new + tokens.start) * d_model..][..tokens.len() * d_model];
                let before = len(&held[sequence]);
                held[sequence].extend_from_slice(rows);
                let (k, v) = (cache.k_of(1, sequence).expect("inside"), cache.v_of(1, sequence).expect("inside"));
                assert_heads_near(&layer.project(1, &held[sequence], after[sequence], first), &k, "cached keys");
                assert_heads_near(&layer.project(2, &held[sequence], after[sequence], first), &v, "cached values");
                let q = layer.project(0, rows, tokens.len(), first + before);
                let of = Sequence { index: sequence, queries: tokens.clone(), keys: 0..after[sequence] };
                let attended = Attended { config: of_step(config, before), q, k, v, inputs: &inputs, of };
                let found = &out[sequence * new * d_model..][..new * d_model];
                let expected = layer.output(&attended);
                assert_near(&expected, &found[tokens.start * d_model..tokens.end * d_model], "out of a step");
                let padding = found[..tokens.start * d_model].iter().chain(&found[tokens.end * d_model..]);
                assert!(padding.into_iter().all(|&x| x.to_bits() == 0), "padding is not zeros");
            }
        }
    }
}

/// What a step's config is for a call over its tokens alone, behind `held` others.
fn of_step(config: AttentionConfig, held: usize) -> AttentionConfig {
    match config.mask {
        Mask::Causal(CausalAlignment::TopLeft) => config.with_causal_alignment(CausalAlignment::BottomRight),
        Mask::Causal(CausalAlignment::Offset(offset)) => {
            config.with_causal_alignment(CausalAlignment::Offset(offset + held as isize))
        }
        _ => config,
    }
}

/// Of a call besides its tokens.
struct Operands {
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    mask: Option<u8>,
    bias: Option<u8>,
}

type Owned<T> = Option<(Vec<T>, [usize; 4])>;

impl Operands {
    fn numbers<T>(choice: Option<u8>, scores: [usize; 4], mut value: impl FnMut(usize) -> T) -> Owned<T> {
        let choice = choice?;
        let shape = [0, 1, 2, 3].map(|axis| if choice & (1 << axis) == 0 { scores[axis] } else { 1 });
        Some(((0..shape.iter().product()).map(&mut value).collect(), shape))
    }

    fn mask(&self, scores: [usize; 4]) -> Owned<bool> {
        Self::numbers(self.mask, scores, |i| i.wrapping_mul(0x9e37_79b9) >> 7 & 3 != 0)
    }

    fn bias(&self, scores: [usize; 4]) -> Owned<f32> {
        let value = |i: usize| (i.wrapping_mul(0x85eb_ca6b) >> 9 & 63) as f32 / 16.0 - 2.0;
        Self::numbers(self.bias, scores, |i| if i % 13 == 5 { f32::NEG_INFINITY } else { value(i) })
    }

    fn attach<'a>(&'a self, inputs: &mut MultiHeadInputs<'a>, mask: &'a Owned<bool>, bias: &'a Owned<f32>) {
        inputs.mask = mask.as_ref().map(|(mask, shape)| TensorView::from_bhsd(mask, *shape).expect("as long"));
        inputs.bias = bias.as_ref().map(|(bias, shape)| TensorView::from_bhsd(bias, *shape).expect("as long"));
        inputs.alibi_slopes = self.slopes.as_deref();
        inputs.sinks = self.sinks.as_deref();
    }
}
