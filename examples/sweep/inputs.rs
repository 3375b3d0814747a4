//! Deterministic tensors in the wanted layout. A row's numbers depend on its logical index alone, so both layouts hold
//! the same tensor.

use std::f64::consts::TAU;

use fused_attention::{AttentionError, AttentionInputs, AttentionShape, TensorView, TensorViewMut, alibi_slopes};

use crate::args::{InputKind, Layout, Modifiers};
use crate::memory::{Memory, Pages, filled};
use crate::number::Number;

/// Q, K and V of one shape, and what changes their scores.
pub struct Tensors<T, K = T> {
    layout: Layout,
    shape: AttentionShape,
    q: Memory<T>,
    k: Memory<K>,
    v: Memory<K>,
    /// `[1, 1, q_len, kv_len]`.
    bias: Option<Memory<T>>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
}

impl<T: Number, K: Number> Tensors<T, K> {
    /// Computed in f64 and rounded once. `kv_pages` is where K and V lie.
    pub fn new(shape: &AttentionShape, layout: Layout, kind: InputKind, kv_pages: Pages) -> crate::Result<Self> {
        let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
        let fill_q_k = |key: bool| {
            move |seed: u64, position: usize, row: &mut [f64]| {
                fill_normal(seed, row);
                if kind == InputKind::Ascending {
                    fill_ascending(key.then_some((position, kv_len)), row);
                }
            }
        };
        let fill_v = |seed: u64, _: usize, row: &mut [f64]| fill_normal(seed, row);
        let q_shape = [batch, num_heads, q_len, head_dim];
        let [k_shape, v_shape] = [head_dim, value_dim].map(|dim| [batch, num_kv_heads, kv_len, dim]);
        Ok(Self {
            layout,
            shape: *shape,
            q: tensor(1, layout, q_shape, Pages::Plain, fill_q_k(false))?,
            k: tensor(2, layout, k_shape, kv_pages, fill_q_k(true))?,
            v: tensor(3, layout, v_shape, kv_pages, fill_v)?,
            bias: None,
            alibi_slopes: None,
            sinks: None,
        })
    }

    /// Adds what the modifiers read. A sink weighs as much as some keys with high scores.
    pub fn with_modifiers(mut self, modifiers: &Modifiers) -> crate::Result<Self> {
        let AttentionShape { num_heads, q_len, kv_len, .. } = self.shape;
        if modifiers.bias {
            let fill = |seed: u64, _: usize, row: &mut [f64]| fill_normal(seed, row);
            self.bias = Some(tensor(4, Layout::Bhsd, [1, 1, q_len, kv_len], Pages::Plain, fill)?);
        }
        self.alibi_slopes = modifiers.alibi.then(|| alibi_slopes(num_heads));
        self.sinks = modifiers.sinks.then(|| {
            let mut normal = vec![0.0; num_heads];
            fill_normal(5 << 56, &mut normal);
            normal.into_iter().map(|x| (x + 2.0) as f32).collect()
        });
        Ok(self)
    }

    pub fn inputs(&self) -> Result<AttentionInputs<'_, T, K>, AttentionError> {
        let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let mut inputs = AttentionInputs::new(
            view(self.layout, &self.q, [batch, num_heads, q_len, head_dim])?,
            view(self.layout, &self.k, [batch, num_kv_heads, kv_len, head_dim])?,
            view(self.layout, &self.v, [batch, num_kv_heads, kv_len, value_dim])?,
        );
        if let Some(bias) = &self.bias {
            inputs = inputs.with_bias(TensorView::from_bhsd(bias, [1, 1, q_len, kv_len])?);
        }
        if let Some(slopes) = &self.alibi_slopes {
            inputs = inputs.with_alibi_slopes(slopes);
        }
        if let Some(sinks) = &self.sinks {
            inputs = inputs.with_sinks(sinks);
        }
        Ok(inputs)
    }

    /// The memory of K and of V.
    pub fn keys_and_values(&self) -> [&[K]; 2] {
        [&self.k, &self.v]
    }

    /// The memory of K and of V from key `first` on.
    pub fn keys_and_values_from(&self, first: usize) -> Vec<&[K]> {
        let AttentionShape { num_kv_heads, kv_len, head_dim, value_dim, .. } = self.shape;
        if first == 0 {
            return self.keys_and_values().into();
        }
        let key_heads = if self.layout == Layout::Bshd { num_kv_heads } else { 1 };
        let tails = |tensor, dim| {
            let key_len = key_heads * dim;
            <[K]>::chunks_exact(tensor, kv_len * key_len).map(move |keys| &keys[first * key_len..])
        };
        tails(&self.k, head_dim).chain(tails(&self.v, value_dim)).collect()
    }

    /// Memory for an output, NaN wherever nothing writes.
    pub fn new_output(&self) -> crate::Result<Vec<T>> {
        filled(self.output_shape(), T::NAN)
    }

    /// `[batch, num_heads, q_len, value_dim]`.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.num_heads, self.shape.q_len, self.shape.value_dim]
    }

    /// The largest |V|: the scale of errors in the output, which is a mean of V's rows.
    pub fn max_abs_value(&self) -> f64 {
        self.v.iter().fold(0.0, |max, &x| x.to_f64().abs().max(max))
    }
}

