//! Partial results of any shapes and lengths: merged, or an error and nothing written.

use arbitrary::Arbitrary;
use fused_attention::{AttentionError, AttentionOutputs, PartialAttention};
use fused_attention_fuzz::{CANARY, offsets};

use crate::tensors::{Description, MAX_SLICE, Tensor, filled};

#[derive(Debug, Arbitrary)]
pub struct Partials {
    list: Vec<Partial>,
    out: Tensor,
    /// Numbers more or fewer than rows.
    logsumexp: Option<i8>,
}

#[derive(Debug, Arbitrary)]
struct Partial {
    out: Tensor,
    logsumexp: Logsumexp,
}

#[derive(Debug, Arbitrary)]
enum Logsumexp {
    /// Numbers more or fewer than rows.
    Slice(Option<i8>),
    View(Tensor),
}

const MOST_PARTIALS: usize = 4;

/// Numbers that are really allocated.
const MOST: usize = 1 << 18;
/// From here on the allocator refuses. Between the two nothing is tried.
const ABSURD: usize = 1 << 39;

/// Rows of an output; no more than any slice has where they are too many.
fn rows([batch, heads, q_len, _]: [usize; 4]) -> usize {
    batch.saturating_mul(heads).saturating_mul(q_len)
}

impl Partial {
    fn logsumexp_description(&self, [batch, heads, q_len, _]: [usize; 4]) -> Option<Description<'_>> {
        match &self.logsumexp {
            Logsumexp::Slice(_) => None,
            Logsumexp::View(tensor) => Some(Description::new(tensor, [batch, heads, q_len, 1], false)),
        }
    }

    fn logsumexp(&self, shape: [usize; 4]) -> Box<[f32]> {
        let len = match &self.logsumexp {
            Logsumexp::Slice(change) => rows(shape).min(MAX_SLICE).saturating_add_signed(change.unwrap_or(0).into()),
            Logsumexp::View(_) => self.logsumexp_description(shape).map_or(0, |description| description.len),
        };
        let rare = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 1e30, f32::NEG_INFINITY, f32::NEG_INFINITY];
        (0..len).map(|i| if i % 3 == 1 { rare[i / 3 % 6] } else { i as f32 / 64.0 - 2.0 }).collect()
    }
}

/// The lengths decide whether there is one.
fn checked<'a>(
    partial: &Partial,
    shape: [usize; 4],
    (out, logsumexp): &'a (Box<[f32]>, Box<[f32]>),
) -> Option<([usize; 4], PartialAttention<'a, f32>)> {
    let out = Description::new(&partial.out, shape, false).view(out)?;
    let [batch, heads, q_len, _] = out.shape();
    let (result, fits) = match partial.logsumexp_description(shape) {
        Some(description) => {
            let logsumexp = description.view(logsumexp)?;
            let fits = logsumexp.shape() == [batch, heads, q_len, 1];
            (PartialAttention::with_logsumexp_view(out, logsumexp), fits)
        }
        None => (PartialAttention::new(out, logsumexp), logsumexp.len() == rows(out.shape())),
    };
    // Where there are no rows, the strides of none may overflow.
    let overflows = matches!(result, Err(AttentionError::SizeOverflow { .. })) && rows(out.shape()) == 0;
    assert!(result.is_ok() == fits || overflows, "{:?} with {} numbers", out.shape(), logsumexp.len());
    Some((out.shape(), result.ok()?))
}

