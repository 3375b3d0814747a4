//! Deterministic tensors in the wanted layout. A row's numbers depend on its logical index alone, so both layouts hold
//! the same tensor.

use std::f64::consts::TAU;

use fused_attention::{AttentionError, AttentionInputs, AttentionShape, TensorView, TensorViewMut};

use crate::args::{InputKind, Layout};

/// Q, K and V of one shape.
pub struct Tensors {
    layout: Layout,
    shape: AttentionShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Tensors {
    pub fn new(shape: &AttentionShape, layout: Layout, kind: InputKind) -> crate::Result<Self> {
        let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
        let fill_q_k = |key: bool| {
            move |seed: u64, position: usize, row: &mut [f32]| {
                fill_normal(seed, row);
                if kind == InputKind::Ascending {
                    fill_ascending(key.then_some((position, kv_len)), row);
                }
            }
        };
        Ok(Self {
            layout,
            shape: *shape,
            q: tensor(1, layout, [batch, num_heads, q_len, head_dim], fill_q_k(false))?,
            k: tensor(2, layout, [batch, num_kv_heads, kv_len, head_dim], fill_q_k(true))?,
            v: tensor(3, layout, [batch, num_kv_heads, kv_len, value_dim], |seed, _, row| fill_normal(seed, row))?,
        })
    }

    pub fn inputs(&self) -> Result<AttentionInputs<'_, f32>, AttentionError> {
        let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        Ok(AttentionInputs::new(
            view(self.layout, &self.q, [batch, num_heads, q_len, head_dim])?,
            view(self.layout, &self.k, [batch, num_kv_heads, kv_len, head_dim])?,
            view(self.layout, &self.v, [batch, num_kv_heads, kv_len, value_dim])?,
        ))
    }

    /// Memory for an output, NaN wherever nothing writes.
    pub fn new_output(&self) -> crate::Result<Vec<f32>> {
        filled(self.output_shape(), f32::NAN)
    }

    /// `[batch, num_heads, q_len, value_dim]`.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.num_heads, self.shape.q_len, self.shape.value_dim]
    }

    /// The largest |V|: the scale of errors in the output, which is a mean of V's rows.
    pub fn max_abs_value(&self) -> f64 {
        self.v.iter().fold(0.0, |max, &x| f64::from(x).abs().max(max))
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

/// Memory for `shape`, or an error that names what it would have taken.
pub fn filled<const AXES: usize>(shape: [usize; AXES], value: f32) -> crate::Result<Vec<f32>> {
    let too_large = || format!("no memory for a tensor of shape {shape:?} (f32)");
    let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)).ok_or_else(too_large)?;
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| too_large())?;
    data.resize(len, value);
    Ok(data)
}

/// Calls `fill(seed, position, row)` for every row.
fn tensor(
    id: u64,
    layout: Layout,
    shape: [usize; 4],
    fill: impl Fn(u64, usize, &mut [f32]),
) -> crate::Result<Vec<f32>> {
    let mut data = filled(shape, 0.0)?;
    let strides = view(layout, &data, shape)?.strides();
    let [batch, heads, seq, dim] = shape;
    for row in 0..batch * heads * seq {
        let [b, h, s] = [row / (heads * seq), row / seq % heads, row % seq];
        let start = b * strides[0] + h * strides[1] + s * strides[2];
        fill(id << 56 | row as u64, s, &mut data[start..start + dim]);
    }
    Ok(data)
}

/// N(0, 1) by Box and Muller.
fn fill_normal(seed: u64, row: &mut [f32]) {
    let mut random = SplitMix64(mix(seed));
    for pair in row.chunks_mut(2) {
        let radius = (-2.0 * random.unit().ln()).sqrt();
        let (sin, cos) = (TAU * random.unit()).sin_cos();
        for (x, y) in pair.iter_mut().zip([radius * cos, radius * sin]) {
            *x = y as f32;
        }
    }
}

/// Turns N(0, 1) into a query, or into key `position` of `kv_len`, such that with the default scale
/// `score = (position - kv_len / 2) * step`, plus noise far below what a block of keys climbs.
///
/// With `sign[p] = +-1`, `q = sign` and `k[j] = target[j] / sqrt(head_dim) * sign` the scaled product is `target[j]`.
/// Targets span at most -16..16: the rounding of larger scores, which any f32 method suffers, would drown the errors
/// that the sweep is there to see.
fn fill_ascending(key: Option<(usize, usize)>, row: &mut [f32]) {
    let (slope, noise) = match key {
        None => (1.0, 0.05),
        Some((position, kv_len)) => {
            let step = (32.0 / kv_len as f32).min(0.125);
            let target = (position as f32 - kv_len as f32 / 2.0) * step;
            (target / (row.len() as f32).sqrt(), 0.02)
        }
    };
    for (p, x) in row.iter_mut().enumerate() {
        let sign = if mix(p as u64) & 1 == 0 { 1.0 } else { -1.0 };
        *x = slope * sign + noise * *x;
    }
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
