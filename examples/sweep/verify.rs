//! Compares outputs with the textbook in f64.

use fused_attention::{AttentionConfig, AttentionError, AttentionInputs, AttentionShape, TensorView, reference};

use crate::inputs::Tensors;

/// Multiply-adds that the reference may take for one shape: some tenths of a second.
const BUDGET: usize = 200_000_000;
/// Rows to check however long they are.
const MIN_ROWS: usize = 32;

/// The right result of some rows `[batch, head, query]`.
pub struct Reference {
    rows: Vec<([usize; 3], Vec<f64>)>,
}

impl Reference {
    /// All rows where that fits the budget, else a sample.
    pub fn new(inputs: &AttentionInputs<'_, f32>, config: &AttentionConfig) -> Result<Self, AttentionError> {
        let rows = rows_to_check(&AttentionShape::of(inputs)?);
        let rows = rows.into_iter().map(|row| Ok((row, reference::attention_row(inputs, config, row)?.0)));
        Ok(Self { rows: rows.collect::<Result<_, _>>()? })
    }

    /// How many rows it knows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The largest difference, NaN if there is one.
    pub fn max_abs_error(&self, out: &TensorView<'_, f32>) -> f64 {
        let mut max = 0.0f64;
        for ([batch, head, query], expected) in &self.rows {
            for (d, expected) in expected.iter().enumerate() {
                let found = out.get([*batch, *head, *query, d]).map_or(f64::NAN, f64::from);
                let error = (found - expected).abs();
                if error.is_nan() {
                    return f64::NAN;
                }
                max = max.max(error);
            }
        }
        max
    }
}

/// The error that the rounding of f32 may make, with room: a wrong result is wrong by far more.
pub fn tolerance(tensors: &Tensors, shape: &AttentionShape) -> f64 {
    3e-6 * tensors.max_abs_value() * (shape.head_dim as f64 / 128.0).sqrt().max(1.0)
}

/// Spread over heads by turns and over queries by the golden ratio, which hits every residue of every block size; the
/// first and the last row of each end of the tensor are always among them.
fn rows_to_check(shape: &AttentionShape) -> Vec<[usize; 3]> {
    let units = shape.batch * shape.num_heads;
    let row = |unit: usize, query: usize| [unit / shape.num_heads, unit % shape.num_heads, query];
    let row_cost = shape.kv_len.saturating_mul(shape.head_dim + shape.value_dim);
    let affordable = (BUDGET / row_cost).max(MIN_ROWS);
    if units * shape.q_len <= affordable {
        return (0..units).flat_map(|unit| (0..shape.q_len).map(move |query| row(unit, query))).collect();
    }
    let last = shape.q_len - 1;
    let ends = [row(0, 0), row(0, last), row(units - 1, 0), row(units - 1, last)];
    let golden = |i: usize| ((i as f64 * 0.618_033_988_749_895).fract() * shape.q_len as f64) as usize;
    let sampled = (0..affordable - ends.len()).map(|i| row(i % units, golden(i).min(last)));
    ends.into_iter().chain(sampled).collect()
}
