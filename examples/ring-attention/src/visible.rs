//! Which keys a query sees, in positions of the whole sequence, and what that is for a block of keys: [`Visible`].
//!
//! A query at position `x` sees the keys `x + offset - left ..= x + offset + right`, and those before `prefix_len`. The library's
//! masks count from the tensors that it is given; here these are a few queries from somewhere against a few keys from elsewhere,
//! and a causal mask at an explicit offset says where they lie.

use std::ops::Range;

use fused_attention::{AttentionConfig, CausalAlignment, Mask};

use crate::RingError;

/// The mask of a whole sequence that attends to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Visible {
    offset: isize,
    left: Option<isize>,
    right: Option<isize>,
    prefix_len: usize,
    seq_len: isize,
}

/// A call of the library: some keys of a block, as they lie in memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) keys: Range<usize>,
    pub(crate) config: AttentionConfig,
}

impl Visible {
    pub(crate) fn new(config: &AttentionConfig, seq_len: usize) -> Result<Self, RingError> {
        // Far beyond every key, and far from overflowing.
        let limit = |limit: usize| limit.min(isize::MAX as usize / 8) as isize;
        let seq_len = limit(seq_len);
        let (offset, right) = match config.mask {
            Mask::Full => (0, config.window.right.map(limit)),
            Mask::Causal(CausalAlignment::BottomRight | CausalAlignment::TopLeft) => (0, Some(0)),
            Mask::Causal(CausalAlignment::Offset(offset)) => (offset.clamp(-(isize::MAX / 8), isize::MAX / 8), Some(0)),
            mask => return Err(RingError::UnknownMask { mask: format!("{mask:?}") }),
        };
        Ok(Self { offset, left: config.window.left.map(limit), right, prefix_len: config.prefix_len, seq_len })
    }

    /// The keys that one query sees, prefix apart; perhaps beyond the sequence.
    pub(crate) fn window_of(&self, position: usize) -> Range<usize> {
        let at = position as isize + self.offset;
        let start = self.left.map_or(0, |left| (at - left).max(0));
        let end = self.right.map_or(isize::MAX, |right| (at + right + 1).max(0));
        start as usize..(end as usize).max(start as usize)
    }

    pub(crate) fn prefix_len(&self) -> usize {
        self.prefix_len
    }

    /// Whether any of these queries sees any of these keys. (The windows of neighbouring queries leave no gap.)
    pub(crate) fn sees_any(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        if queries.is_empty() || keys.is_empty() {
            return false;
        }
        let (first, last) = (self.window_of(queries.start), self.window_of(queries.end - 1));
        keys.start < self.prefix_len || (keys.start < last.end && keys.end > first.start)
    }

    /// Whether every one of these queries sees every one of these keys, by the window alone or by the prefix alone.
    fn sees_all(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        let (first, last) = (self.window_of(queries.start), self.window_of(queries.end - 1));
        keys.end <= self.prefix_len || (keys.end <= first.end && keys.start >= last.start)
    }

    /// Whether nothing but the limit to the right hides any of these keys from any of these queries, and nothing before them.
    fn only_cuts_off_the_end(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        let (first, last) = (self.window_of(queries.start), self.window_of(queries.end - 1));
        keys.start >= self.prefix_len && keys.start >= last.start && keys.start <= first.end
    }

    /// What to call for queries at consecutive positions against a block whose parts, each of consecutive positions, lie one behind
    /// the other in memory. Parts that are wholly visible are one call with their neighbours, and with the one behind them where
    /// that ends at the diagonal: fewer results to merge.
    pub(crate) fn calls(&self, base: &AttentionConfig, queries: &Range<usize>, parts: &[Range<usize>]) -> Vec<Call> {
        let mut full = base.with_window(None, None).with_prefix_len(0);
        full.mask = Mask::Full;
        let mut calls = Vec::new();
        let mut whole: Option<usize> = None; // where parts that are wholly visible begin
        let mut row = 0;
        for part in parts {
            let rows = row..row + part.len();
            row = rows.end;
            let is_seen = self.sees_any(queries, part);
            if is_seen && self.sees_all(queries, part) {
                whole.get_or_insert(rows.start);
                continue;
            }
            let mut start = rows.start;
            if let Some(first) = whole.take() {
                if is_seen && self.only_cuts_off_the_end(queries, part) {
                    start = first;
                } else {
                    calls.push(Call { keys: first..rows.start, config: full });
                }
            }
            if is_seen {
                let mut config = self.config(base, queries, part);
                if start < rows.start {
                    let offset = self.offset_to(queries, part) + (rows.start - start) as isize;
                    config = full.with_causal_alignment(CausalAlignment::Offset(offset));
                }
                calls.push(Call { keys: start..rows.end, config });
            }
        }
        if let Some(start) = whole {
            calls.push(Call { keys: start..row, config: full });
        }
        calls
    }

