//! candle-nn: `attention::flash_attn` on `[batch, tokens, heads, features]`, windows by its variant for packed sequences, and for decoding
//! its function for an f32 cache that holds K and V of a token side by side.

use candle_core::{DType, Device, Tensor};
use candle_nn::attention::cpu_flash::causal::causal_decode_f32_interleaved;
use candle_nn::attention::{self, AttnMask, flash_attn_varlen_cpu};
use fused_attention::AttentionShape;

use super::{Loaded, Operands, boxed, heads_behind_tokens};
use crate::Result;
use crate::contender::Call;
use crate::number::Dtype;

/// A call and what it returned last, in candle's order.
struct Candle<F> {
    call: F,
    out: Option<Tensor>,
    /// `[tokens, heads, features]` is what its varlen function returns.
    is_token_major: bool,
}

impl<F: FnMut() -> candle_core::Result<Tensor>> Call for Candle<F> {
    fn call(&mut self) -> Result<()> {
        self.out = Some((self.call)()?);
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let out = self.out.as_ref().ok_or("not called yet")?;
        let out = if self.is_token_major { out.transpose(0, 1)? } else { out.clone() };
        Ok(out.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

/// Contiguous `[batch, tokens, heads, features]`.
fn tensor(bytes: &[u8], shape: [usize; 4], dtype: DType) -> candle_core::Result<Tensor> {
    Tensor::from_raw_buffer(bytes, dtype, &shape, &Device::Cpu)?.transpose(1, 2)?.contiguous()
}

fn flash_attn_operands(operands: &Operands<'_>) -> candle_core::Result<[Tensor; 3]> {
    let dtype = match operands.case.dtype {
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
    };
    let kv_shape = operands.kv_shape();
    Ok([
        tensor(operands.q, operands.q_shape(), dtype)?,
        tensor(operands.k, kv_shape, dtype)?,
        tensor(operands.v, kv_shape, dtype)?,
    ])
}

pub fn flash_attn(operands: &Operands<'_>) -> Loaded {
    let case = *operands.case;
    let AttentionShape { batch, q_len, kv_len, head_dim, .. } = case.shape;
    let tensors = flash_attn_operands(operands).map_err(|error| error.to_string())?;
    let softmax_scale = 1.0 / (head_dim as f32).sqrt();
    if let Some(window) = case.window() {
        if batch != 1 {
            return Err("windows are measured for a batch of 1".into());
        }
        return windowed(tensors, window, softmax_scale).map_err(|error| error.to_string())?;
    }
    // For a single query its causal function is the one that decodes.
    let is_causal = case.mask == crate::args::MaskKind::Causal;
    let call = move || {
        let mask = if is_causal { AttnMask::causal_with_offset(kv_len - q_len) } else { AttnMask::None };
        let [q, k, v] = &tensors;
        match case.dtype {
            Dtype::F32 => flash_attn_as::<f32>(q, k, v, softmax_scale, mask),
            Dtype::F16 => flash_attn_as::<half::f16>(q, k, v, softmax_scale, mask),
            Dtype::Bf16 => flash_attn_as::<half::bf16>(q, k, v, softmax_scale, mask),
            Dtype::F64 => flash_attn_as::<f64>(q, k, v, softmax_scale, mask),
        }
    };
    boxed(Candle { call, out: None, is_token_major: false })
}

fn windowed([q, k, v]: [Tensor; 3], window: usize, softmax_scale: f32) -> candle_core::Result<Loaded> {
    let [q, k, v] = [q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?];
    let (q_len, kv_len) = (q.dim(0)?, k.dim(0)?);
    let lens = |len: usize| Tensor::from_vec(vec![len as u32], 1, &Device::Cpu);
    let (q_lens, kv_lens) = (lens(q_len)?, lens(kv_len)?);
    // Keys to the left of the query's own.
    let left = Some(window - 1);
    let call = move || {
        flash_attn_varlen_cpu(&q, &k, &v, None, &q_lens, &kv_lens, q_len, kv_len, softmax_scale, true, left, None)
    };
    Ok(boxed(Candle { call, out: None, is_token_major: true }))
}

fn flash_attn_as<T: candle_core::WithDType + num_traits::Float>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: AttnMask,
) -> candle_core::Result<Tensor> {
    attention::flash_attn::<T>(q, k, v, softmax_scale, mask, None, None)
}

pub fn interleaved_decode(operands: &Operands<'_>) -> Loaded {
    let AttentionShape { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, .. } = operands.case.shape;
    if (batch, q_len, operands.case.dtype) != (1, 1, Dtype::F32) || !operands.case.sees_everything() {
        return Err("one query in f32, batch 1".into());
    }
    let q = bytemuck::pod_collect_to_vec::<u8, f32>(operands.q);
    let [k, v] = [operands.k, operands.v].map(bytemuck::pod_collect_to_vec::<u8, f32>);
    let [k, v] = [k, v].map(|data| heads_behind_tokens(&data, operands.kv_shape()));
    let pairs = k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim));
    let kv: Vec<f32> = pairs.flat_map(|(k, v)| k.iter().chain(v).copied()).collect();
    let softmax_scale = 1.0 / (head_dim as f32).sqrt();
    let call = move || causal_decode_f32_interleaved(&q, &kv, num_heads, num_kv_heads, head_dim, kv_len, softmax_scale);
    boxed(Candle { call, out: None, is_token_major: false })
}
