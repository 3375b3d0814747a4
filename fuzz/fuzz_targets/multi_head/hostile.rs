//! Sizes, positions and rotary numbers of all kinds: a result or an error, and nothing written on an error.

use arbitrary::Arbitrary;
use fused_attention::{
    AttentionConfig, AttentionError, Capacity, CausalAlignment, KvCache, MultiHeadAttention, MultiHeadInputs,
    MultiHeadShape, MultiHeadWorkspace, Projection, Rotary, RotaryPairing, RotaryScaling, TensorView, TensorViewMut,
    WeightStorage, bf16,
};
use fused_attention_fuzz::{CANARY, Size};

#[derive(Debug, Arbitrary)]
pub struct Hostile {
    d_model: Size,
    d_source: Size,
    heads: [Size; 2],
    dims: [Size; 2],
    is_fused: bool,
    /// Of the weights, where they are not what the sizes ask for.
    projection: Option<[Size; 2]>,
    biases: u8,
    rotary: Option<HostileRotary>,
    x_shape: [Size; 3],
    source: Option<[Size; 3]>,
    lens: Option<[Size; 2]>,
    first_position: Size,
    window: [Option<Size>; 2],
    offset: i64,
    operand: Option<[Size; 4]>,
    /// How many numbers the slices have, where it is not what their shape says.
    slice_len: Option<u8>,
    reserve: [Size; 3],
    capacity: Size,
    layer: u8,
}

#[derive(Debug, Arbitrary)]
struct HostileRotary {
    dim: Size,
    is_interleaved: bool,
    base: Option<f64>,
    scaling: u8,
    numbers: [f64; 3],
    original_len: Size,
    apply: [Size; 3],
}

/// Numbers that are really allocated.
const MOST: usize = 1 << 18;
/// From here on the allocator refuses. Between the two nothing is tried.
const ABSURD: usize = 1 << 39;

/// A product, if it is small, or so large that it must be refused.
fn may_be_tried(sizes: &[usize]) -> Option<()> {
    let product = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    product.is_none_or(|product| !(MOST..ABSURD).contains(&product)).then_some(())
}