impl Partials {
    /// `shape` is what all results have that do not change it.
    pub fn run(&self, shape: [usize; 4]) -> Option<()> {
        let list: Vec<&Partial> = self.list.iter().take(MOST_PARTIALS).collect();
        let memory: Vec<(Box<[f32]>, Box<[f32]>)> = list
            .iter()
            .map(|partial| (filled(Description::new(&partial.out, shape, false).len), partial.logsumexp(shape)))
            .collect();
        let (shapes, partials): (Vec<[usize; 4]>, Vec<PartialAttention<'_, f32>>) =
            list.iter().zip(&memory).filter_map(|(partial, memory)| checked(partial, shape, memory)).unzip();
        let merged = merge(&shapes, &partials);

        let description = Description::new(&self.out, shape, true);
        let mut out = vec![f32::from_bits(CANARY); description.len].into_boxed_slice();
        let (out_shape, strides) = {
            let view = description.view_mut(&mut out)?;
            (view.shape(), view.strides())
        };
        let expected_len = rows(out_shape);
        let len = self.logsumexp.map(|change| expected_len.min(MAX_SLICE).saturating_add_signed(change.into()));
        let mut logsumexp = vec![f32::from_bits(CANARY); len.unwrap_or(0)].into_boxed_slice();
        let mut write = |merge: &mut dyn FnMut(&mut AttentionOutputs<'_, f32>) -> Result<(), AttentionError>| {
            let result = {
                let mut outputs = AttentionOutputs::new(description.view_mut(&mut out)?);
                outputs.logsumexp = len.map(|_| &mut logsumexp[..]);
                merge(&mut outputs)
            };
            Some((result, [&out, &logsumexp].map(|data| data.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())))
        };

        let has_room = len.is_none_or(|len| len == expected_len);
        let (result, [after, logsumexp_after]) =
            write(&mut |outputs| PartialAttention::merge_into(&partials, outputs))?;
        assert_eq!(result.is_ok(), has_room && shapes.iter().all(|&shape| shape == out_shape), "{result:?}");
        if let Err(error) = result {
            assert!(!error.to_string().is_empty());
            assert!(after.iter().chain(&logsumexp_after).all(|&bits| bits == CANARY), "written before {error}");
        } else {
            let elements = if out_shape.contains(&0) { 0 } else { out_shape.iter().product::<usize>() };
            let written: Vec<u32> = offsets(out_shape, strides).map(|offset| after[offset]).collect();
            assert_eq!(after.iter().filter(|&&bits| bits != CANARY).count(), elements, "elements written");
            assert!(!written.contains(&CANARY) && !logsumexp_after.contains(&CANARY), "not written");
            if let Some([merged, merged_logsumexp]) = merged {
                assert!(merged == written, "merge and merge_into differ");
                assert!(len.is_none() || merged_logsumexp == logsumexp_after, "merge and merge_into differ");
            }
        }

        let (first_shape, first) = (shapes.first()?, partials.first()?);
        let (result, [after_add, logsumexp_after_add]) = write(&mut |outputs| first.add_to(outputs))?;
        assert_eq!(result.is_ok(), len == Some(expected_len) && *first_shape == out_shape, "{result:?}");
        if let Err(error) = result {
            assert!(!error.to_string().is_empty());
            assert!(after_add == after && logsumexp_after_add == logsumexp_after, "written before {error}");
        }
        Some(())
    }
}

/// Into new memory: the bits of the output and of its `logsumexp`.
fn merge(shapes: &[[usize; 4]], partials: &[PartialAttention<'_, f32>]) -> Option<[Vec<u32>; 2]> {
    let Some(first) = shapes.first() else {
        assert!(matches!(PartialAttention::merge(partials), Err(AttentionError::NoPartials)));
        return None;
    };
    let [of_out, of_rows] =
        [&first[..], &first[..3]].map(|sizes| sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size)));
    if [of_out, of_rows].iter().flatten().any(|len| (MOST..ABSURD).contains(len)) {
        return None;
    }
    let agree = shapes.iter().all(|shape| shape == first);
    match PartialAttention::merge(partials) {
        Ok(merged) => {
            assert!(agree, "{shapes:?}");
            assert_eq!([Some(merged.out.len()), Some(merged.logsumexp.len())], [of_out, of_rows]);
            Some([merged.out, merged.logsumexp].map(|data| data.iter().map(|x| x.to_bits()).collect()))
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            // A product may overflow although one of its sizes is 0.
            let is_small = [of_out, of_rows].iter().all(|len| len.is_some_and(|len| len < MOST));
            assert!(!agree || !is_small || first.contains(&0), "{error}");
            None
        }
    }
}
