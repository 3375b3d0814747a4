//! Which keys a query sees, and hiding the rest of an edge block.
//!
//! With the keys cut into blocks, a block of a causal mask is for a panel of rows *full* (every row sees every key,
//! nothing to do), *edge* (the diagonal crosses it) or *hidden* (skipped):
//!
//! ```text
//!           block 0   block 1   block 2
//! panel 0   edge      hidden    hidden
//! panel 1   full      edge      hidden
//! panel 2   full      full      edge
//! ```

use std::ops::Range;

use pulp::Simd;

use crate::kernels::lane::Lane;
use crate::{AttentionConfig, AttentionShape, CausalAlignment, KvPadding, Mask, Window};

/// What decides which keys the queries of a sequence see: the config and the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VisibleKeys {
    mask: Mask,
    window: Window,
    /// As the config has it, perhaps more than there are keys.
    prefix_len: usize,
    q_len: usize,
    /// Of the tensor.
    kv_len: usize,
    /// Of a sequence that fills it.
    whole: KeyRanges,
}

/// The keys that each query of one sequence sees: all that a task needs to know.
///
/// Mask, window and prefix together show a query at position `x` the keys `0..prefix` and `x - left ..= x + right`. Without a limit to
/// the left that is one range. With one it may be two, which are then two *parts*, one after the other: so whoever looks at one part
/// meets one range a query, neither of whose ends ever falls from a query to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyRanges {
    /// Where the sequence begins.
    first_key: usize,
    /// Keys of the sequence.
    kv_len: usize,
    /// What a query's number is less than its position in the sequence.
    offset: isize,
    /// Query `i` sees the keys from `i + from` to `i + to`, each at least what stands beside it and at most `kv_len`.
    from: isize,
    from_at_least: isize,
    to: isize,
    to_at_least: isize,
    /// `from` and `to` of the second part, whose keys lie behind `to_at_least`.
    second: Option<[isize; 2]>,
}

impl VisibleKeys {
    pub(crate) fn new(config: &AttentionConfig, shape: &AttentionShape) -> Self {
        let AttentionConfig { mask, window, prefix_len, .. } = *config;
        let AttentionShape { q_len, kv_len, .. } = *shape;
        let whole = ranges(mask, window, prefix_len, q_len, 0..kv_len);
        Self { mask, window, prefix_len, q_len, kv_len, whole }
    }

    /// For a sequence that fills the tensor.
    pub(crate) fn whole(&self) -> KeyRanges {
        self.whole
    }

    /// With other ranges for whoever gives no lengths.
    pub(crate) fn with_whole(self, whole: KeyRanges) -> Self {
        Self { whole, ..self }
    }

    /// For a sequence of `kv_len` keys in the same tensor, padded on one side.
    pub(crate) fn of_sequence(&self, kv_len: usize, padding: KvPadding) -> KeyRanges {
        let first_key = match padding {
            KvPadding::Right => 0,
            KvPadding::Left => self.kv_len - kv_len,
        };
        ranges(self.mask, self.window, self.prefix_len, self.q_len, first_key..first_key + kv_len)
    }

    /// For the queries from `first` on alone, numbered from 0. They stay where they are.
    pub(crate) fn later_queries(&self, first: usize) -> Self {
        let mask = match self.mask {
            Mask::Causal(CausalAlignment::TopLeft) => {
                Mask::Causal(CausalAlignment::Offset(0isize.saturating_add_unsigned(first)))
            }
            Mask::Causal(CausalAlignment::Offset(offset)) => {
                Mask::Causal(CausalAlignment::Offset(offset.saturating_add_unsigned(first)))
            }
            aligned_to_the_end => aligned_to_the_end,
        };
        let q_len = self.q_len - first;
        let whole = ranges(mask, self.window, self.prefix_len, q_len, 0..self.kv_len);
        Self { mask, q_len, whole, ..*self }
    }

    /// Scores that all queries of one head see together.
    pub(crate) fn visible_scores(&self) -> u128 {
        let (q_len, kv_len) = (self.q_len as u128, self.kv_len as u128);
        let sum = |bound: isize, at_least: isize| sum_of_bounds(q_len, bound as i128, [at_least as u128, kv_len]);
        let of = |part: KeyRanges| sum(part.to, part.to_at_least) - sum(part.from, part.from_at_least);
        of(self.whole) + self.whole.second_part().map_or(0, of)
    }
}

