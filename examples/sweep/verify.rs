//! Compares outputs with the textbook in f64, computed from the inputs as they were rounded.

use fused_attention::{
    AttentionConfig, AttentionError, AttentionInputs, AttentionShape, Element, TensorView, reference,
};

use crate::inputs::Tensors;
use crate::number::{Dtype, Number};

/// Multiply-adds that the reference may take for one shape: some tenths of a second.
const BUDGET: usize = 200_000_000;
/// Rows to check however long they are.
const MIN_ROWS: usize = 12;

/// The right result of some rows `[batch, head, query]`.
pub struct Reference {
    rows: Vec<([usize; 3], Vec<f64>)>,
}

impl Reference {
    /// All rows where that fits the budget, else a sample.
    pub fn new<T: Element, K: Element<Acc = T::Acc>>(
        inputs: &AttentionInputs<'_, T, K>,
        config: &AttentionConfig,
    ) -> Result<Self, AttentionError> {
        let rows = rows_to_check(&AttentionShape::of(inputs)?);
        let rows = rows.into_iter().map(|row| Ok((row, reference::attention_row(inputs, config, row)?.0)));
        Ok(Self { rows: rows.collect::<Result<_, _>>()? })
    }

    /// Of packed sequences that begin and end at these offsets, in queries and keys: each on its own. The first and the last
    /// row of each sequence are among them.
    pub fn of_packed<T: Element, K: Element<Acc = T::Acc>>(
        inputs: &AttentionInputs<'_, T, K>,
        config: &AttentionConfig,
        offsets: &[usize],
    ) -> Result<Self, AttentionError> {
        let shape = AttentionShape::of(inputs)?;
        let lens = || offsets.windows(2).map(|ends| ends[1] - ends[0]);
        let mut rows = rows_to_check(&AttentionShape { kv_len: lens().max().unwrap_or(1), ..shape });
        let ends = offsets.windows(2).enumerate().flat_map(|(sequence, ends)| {
            let head = |row: usize| (2 * sequence + row) % shape.num_heads;
            [[0, head(0), ends[0]], [0, head(1), ends[1] - 1]]
        });
        rows.extend(ends);
        rows.sort_unstable();
        rows.dedup();
        let expected = |[batch, head, query]: [usize; 3]| {
            let sequence = offsets.partition_point(|&start| start <= query) - 1;
            let (start, end) = (offsets[sequence], offsets[sequence + 1]);
            let mut inputs = *inputs;
            inputs.q = inputs.q.seq_range(start..end)?;
            inputs.k = inputs.k.seq_range(start..end)?;
            inputs.v = inputs.v.seq_range(start..end)?;
            Ok(reference::attention_row(&inputs, config, [batch, head, query - start])?.0)
        };
        let rows = rows.into_iter().map(|row| Ok((row, expected(row)?)));
        Ok(Self { rows: rows.collect::<Result<_, _>>()? })
    }

    /// How many rows it knows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The largest error, if every element is as near as `tolerance` in the accumulator and rounding to `T` allow;
    /// else what is wrong.
    pub fn check<T: Number>(&self, out: &TensorView<'_, T>, tolerance: f64) -> Result<f64, String> {
        let mut max_abs_error = 0.0f64;
        for ([batch, head, query], expected) in &self.rows {
            for (d, expected) in expected.iter().enumerate() {
                let found = out.get([*batch, *head, *query, d]).map_or(f64::NAN, T::to_f64);
                let error = (found - expected).abs();
                let allowed = tolerance + T::rounding(expected.abs() + tolerance);
                if error.is_nan() || error > allowed {
                    return Err(format!(
                        "differs from the reference by {error:e} > {allowed:e}: {found} instead of {expected} at \
                         batch {batch}, head {head}, query {query}, dim {d}"
                    ));
                }
                max_abs_error = max_abs_error.max(error);
            }
        }
        Ok(max_abs_error)
    }
}

/// The error that the rounding of the accumulator may make, with room: a wrong result is wrong by far more. In f64 the
/// reference itself is no better, and its plain sums over all keys make most of it.
pub fn tolerance<T: Number, K: Number>(tensors: &Tensors<T, K>, shape: &AttentionShape) -> f64 {
    let relative = match T::DTYPE.accumulator() {
        Dtype::F64 => 1e-13,
        _ => 3e-6,
    };
    relative * tensors.max_abs_value() * (shape.head_dim as f64 / 128.0).sqrt().max(1.0)
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
    let sampled = affordable - ends.len();
    // With fewer samples than heads they are spread evenly: few heads share a KV head then.
    let unit = |i: usize| if sampled < units { i * units / sampled } else { i % units };
    let mut rows: Vec<_> = ends.into_iter().chain((0..sampled).map(|i| row(unit(i), golden(i).min(last)))).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}