    /// The causal offset at which the first query sees as far to the right as it may.
    fn offset_to(&self, queries: &Range<usize>, keys: &Range<usize>) -> isize {
        queries.start as isize - keys.start as isize + self.offset + self.right.unwrap_or(self.seq_len)
    }

    /// The mask of these queries against these keys. A limit to the right is a causal mask that begins so much later, from which the
    /// limit to the left lies so much further away; no limit to the right is one beyond every key.
    fn config(&self, base: &AttentionConfig, queries: &Range<usize>, keys: &Range<usize>) -> AttentionConfig {
        let right = self.right.unwrap_or(self.seq_len);
        let left = self.left.map(|left| (left + right) as usize);
        base.with_causal_alignment(CausalAlignment::Offset(self.offset_to(queries, keys)))
            .with_window(left, None)
            .with_prefix_len(self.prefix_len.saturating_sub(keys.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQ_LEN: usize = 12;

    fn masks() -> Vec<AttentionConfig> {
        let (full, causal) = (AttentionConfig::full(), AttentionConfig::causal());
        let offset = |offset| causal.with_causal_alignment(CausalAlignment::Offset(offset));
        let mut masks = vec![full, causal, offset(3), offset(-2), offset(isize::MAX), offset(isize::MIN)];
        for left in [Some(0), Some(2), Some(usize::MAX), None] {
            masks.push(causal.with_window(left, None));
            masks.push(offset(-3).with_window(left, None));
            masks.extend([Some(0), Some(3), Some(usize::MAX), None].map(|right| full.with_window(left, right)));
        }
        let with_prefix = masks.clone().into_iter().flat_map(|mask| [1, 5, 50].map(|len| mask.with_prefix_len(len)));
        let with_prefix: Vec<_> = with_prefix.collect();
        masks.into_iter().chain(with_prefix).collect()
    }

    /// As the library's documentation has it, one query and key at a time; `offset` is the position of the first query.
    fn shows(config: &AttentionConfig, offset: i128, query: usize, key: usize) -> bool {
        let (offset, right) = match config.mask {
            Mask::Causal(CausalAlignment::Offset(offset)) => (offset as i128, Some(0)),
            Mask::Causal(_) => (offset, Some(0)),
            _ => (offset, config.window.right),
        };
        let (at, key) = (query as i128 + offset, key as i128);
        key < config.prefix_len as i128
            || (right.is_none_or(|right| key <= at + right as i128)
                && config.window.left.is_none_or(|left| key >= at - left as i128))
    }

    #[test]
    fn calls_show_what_the_mask_of_the_whole_shows() {
        let parts = [vec![0..4], vec![5..9], vec![0..2, 7..12], vec![2..4, 6..7, 10..11], vec![3..3, 4..6], vec![]];
        for config in masks() {
            let visible = Visible::new(&config, SEQ_LEN).unwrap();
            for queries in (0..SEQ_LEN).flat_map(|start| (start + 1..=SEQ_LEN).map(move |end| start..end)) {
                for parts in &parts {
                    let keys: Vec<usize> = parts.iter().cloned().flatten().collect();
                    let mut times = vec![0; queries.len() * keys.len()];
                    for call in visible.calls(&config, &queries, parts) {
                        for query in 0..queries.len() {
                            for key in 0..call.keys.len() {
                                let is_shown = shows(&call.config, 0, query, key);
                                times[query * keys.len() + call.keys.start + key] += usize::from(is_shown);
                            }
                        }
                    }
                    for (i, query) in queries.clone().enumerate() {
                        for (j, &key) in keys.iter().enumerate() {
                            let expected = usize::from(shows(&config, 0, query, key));
                            let found = times[i * keys.len() + j];
                            assert_eq!(
                                found, expected,
                                "{config:?}: query {query}, key {key} of {queries:?}, {parts:?}"
                            );
                        }
                    }
                    for part in parts.iter().filter(|part| !part.is_empty()) {
                        let any = queries.clone().any(|q| part.clone().any(|key| shows(&config, 0, q, key)));
                        assert_eq!(visible.sees_any(&queries, part), any, "{config:?} {queries:?} {part:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn neighbours_are_one_call() {
        let causal = AttentionConfig::causal();
        let visible = Visible::new(&causal, 16).unwrap();
        let keys =
            |queries| visible.calls(&causal, &queries, &[0..4, 12..16]).into_iter().map(|call| call.keys).collect();
        let found: [Vec<Range<usize>>; 3] = [keys(13..15), keys(5..7), keys(0..3)];
        assert_eq!(found, [vec![0..8], vec![0..4], vec![0..4]]);
    }
}
