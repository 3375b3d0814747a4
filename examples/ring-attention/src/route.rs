//! Which keys are where at which time: [`Route`].
//!
//! Each rank's share is cut into blocks of at most so many keys, the same number of blocks on every rank: *rounds*. In a round, block
//! number `round` of every rank travels once round the ring, a rank further in each step:
//!
//! ```text
//! 3 ranks        rank 0        rank 1        rank 2        a block of rank r in round k: rk
//! own share      all of 0      all of 1      all of 2      (meanwhile 00, 10, 20 are sent)
//! round 0        20            00            10            step 1, sent on meanwhile
//!                10            20            00            step 2, meanwhile 01, 11, 21 are sent
//! round 1        21            01            11            step 1
//! ```
//! so that a rank has two blocks in its memory, the one that it computes with and sends on, and the one that it receives. If all of a share
//! travelled before the next share did, it would have to keep a whole one.
//!
//! A block has a *part* of each of its share's ranges: under zig-zag shares half of it sees and is seen as the first chunk, half as the
//! second, which gives every rank the same work in every step. A part travels as far as the last rank that sees any of it; ranks
//! on the way that do not see it pass it on.

use std::ops::Range;

use crate::shares::{Shares, cut};
use crate::visible::Visible;

/// Some consecutive positions of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) keys: Range<usize>,
    /// How many ranks it travels to.
    hops: usize,
}

/// The way of every block.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub(crate) shares: Shares,
    pub(crate) visible: Visible,
    pub(crate) rounds: usize,
}

impl Route {
    /// Blocks of about `block_keys` keys: at most one more for each range of a share.
    pub(crate) fn new(shares: Shares, visible: Visible, block_keys: usize) -> Self {
        let longest = (0..shares.ranks()).map(|rank| shares.len_of(rank)).max().unwrap_or(0);
        let rounds = if shares.ranks() > 1 { longest.div_ceil(block_keys) } else { 0 };
        Self { shares, visible, rounds }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.shares.ranks()
    }

    /// The parts of a block, empty ones included.
    fn parts(&self, owner: usize, round: usize) -> impl Iterator<Item = Part> {
        let of_round = move |range: &Range<usize>| {
            let keys = cut(range.len(), self.rounds, round);
            range.start + keys.start..range.start + keys.end
        };
        self.shares.of(owner).iter().map(of_round).map(move |keys| Part { hops: self.hops(owner, &keys), keys })
    }

    /// Those that a block still has on its way to the rank `hop` behind its owner's.
    pub(crate) fn carried(&self, owner: usize, round: usize, hop: usize) -> Vec<Part> {
        self.parts(owner, round).filter(|part| !part.keys.is_empty() && part.hops >= hop).collect()
    }

    fn hops(&self, owner: usize, keys: &Range<usize>) -> usize {
        let sees = |hop: &usize| {
            let rank = (owner + hop) % self.ranks();
            self.shares.of(rank).iter().any(|queries| self.visible.sees_any(queries, keys))
        };
        (1..self.ranks()).rev().find(sees).unwrap_or(0)
    }

    /// Keys of the largest block.
    pub(crate) fn most_keys(&self) -> usize {
        let of_rank = |rank| self.shares.of(rank).iter().map(|range| range.len().div_ceil(self.rounds)).sum();
        if self.rounds == 0 { 0 } else { (0..self.ranks()).map(of_rank).max().unwrap_or(0) }
    }
}

