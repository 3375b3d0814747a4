//! burn: the attention of its CPU backend burn-flex, which chooses by length between two matrix products and its flash path.

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::{DType, TensorData};
use burn_flex::FlexTensor;
use burn_flex::ops::attention::attention as flex_attention;

use super::{Loaded, Operands, boxed, to_f32};
use crate::Result;
use crate::contender::Call;
use crate::number::Dtype;

struct Burn {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    mask: Option<FlexTensor>,
    is_causal: bool,
    dtype: Dtype,
    out: Option<FlexTensor>,
}

impl Call for Burn {
    fn call(&mut self) -> Result<()> {
        let options = AttentionModuleOptions { is_causal: self.is_causal, ..Default::default() };
        // Clones share their memory.
        let (q, k, v, mask) = (self.q.clone(), self.k.clone(), self.v.clone(), self.mask.clone());
        self.out = Some(flex_attention(q, k, v, mask, None, options));
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let data = self.out.clone().ok_or("not called yet")?.into_data();
        let bytes = data.as_bytes();
        match self.dtype {
            Dtype::F16 => to_f32::<half::f16>(bytes),
            Dtype::Bf16 => to_f32::<half::bf16>(bytes),
            Dtype::F32 => to_f32::<f32>(bytes),
            Dtype::F64 => to_f32::<f64>(bytes),
        }
    }
}

pub fn attention(operands: &Operands<'_>) -> Loaded {
    let case = operands.case;
    let tensor = |bytes: &[u8], shape: [usize; 4]| {
        FlexTensor::from_data(match case.dtype {
            Dtype::F16 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, half::f16>(bytes), shape),
            Dtype::Bf16 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, half::bf16>(bytes), shape),
            Dtype::F32 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, f32>(bytes), shape),
            Dtype::F64 => TensorData::new(bytemuck::pod_collect_to_vec::<u8, f64>(bytes), shape),
        })
    };
    let kv_shape = operands.kv_shape();
    // Of windows it knows masks: true hides.
    let mask = case.window().map(|_| {
        let data = TensorData::new(operands.hidden(), [1, 1, case.shape.q_len, case.shape.kv_len]);
        debug_assert!(matches!(data.dtype(), DType::Bool(_)));
        FlexTensor::from_data(data)
    });
    boxed(Burn {
        q: tensor(operands.q, operands.q_shape()),
        k: tensor(operands.k, kv_shape),
        v: tensor(operands.v, kv_shape),
        is_causal: mask.is_none() && !case.sees_everything(),
        mask,
        dtype: case.dtype,
        out: None,
    })
}
