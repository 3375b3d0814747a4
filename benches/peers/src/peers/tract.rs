//! tract: `FlashSdpaOp` of tract-transformers, evaluated as its plans evaluate it.

use tract_nnef::internal::*;
use tract_transformers::ops::flash_sdpa::FlashSdpaOp;

use super::{Loaded, Operands, boxed};
use crate::contender::Call;
use crate::number::Dtype;

struct Tract {
    op: FlashSdpaOp,
    inputs: TVec<TValue>,
    out: Option<TValue>,
}

impl Call for Tract {
    fn call(&mut self) -> crate::Result<()> {
        // Values are shared, not copied.
        let mut outputs = self.op.eval(&EvalContext::out_of_plan(), self.inputs.clone()).map_err(|e| e.to_string())?;
        self.out = outputs.pop();
        Ok(())
    }

    fn output(&mut self) -> crate::Result<Vec<f32>> {
        let out = self.out.as_ref().ok_or("not called yet")?.cast_to::<f32>().map_err(|error| error.to_string())?;
        let view = out.to_plain_array_view::<f32>().map_err(|error| error.to_string())?;
        Ok(view.iter().copied().collect())
    }
}

pub fn flash_sdpa(operands: &Operands<'_>) -> Loaded {
    let case = operands.case;
    let tensor = |bytes: &[u8], shape: [usize; 4]| {
        let tensor = match case.dtype {
            Dtype::F16 => Tensor::from_shape(&shape, &bytemuck::pod_collect_to_vec::<u8, f16>(bytes)),
            Dtype::F32 => Tensor::from_shape(&shape, &bytemuck::pod_collect_to_vec::<u8, f32>(bytes)),
            Dtype::Bf16 | Dtype::F64 => return Err(format!("no {} tensors", case.dtype.name())),
        };
        Ok(tensor.map_err(|error| error.to_string())?.into_tvalue())
    };
    let kv_shape = operands.kv_shape();
    let mut inputs =
        tvec!(tensor(operands.q, operands.q_shape())?, tensor(operands.k, kv_shape)?, tensor(operands.v, kv_shape)?,);
    if case.window().is_some() {
        // Of windows it knows masks that are added; it skips blocks that are all hidden.
        // Finite: of a row that sees nothing in its first blocks it makes NaN with an infinity.
        let hide = |hidden| if hidden { f32::MIN } else { 0.0 };
        let mask: Vec<f32> = operands.hidden().into_iter().map(hide).collect();
        let mask = Tensor::from_shape(&[1, 1, case.shape.q_len, case.shape.kv_len], &mask);
        inputs.push(mask.map_err(|error| error.to_string())?.into_tvalue());
    }
    let op = FlashSdpaOp { causal: case.window().is_none() && !case.sees_everything(), scale: None };
    boxed(Tract { op, inputs, out: None })
}