impl Part {
    /// Whether it goes on to the rank `hop` behind its owner's.
    pub(crate) fn reaches(&self, hop: usize) -> bool {
        self.hops >= hop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fused_attention::AttentionConfig;

    fn route(shares: Shares, config: AttentionConfig, block_keys: usize) -> Route {
        let visible = Visible::new(&config, shares.seq_len()).unwrap();
        Route::new(shares, visible, block_keys)
    }

    /// Keys that each rank is sent in all rounds, in ascending order.
    fn sent_to(route: &Route) -> Vec<Vec<usize>> {
        let mut sent = vec![Vec::new(); route.ranks()];
        for round in 0..route.rounds {
            for owner in 0..route.ranks() {
                for hop in 1..route.ranks() {
                    let keys = route.carried(owner, round, hop).into_iter().flat_map(|part| part.keys);
                    sent[(owner + hop) % route.ranks()].extend(keys);
                }
            }
        }
        sent.iter_mut().for_each(|keys| keys.sort_unstable());
        sent
    }

    #[test]
    fn every_visible_key_reaches_every_rank_once() {
        let configs = [
            AttentionConfig::full(),
            AttentionConfig::causal(),
            AttentionConfig::sliding_window(5),
            AttentionConfig::sliding_window(5).with_prefix_len(3),
            AttentionConfig::full().with_window(Some(2), Some(3)),
        ];
        for (ranks, seq_len, block_keys) in [(1, 9, 4), (2, 3, 1), (3, 31, 4), (4, 50, 7), (5, 64, 1000), (4, 2, 8)] {
            let shares = [Shares::zig_zag(seq_len, ranks), Shares::contiguous(seq_len, ranks)];
            for (config, shares) in configs.iter().flat_map(|config| shares.clone().map(|shares| (config, shares))) {
                let route = route(shares, *config, block_keys);
                for (rank, sent) in sent_to(&route).into_iter().enumerate() {
                    assert!(sent.is_sorted_by(|a, b| a < b), "{route:?}: a key comes twice to rank {rank}");
                    let seen = |key: usize| {
                        let key = key..key + 1;
                        route.shares.of(rank).iter().any(|queries| route.visible.sees_any(queries, &key))
                    };
                    let own: Vec<usize> = route.shares.positions(rank).collect();
                    let missing = (0..seq_len).find(|key| seen(*key) && !own.contains(key) && !sent.contains(key));
                    assert_eq!(missing, None, "{route:?}: rank {rank}");
                }
            }
        }
    }

    #[test]
    fn blocks_that_nobody_sees_stay() {
        // Causal, in order: rank 0 is sent nothing, and the last rank's keys stay with it.
        let causal = route(Shares::contiguous(40, 4), AttentionConfig::causal(), 5);
        let before = |rank: usize| (0..10 * rank).collect::<Vec<_>>();
        assert_eq!(sent_to(&causal), [before(0), before(1), before(2), before(3)]);
        // A window of 6 keys reaches one block of 5 back, and with its first query alone no further.
        let window = route(Shares::contiguous(40, 4), AttentionConfig::sliding_window(6), 5);
        assert_eq!(sent_to(&window), [vec![], (5..10).collect(), (15..20).collect(), (25..30).collect::<Vec<_>>()]);
        // The last chunk of zig-zag shares is rank 0's, and nobody else sees it.
        let zig_zag = route(Shares::zig_zag(40, 4), AttentionConfig::causal(), 5);
        assert!(sent_to(&zig_zag).iter().flatten().all(|&key| key < 35));
    }

    #[test]
    fn no_block_is_larger_than_said() {
        for (ranks, seq_len, block_keys) in [(2, 100, 7), (3, 1000, 64), (4, 5, 2), (3, 10, 100)] {
            let shares = [Shares::zig_zag(seq_len, ranks), Shares::with_lens(&vec![seq_len; ranks])];
            for route in shares.map(|shares| route(shares, AttentionConfig::causal(), block_keys)) {
                let keys =
                    |owner, round| route.carried(owner, round, 1).iter().map(|part| part.keys.len()).sum::<usize>();
                let largest = (0..ranks).flat_map(|owner| (0..route.rounds).map(move |round| (owner, round)));
                let largest = largest.map(|(owner, round)| keys(owner, round)).max().unwrap();
                assert!(largest <= route.most_keys(), "{largest} keys: {route:?}");
                assert!(route.most_keys() <= block_keys + 2, "{route:?}");
            }
        }
    }
}