/// For queries of a sequence that lies at `keys`.
fn ranges(mask: Mask, window: Window, prefix_len: usize, q_len: usize, keys: Range<usize>) -> KeyRanges {
    // So far that a query's number can still be added: there is no memory for as many keys or queries.
    const FAR: isize = isize::MAX / 2;
    let (first_key, kv_len) = (keys.start, keys.len());
    let signed = |len: usize| isize::try_from(len).unwrap_or(isize::MAX);
    let prefix = signed(prefix_len.min(kv_len));
    let offset = match mask {
        Mask::Full | Mask::Causal(CausalAlignment::BottomRight) => signed(kv_len).saturating_sub(signed(q_len)),
        Mask::Causal(CausalAlignment::TopLeft) => 0,
        Mask::Causal(CausalAlignment::Offset(offset)) => offset,
    };
    let right = match mask {
        Mask::Full => window.right,
        Mask::Causal(_) => Some(0),
    };
    // What no `isize` holds reaches past every key.
    let [left, right] = [window.left, right].map(|limit| limit.and_then(|limit| isize::try_from(limit).ok()));
    let from = left.map_or(-FAR, |left| offset.saturating_sub(left).clamp(-FAR, FAR));
    let to = right.map_or(FAR, |right| offset.saturating_add(right).saturating_add(1).clamp(-FAR, FAR));
    let whole = KeyRanges { first_key, kv_len, offset, from, from_at_least: 0, to, to_at_least: prefix, second: None };
    if left.is_some() && prefix > 0 {
        return KeyRanges { from: -FAR, to: -FAR, second: Some([from, to]), ..whole };
    }
    whole
}

impl KeyRanges {
    /// The other part, if there is one. (This is the first.)
    #[inline(always)]
    pub(crate) fn second_part(&self) -> Option<Self> {
        let [from, to] = self.second?;
        Some(Self { from, from_at_least: self.to_at_least, to, second: None, ..*self })
    }

    /// The keys that a query sees, counted from the start of the tensor: those of this part.
    #[inline(always)]
    pub(crate) fn range(&self, query: usize) -> Range<usize> {
        let bound = |bound: isize, at_least: isize| {
            let key = (query as isize).wrapping_add(bound).max(at_least) as usize;
            self.first_key + key.min(self.kv_len)
        };
        bound(self.from, self.from_at_least)..bound(self.to, self.to_at_least)
    }

    /// Whether a query sees any key, in this part or the other.
    #[inline(always)]
    pub(crate) fn sees_keys(&self, query: usize) -> bool {
        !self.range(query).is_empty() || self.second_part().is_some_and(|part| !part.range(query).is_empty())
    }

    /// The key, counted from the start of the tensor, at whose position a query stands. Perhaps there is no such key.
    #[inline(always)]
    pub(crate) fn position(&self, query: usize) -> isize {
        (query as isize).saturating_add(self.offset).saturating_add(self.first_key as isize)
    }
}

/// The sum of `i + first`, brought into `least..=most`, over all `i < len`; `least <= most`.
fn sum_of_bounds(len: u128, first: i128, [least, most]: [u128; 2]) -> u128 {
    // The first of the `i` for which it is at least `bound`.
    let reaches = |bound: u128| u128::try_from(bound as i128 - first).unwrap_or(0).min(len);
    let (low, high) = (reaches(least), reaches(most));
    // Between them it grows by one each time.
    let between = high - low;
    let start = low as i128 + first;
    let triangle = if between == 0 { 0 } else { between * start as u128 + between * (between - 1) / 2 };
    low * least + triangle + (len - high) * most
}

/// For each row of a panel, the keys of a block that it sees: `starts[row] <= key < ends[row]`, counted from the start of
/// the block, as numbers of the accumulator type.
pub(crate) struct RowBounds<V, const ROW_VECTORS: usize> {
    pub(crate) starts: [V; ROW_VECTORS],
    pub(crate) ends: [V; ROW_VECTORS],
}

impl<V: Copy, const ROW_VECTORS: usize> RowBounds<V, ROW_VECTORS> {
    /// Sets the scores of keys before a row's first to -inf, by select, whatever the score is. `scores[0]` belongs to
    /// `first_key`.
    #[inline(always)]
    pub(crate) fn hide_before<S: Simd, A: Lane<Vector<S> = V>>(
        &self,
        simd: S,
        scores: &mut [[V; ROW_VECTORS]],
        first_key: usize,
    ) {
        hide::<S, A, true, ROW_VECTORS>(simd, scores, first_key, &self.starts);
    }

    /// The same for the keys after a row's last.
    #[inline(always)]
    pub(crate) fn hide_after<S: Simd, A: Lane<Vector<S> = V>>(
        &self,
        simd: S,
        scores: &mut [[V; ROW_VECTORS]],
        first_key: usize,
    ) {
        hide::<S, A, false, ROW_VECTORS>(simd, scores, first_key, &self.ends);
    }
}