impl Hostile {
    pub fn run(&self) -> Option<()> {
        let [num_heads, num_kv_heads] = self.heads.map(Size::get);
        let [head_dim, value_dim] = self.dims.map(Size::get);
        let (d_model, d_source) = (self.d_model.get(), self.d_source.get());
        let shape = MultiHeadShape { d_model, d_source, num_heads, num_kv_heads, head_dim, value_dim };
        let _ = MultiHeadShape::new(d_model, num_heads);
        let _ = format!("{shape:?}");
        let rotary = match &self.rotary {
            Some(rotary) => rotary.build()?,
            None => None,
        };
        let layer = self.layer(shape)?.map_err(|error| assert!(!error.to_string().is_empty())).ok()?;
        let layer = match rotary {
            Some(rotary) => layer.with_rotary(rotary).map_err(|error| assert!(!error.to_string().is_empty())).ok()?,
            None => layer,
        };
        let mut config = AttentionConfig::causal().with_causal_alignment(CausalAlignment::Offset(self.offset as isize));
        config = config.with_window(self.window[0].map(Size::get), self.window[1].map(Size::get));

        let row = num_heads.checked_mul(head_dim.max(value_dim).max(16))?.max(d_model).max(d_source);
        let mut workspace = MultiHeadWorkspace::new();
        let reserve = self.reserve.map(Size::get);
        let fits = |[batch, q_len, kv_len]: [usize; 3]| {
            may_be_tried(&[batch, q_len, row])?;
            may_be_tried(&[batch, kv_len, row])
        };
        if fits(reserve).is_some() {
            let _ = layer.reserve(&mut workspace, reserve, &config);
            let _ = layer.reserve_steps(&mut workspace, reserve, &config);
        }

        let x_shape = self.x_shape.map(Size::get);
        let source_shape = self.source.map(|shape| shape.map(Size::get));
        let kv_len = source_shape.unwrap_or(x_shape)[1];
        fits([x_shape[0], x_shape[1], kv_len])?;
        // Scores are not held, but computed.
        may_be_tried(&[x_shape[0].max(1), x_shape[1].max(1), kv_len.max(1), num_heads, head_dim.max(value_dim)])?;
        let slice = |shape: [usize; 3]| -> Vec<f32> {
            let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)).filter(|&len| len < MOST);
            vec![0.5; self.slice_len.map_or(len.unwrap_or(7), usize::from)]
        };
        let (x, source) = (slice(x_shape), source_shape.map(slice));
        let mut inputs = MultiHeadInputs::new(&x, x_shape).with_first_position(self.first_position.get());
        if let (Some(source), Some(shape)) = (&source, source_shape) {
            inputs = inputs.with_source(source, shape);
        }
        let lens = self.lens.map(|lens| lens.map(Size::get));
        inputs.lens = lens.as_ref().map(|lens| &lens[..]);
        if let Some(shape) = self.operand {
            inputs.mask = TensorView::with_strides(&[true], shape.map(Size::get), [0; 4]).ok();
            inputs.bias = TensorView::with_strides(&[0.5f32], shape.map(Size::get), [0; 4]).ok();
        }
        let mut out = vec![f32::from_bits(CANARY); slice(x_shape).len()];
        match layer.forward_into(&inputs, &mut out, &config, &mut workspace) {
            Ok(()) => assert!(out.iter().all(|x| x.to_bits() != CANARY), "not all was written"),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert!(out.iter().all(|x| x.to_bits() == CANARY), "written, in spite of {error}");
            }
        }
        let _ = layer.project(&inputs, &config, &mut workspace).is_ok();

        let capacity = self.capacity.get();
        let batch = x_shape[0];
        may_be_tried(&[batch, num_kv_heads, capacity, head_dim.max(value_dim).max(16)])?;
        may_be_tried(&[batch, 16])?;
        let mut cache = KvCache::<bf16>::new(&shape.kv_cache_shape(1, batch), Capacity::Fixed(capacity)).ok()?;
        out.fill(f32::from_bits(CANARY));
        let number = usize::from(self.layer % 8 == 7);
        let result = layer.step_into(&inputs, &mut out, &mut cache, number, &config, &mut workspace);
        if let Err(error) = result {
            assert!(!error.to_string().is_empty());
            assert!(out.iter().all(|x| x.to_bits() == CANARY), "written, in spite of {error}");
            assert!(cache.lens(0).ok()?.iter().all(|&len| len == 0), "appended, in spite of {error}");
        }
        Some(())
    }

    /// `None`: not to be tried.
    fn layer(&self, shape: MultiHeadShape) -> Option<Result<MultiHeadAttention<'static>, AttentionError>> {
        let MultiHeadShape { d_model, d_source, num_heads, num_kv_heads, head_dim, value_dim } = shape;
        let features = [
            [d_model, num_heads.saturating_mul(head_dim)],
            [d_source, num_kv_heads.saturating_mul(head_dim)],
            [d_source, num_kv_heads.saturating_mul(value_dim)],
            [num_heads.saturating_mul(value_dim), d_model],
        ];
        let joined = features[..3].iter().fold(0usize, |sum, [_, out]| sum.saturating_add(*out));
        let mut number = 0;
        let mut projection = |[input, output]: [usize; 2]| {
            number += 1;
            let [input, output] = match self.projection {
                Some(other) if number == 1 => other.map(Size::get),
                _ => [input, output],
            };
            let len = input.checked_mul(output).filter(|&len| len < MOST).unwrap_or(3);
            let storage = if number % 2 == 0 { WeightStorage::OutIn } else { WeightStorage::InOut };
            let shape = if number % 2 == 0 { [output, input] } else { [input, output] };
            let projection = Projection::stored(vec![0.125f32; len], storage, shape)?;
            let bias = vec![1.0f32; if output < MOST { output } else { 5 }];
            if self.biases & (1 << number) == 0 { Ok(projection) } else { projection.with_bias(&bias) }
        };
        let mut build = || {
            if self.is_fused {
                let qkv = projection([d_model, joined])?;
                return MultiHeadAttention::from_fused_qkv(shape, qkv, projection(features[3])?);
            }
            let [q, k, v, out] = features;
            MultiHeadAttention::new(shape, projection(q)?, projection(k)?, projection(v)?, projection(out)?)
        };
        Some(build())
    }
}

impl HostileRotary {
    /// `None`: not to be tried; `Some(None)`: refused.
    fn build(&self) -> Option<Option<Rotary>> {
        let dim = self.dim.get();
        may_be_tried(&[dim])?;
        let pairing = if self.is_interleaved { RotaryPairing::Interleaved } else { RotaryPairing::HalfSplit };
        let [factor, low_freq_factor, high_freq_factor] = self.numbers;
        let scaling = match self.scaling % 4 {
            0 => RotaryScaling::None,
            1 => RotaryScaling::Linear { factor },
            2 => RotaryScaling::Ntk { factor },
            _ => RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_len: self.original_len.get(),
            },
        };
        let rotary = Rotary::new(dim, pairing)
            .and_then(|rotary| self.base.map_or(Ok(rotary.clone()), |base| rotary.with_base(base)))
            .and_then(|rotary| rotary.with_scaling(scaling));
        let rotary = match rotary {
            Ok(rotary) => rotary,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return Some(None);
            }
        };
        assert!(rotary.frequencies().iter().all(|frequency| frequency.is_finite() && *frequency >= 0.0));
        let [heads, seq, first] = self.apply.map(Size::get);
        let shape = [1, heads, seq, dim.saturating_add(1)];
        let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)).filter(|&len| len < MOST);
        let mut data = vec![1.0f32; len?];
        let mut view = match TensorViewMut::from_bhsd(&mut data, shape) {
            Ok(view) => view,
            // No elements, and strides past every address.
            Err(AttentionError::SizeOverflow { .. }) => return Some(Some(rotary)),
            Err(error) => panic!("{error}"),
        };
        rotary.apply(&mut view, first).expect("no larger than a head");
        // A turn keeps lengths.
        assert!(data.iter().all(|x| x.abs() < 1.415), "{data:?}");
        Some(Some(rotary))
    }
}
