//! Who owns which positions of the sequence: [`Shares`].

use std::ops::Range;

use fused_attention::{AttentionConfig, Mask};

/// The positions of a sequence, each owned by one rank. A rank holds Q, K and V of its positions, in ascending order.
///
/// ```text
/// zig_zag(16, 2)        0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0      rank r owns chunks r and 2n - 1 - r of 2n
/// contiguous(16, 2)     0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1
/// with_lens(&[5, 11])   0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares {
    /// Not empty, ascending, never adjacent.
    of_ranks: Vec<Vec<Range<usize>>>,
    seq_len: usize,
}

impl Shares {
    /// Under a causal mask every rank has the same work, and the same in every step of the ring: of a block from a rank below, both
    /// of its chunks see the first half; of a block from a rank above, its second chunk sees both halves.
    pub fn zig_zag(seq_len: usize, ranks: usize) -> Self {
        let chunk = |i| cut(seq_len, 2 * ranks, i);
        Self::new(seq_len, (0..ranks).map(|rank| vec![chunk(rank), chunk(2 * ranks - 1 - rank)]).collect())
    }

    /// Where every query sees as many keys: a full mask, a window.
    pub fn contiguous(seq_len: usize, ranks: usize) -> Self {
        Self::new(seq_len, (0..ranks).map(|rank| vec![cut(seq_len, ranks, rank)]).collect())
    }

    /// So many positions for each rank, one behind the other: for machines of different speeds.
    pub fn with_lens(lens: &[usize]) -> Self {
        let mut end = 0;
        let next = |&len: &usize| {
            let start = end;
            end += len;
            vec![start..end]
        };
        let of_ranks = lens.iter().map(next).collect();
        Self::new(end, of_ranks)
    }

    /// [`zig_zag`](Self::zig_zag) under a causal mask without a window, else [`contiguous`](Self::contiguous).
    pub fn for_mask(config: &AttentionConfig, seq_len: usize, ranks: usize) -> Self {
        match config.mask {
            Mask::Causal(_) if config.window.left.is_none() => Self::zig_zag(seq_len, ranks),
            _ => Self::contiguous(seq_len, ranks),
        }
    }

    fn new(seq_len: usize, of_ranks: Vec<Vec<Range<usize>>>) -> Self {
        let joined = |ranges: Vec<Range<usize>>| {
            let mut joined: Vec<Range<usize>> = Vec::new();
            for range in ranges.into_iter().filter(|range| !range.is_empty()) {
                match joined.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => joined.push(range),
                }
            }
            joined
        };
        Self { of_ranks: of_ranks.into_iter().map(joined).collect(), seq_len }
    }

    /// Positions of the whole sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Ranks that share them.
    pub fn ranks(&self) -> usize {
        self.of_ranks.len()
    }

    /// What a rank owns: ranges in ascending order, none of them empty.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn of(&self, rank: usize) -> &[Range<usize>] {
        &self.of_ranks[rank]
    }

    /// How many positions a rank owns.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn len_of(&self, rank: usize) -> usize {
        self.of(rank).iter().map(ExactSizeIterator::len).sum()
    }

    /// A rank's positions, one after the other.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn positions(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.of(rank).iter().cloned().flatten()
    }

    /// By which ranks tell that they were given the same shares (FNV-1a of all bounds).
    pub(crate) fn fingerprint(&self) -> u64 {
        let bounds = self.of_ranks.iter().enumerate().flat_map(|(rank, ranges)| {
            ranges.iter().flat_map(move |range| [rank as u64, range.start as u64, range.end as u64])
        });
        bounds.fold(0xcbf2_9ce4_8422_2325, |hash, x| (hash ^ x).wrapping_mul(0x100_0000_01b3))
    }
}

/// Piece `i` of `pieces`, whose lengths differ by at most 1.
pub(crate) fn cut(len: usize, pieces: usize, i: usize) -> Range<usize> {
    let bound = |i: usize| (len as u128 * i as u128 / pieces as u128) as usize;
    bound(i)..bound(i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_has_one_owner() {
        for seq_len in [0, 1, 2, 3, 7, 8, 9, 100, 1001] {
            for ranks in 1..=9 {
                for shares in [Shares::zig_zag(seq_len, ranks), Shares::contiguous(seq_len, ranks)] {
                    let mut owned: Vec<usize> = (0..ranks).flat_map(|rank| shares.positions(rank)).collect();
                    owned.sort_unstable();
                    assert_eq!(owned, (0..seq_len).collect::<Vec<_>>(), "{shares:?}");
                    let lens = (0..ranks).map(|rank| shares.len_of(rank));
                    assert!(lens.clone().max().unwrap() - lens.min().unwrap() <= 2, "{shares:?}");
                }
            }
        }
        assert_eq!(Shares::with_lens(&[5, 0, 2]).of_ranks, [vec![0..5], vec![], vec![5..7]]);
    }

    #[test]
    fn neighbouring_chunks_are_one_range() {
        assert_eq!(Shares::zig_zag(16, 2).of_ranks, [vec![0..4, 12..16], vec![4..12]]);
        assert_eq!(Shares::zig_zag(10, 1).of_ranks, [vec![0..10]]);
    }

    #[test]
    fn zig_zag_gives_every_rank_the_same_work() {
        let shares = Shares::zig_zag(1 << 12, 8);
        let work: Vec<usize> = (0..8).map(|rank| shares.positions(rank).map(|position| position + 1).sum()).collect();
        assert!(work.iter().all(|&other| other == work[0]), "{work:?}");
    }

    #[test]
    fn other_shares_have_another_fingerprint() {
        let all =
            [Shares::zig_zag(64, 2), Shares::contiguous(64, 2), Shares::with_lens(&[31, 33]), Shares::zig_zag(64, 4)];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a.fingerprint() != b.fingerprint()));
        }
    }
}