/// Hides the keys `BEFORE` each row's bound, or those from it on.
#[inline(always)]
fn hide<S: Simd, A: Lane, const BEFORE: bool, const ROW_VECTORS: usize>(
    simd: S,
    scores: &mut [[A::Vector<S>; ROW_VECTORS]],
    first_key: usize,
    bounds: &[A::Vector<S>; ROW_VECTORS],
) {
    let hidden = A::splat(simd, A::NEG_INFINITY);
    for (key, scores) in scores.iter_mut().enumerate() {
        let key = A::splat(simd, A::from_index(first_key + key));
        for vector in 0..ROW_VECTORS {
            let (before, from) = if BEFORE { (hidden, scores[vector]) } else { (scores[vector], hidden) };
            scores[vector] = A::select(simd, A::less_than(simd, key, bounds[vector]), before, from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every mask, window and prefix worth a look.
    fn configs() -> Vec<AttentionConfig> {
        use CausalAlignment::{BottomRight, Offset, TopLeft};
        let alignments =
            [BottomRight, TopLeft, Offset(0), Offset(3), Offset(-2), Offset(isize::MAX), Offset(isize::MIN)];
        let causal = alignments.map(|alignment| AttentionConfig::causal().with_causal_alignment(alignment));
        let sizes = [None, Some(0), Some(1), Some(4), Some(usize::MAX)];
        let windows = sizes.iter().flat_map(|&left| sizes.map(|right| (left, right)));
        let windows = windows.flat_map(|(left, right)| [0, 1, 3, usize::MAX].map(|prefix| (left, right, prefix)));
        causal
            .into_iter()
            .chain([AttentionConfig::full()])
            .flat_map(|config| {
                windows
                    .clone()
                    .map(move |(left, right, prefix)| config.with_window(left, right).with_prefix_len(prefix))
            })
            .collect()
    }

    const LENGTHS: [(usize, usize); 9] = [(0, 0), (0, 3), (3, 0), (1, 16), (16, 1), (2, 5), (5, 2), (7, 7), (9, 11)];

    fn visible(config: &AttentionConfig, q_len: usize, kv_len: usize) -> VisibleKeys {
        let (head_dim, value_dim) = (1, 1);
        let shape = AttentionShape { batch: 1, num_heads: 1, num_kv_heads: 1, q_len, kv_len, head_dim, value_dim };
        VisibleKeys::new(config, &shape)
    }

    #[test]
    fn ranges_are_the_definition_and_never_fall() {
        for (config, (q_len, kv_len)) in configs().iter().flat_map(|config| LENGTHS.map(|lengths| (config, lengths))) {
            let what = format!("{config:?} {q_len} {kv_len}");
            let visible = visible(config, q_len, kv_len);
            let first = visible.whole();
            let parts: Vec<KeyRanges> = [Some(first), first.second_part()].into_iter().flatten().collect();
            for query in 0..q_len {
                let offset = match config.mask {
                    Mask::Causal(CausalAlignment::TopLeft) => 0,
                    Mask::Causal(CausalAlignment::Offset(offset)) => offset as i128,
                    _ => kv_len as i128 - q_len as i128,
                };
                let position = query as i128 + offset;
                let right = if config.mask == Mask::Full { config.window.right } else { Some(0) };
                let is_visible = |key: &usize| {
                    let distance = *key as i128 - position;
                    let in_window = config.window.left.is_none_or(|left| -distance <= left as i128)
                        && right.is_none_or(|right| distance <= right as i128);
                    in_window || *key < config.prefix_len
                };
                let expected: Vec<usize> = (0..kv_len).filter(is_visible).collect();
                let found: Vec<usize> = parts.iter().flat_map(|part| part.range(query)).collect();
                assert_eq!(found, expected, "{what}, query {query}");
                assert_eq!(first.sees_keys(query), !expected.is_empty(), "{what}, query {query}");
                for part in parts.iter().filter(|_| query > 0) {
                    let [before, here] = [query - 1, query].map(|query| part.range(query));
                    assert!(before.start <= here.start && before.end <= here.end && here.start <= here.end, "{what}");
                }
            }
            for first_query in 0..q_len {
                let later = visible.later_queries(first_query).whole();
                let later_parts = [Some(later), later.second_part()].into_iter().flatten();
                for ((part, later), query) in
                    parts.iter().zip(later_parts).flat_map(|pair| (first_query..q_len).map(move |query| (pair, query)))
                {
                    assert_eq!(later.range(query - first_query), part.range(query), "{what}, from query {first_query}");
                    assert_eq!(
                        later.position(query - first_query),
                        part.position(query),
                        "{what}, from query {first_query}"
                    );
                }
            }
            let sum: usize = (0..q_len).flat_map(|query| parts.iter().map(move |part| part.range(query).len())).sum();
            assert_eq!(visible.visible_scores(), sum as u128, "{what}");
        }
    }
}