/// A view of contiguous memory; `shape` is `[batch, heads, seq, dim]` in either layout.
pub fn view<T>(layout: Layout, data: &[T], shape: [usize; 4]) -> Result<TensorView<'_, T>, AttentionError> {
    match layout {
        Layout::Bhsd => TensorView::from_bhsd(data, shape),
        Layout::Bshd => TensorView::from_bshd(data, [shape[0], shape[2], shape[1], shape[3]]),
    }
}

/// As [`view`], to be written.
pub fn view_mut<T>(layout: Layout, data: &mut [T], shape: [usize; 4]) -> Result<TensorViewMut<'_, T>, AttentionError> {
    match layout {
        Layout::Bhsd => TensorViewMut::from_bhsd(data, shape),
        Layout::Bshd => TensorViewMut::from_bshd(data, [shape[0], shape[2], shape[1], shape[3]]),
    }
}

/// Calls `fill(seed, position, row)` for every row and rounds what it gives.
fn tensor<T: Number>(
    id: u64,
    layout: Layout,
    shape: [usize; 4],
    pages: Pages,
    fill: impl Fn(u64, usize, &mut [f64]),
) -> crate::Result<Memory<T>> {
    let mut data = Memory::zeros(shape, pages)?;
    let strides = view(layout, &data, shape)?.strides();
    let [batch, heads, seq, dim] = shape;
    let mut exact = vec![0.0; dim];
    for row in 0..batch * heads * seq {
        let [b, h, s] = [row / (heads * seq), row / seq % heads, row % seq];
        let start = b * strides[0] + h * strides[1] + s * strides[2];
        fill(id << 56 | row as u64, s, &mut exact);
        for (x, &exact) in data[start..start + dim].iter_mut().zip(&exact) {
            *x = T::from_f64(exact);
        }
    }
    Ok(data)
}

/// N(0, 1) by Box and Muller.
fn fill_normal(seed: u64, row: &mut [f64]) {
    let mut random = SplitMix64(mix(seed));
    for pair in row.chunks_mut(2) {
        let radius = (-2.0 * random.unit().ln()).sqrt();
        let (sin, cos) = (TAU * random.unit()).sin_cos();
        for (x, y) in pair.iter_mut().zip([radius * cos, radius * sin]) {
            *x = y;
        }
    }
}

/// Turns N(0, 1) into a query, or into key `position` of `kv_len`, such that with the default scale
/// `score = (position - kv_len / 2) * step`, plus noise far below what a block of keys climbs.
///
/// With `sign[p] = +-1`, `q = sign` and `k[j] = target[j] / sqrt(head_dim) * sign` the scaled product is `target[j]`.
/// Targets span at most -16..16: the rounding of larger scores, which any f32 method suffers, would drown the errors
/// that the sweep is there to see.
fn fill_ascending(key: Option<(usize, usize)>, row: &mut [f64]) {
    let (slope, noise) = match key {
        None => (1.0, 0.05),
        Some((position, kv_len)) => {
            let step = (32.0 / kv_len as f64).min(0.125);
            let target = (position as f64 - kv_len as f64 / 2.0) * step;
            (target / (row.len() as f64).sqrt(), 0.02)
        }
    };
    for (p, x) in row.iter_mut().enumerate() {
        let sign = if mix(p as u64) & 1 == 0 { 1.0 } else { -1.0 };
        *x = slope * sign + noise * *x;
    }
}

/// Where packed sequences begin and end: `sequences` of 1 to `2 * mean_len - 1` tokens, uniformly, of this mean exactly.
pub fn packed_offsets(sequences: usize, mean_len: usize) -> crate::Result<Vec<usize>> {
    let too_long = || format!("no memory for {sequences} sequences of {mean_len} tokens");
    // More than the numbers below need.
    let most = sequences.checked_add(1).and_then(|n| n.checked_mul(mean_len)?.checked_mul(2));
    most.ok_or_else(too_long)?;
    let mut random = SplitMix64(mix(6 << 56));
    let mut offsets = Vec::new();
    offsets.try_reserve_exact(sequences + 1).map_err(|_| too_long())?;
    offsets.push(0);
    for i in 0..sequences {
        // The second of two is as much longer than the mean as the first is shorter, so that both end where two of the mean do.
        let is_first_of_two = i % 2 == 0 && i + 1 < sequences;
        offsets.push(if is_first_of_two {
            i * mean_len + (random.unit() * (2 * mean_len - 1) as f64).ceil() as usize
        } else {
            (i + 1) * mean_len
        });
    }
    Ok(offsets)
}

/// Steele, Lea and Flood, *Fast splittable pseudorandom number generators* (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((mix(self.0) >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
