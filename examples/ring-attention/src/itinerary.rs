//! One rank's part in the [`Route`]: what it holds, sends and receives in each step, and where that lies in memory.

use std::ops::Range;

use crate::RingShape;
use crate::route::{Part, Route};

/// The steps of one rank. A *lane* is a KV head of a sequence of the batch; a *turn* is a lane and a round, in which blocks travel
/// once round the ring.
#[derive(Debug, Clone)]
pub(crate) struct Itinerary {
    route: Route,
    shape: RingShape,
    rank: usize,
}

/// A block of another rank that is here: that of `turn`, after `step` steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Visit {
    turn: usize,
    step: usize,
}

impl Itinerary {
    pub(crate) fn new(route: Route, shape: &RingShape, rank: usize) -> Self {
        Self { route, shape: *shape, rank }
    }

    pub(crate) fn lanes(&self) -> usize {
        self.shape.batch * self.shape.num_kv_heads
    }

    pub(crate) fn lane(&self, visit: Visit) -> usize {
        visit.turn / self.route.rounds
    }

    /// What comes after this visit, or after the rank's own keys.
    pub(crate) fn next(&self, visit: Option<Visit>) -> Option<Visit> {
        let turn = match visit {
            Some(Visit { turn, step }) if step + 1 < self.route.ranks() => return Some(Visit { turn, step: step + 1 }),
            Some(Visit { turn, .. }) => turn + 1,
            None => 0,
        };
        (turn < self.lanes() * self.route.rounds).then_some(Visit { turn, step: 1 })
    }

    fn owner(&self, visit: Visit) -> usize {
        (self.rank + self.route.ranks() - visit.step) % self.route.ranks()
    }

    fn parts(&self, visit: Visit) -> Vec<Part> {
        self.route.carried(self.owner(visit), visit.turn % self.route.rounds, visit.step)
    }

    /// Where each part of a block lies in its slot, `[K of each part | V of each part]`.
    fn segments(&self, parts: &[Part]) -> Vec<Range<usize>> {
        let mut end = 0;
        let sizes = [self.shape.head_dim, self.shape.value_dim];
        let lens = sizes.into_iter().flat_map(|dim| parts.iter().map(move |part| part.keys.len() * dim));
        let segment = |len| {
            let start = end;
            end += len;
            start..end
        };
        lens.map(segment).collect()
    }

    /// Where to receive the block of this visit: a message for each piece.
    pub(crate) fn received<'a, K>(&self, visit: Visit, slot: &'a mut [K]) -> Vec<&'a mut [K]> {
        let mut rest = slot;
        let cut = |segment: Range<usize>| {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(segment.len());
            rest = behind;
            piece
        };
        self.segments(&self.parts(visit)).into_iter().map(cut).collect()
    }

    /// What is sent while `visit` (`None`: the rank's own keys) is computed with: that block, if it goes on, or the rank's own
    /// next one.
    pub(crate) fn sent<'a, K>(&self, visit: Option<Visit>, slot: &'a [K], own: [&'a [K]; 2]) -> Vec<&'a [K]> {
        match visit {
            Some(visit) if visit.step + 1 < self.route.ranks() => {
                let parts = self.parts(visit);
                let segments = self.segments(&parts).into_iter().zip(parts.iter().cycle());
                let passed_on = segments.filter(|(_, part)| part.reaches(visit.step + 1));
                passed_on.map(|(segment, _)| &slot[segment]).collect()
            }
            _ => match self.next(visit) {
                Some(next) => self.own_block(next.turn, own),
                None => Vec::new(),
            },
        }
    }

    fn own_block<'a, K>(&self, turn: usize, own: [&'a [K]; 2]) -> Vec<&'a [K]> {
        let (lane, round) = (turn / self.route.rounds, turn % self.route.rounds);
        let parts = self.route.carried(self.rank, round, 1);
        let lanes = self.own_lane(own, lane).into_iter().zip([self.shape.head_dim, self.shape.value_dim]);
        let piece = |(elements, dim): (&'a [K], usize), part: &Part| {
            let first = self.own_index(part.keys.start);
            &elements[first * dim..(first + part.keys.len()) * dim]
        };
        lanes.flat_map(|lane| parts.iter().map(move |part| piece(lane, part))).collect()
    }

    /// Where in this rank's share a position is that it owns.
    fn own_index(&self, position: usize) -> usize {
        let before = |range: &Range<usize>| position.clamp(range.start, range.end) - range.start;
        self.own_positions().iter().map(before).sum()
    }

    /// The keys and values of a block, and their positions.
    pub(crate) fn visitor<'a, K>(&self, visit: Visit, slot: &'a [K]) -> (Vec<Range<usize>>, [&'a [K]; 2]) {
        let parts: Vec<_> = self.parts(visit).into_iter().map(|part| part.keys).collect();
        let keys: usize = parts.iter().map(ExactSizeIterator::len).sum();
        let (k, behind) = slot.split_at(keys * self.shape.head_dim);
        (parts, [k, &behind[..keys * self.shape.value_dim]])
    }

    /// One KV head of the rank's own keys and values.
    pub(crate) fn own_lane<'a, K>(&self, [k, v]: [&'a [K]; 2], lane: usize) -> [&'a [K]; 2] {
        let [k_len, v_len] = [self.shape.head_dim, self.shape.value_dim].map(|dim| self.own_len() * dim);
        [&k[lane * k_len..][..k_len], &v[lane * v_len..][..v_len]]
    }

    pub(crate) fn own_positions(&self) -> &[Range<usize>] {
        self.route.shares.of(self.rank)
    }

    pub(crate) fn own_len(&self) -> usize {
        self.route.shares.len_of(self.rank)
    }

    /// Positions of a rank, and the elements of its Q, K, V, output and logsumexp.
    pub(crate) fn lens_of(&self, rank: usize) -> (usize, [usize; 5]) {
        let RingShape { batch, num_heads, num_kv_heads, head_dim, value_dim } = self.shape;
        let positions = self.route.shares.len_of(rank);
        let (rows, keys) = (batch * num_heads * positions, batch * num_kv_heads * positions);
        (positions, [rows * head_dim, keys * head_dim, keys * value_dim, rows * value_dim, rows])
    }

    /// A step of the ring, in words.
    pub(crate) fn name(&self, visit: Option<Visit>) -> String {
        match visit {
            None => "with its own keys".to_owned(),
            Some(visit) => {
                let turns = self.lanes() * self.route.rounds;
                format!("turn {} of {turns}, with the keys of rank {}", visit.turn + 1, self.owner(visit))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::Shares;
    use crate::visible::Visible;
    use fused_attention::AttentionConfig;

    /// All ranks in lockstep, with copies in place of messages: every block holds the keys that it says.
    #[test]
    fn what_is_sent_is_what_the_next_rank_expects() {
        let configs = [AttentionConfig::full(), AttentionConfig::causal(), AttentionConfig::sliding_window(4)];
        for (ranks, seq_len, block_keys) in [(2, 9, 2), (3, 31, 5), (4, 50, 7), (4, 2, 8), (5, 0, 1)] {
            for (config, zig_zag) in configs.iter().flat_map(|config| [(config, true), (config, false)]) {
                let shape = RingShape { batch: 2, num_heads: 4, num_kv_heads: 2, head_dim: 3, value_dim: 2 };
                let cut = if zig_zag { Shares::zig_zag } else { Shares::contiguous };
                let visible = Visible::new(config, seq_len).unwrap();
                let route = Route::new(cut(seq_len, ranks), visible, block_keys);
                let itinerary = |rank| Itinerary::new(route.clone(), &shape, rank);
                let itineraries: Vec<_> = (0..ranks).map(itinerary).collect();
                // Elements say which lane, position and feature they are; those of V are negative.
                let element = |lane: usize, position: usize, d: usize| (1 + (lane * 100 + position) * 10 + d) as i64;
                let owned = |rank: usize, dim: usize, sign: i64| {
                    let lanes =
                        (0..4).flat_map(|lane| route.shares.positions(rank).map(move |position| (lane, position)));
                    let elements = lanes.flat_map(|(lane, p)| (0..dim).map(move |d| sign * element(lane, p, d)));
                    elements.collect::<Vec<i64>>()
                };
                let own: Vec<_> = (0..ranks).map(|rank| [owned(rank, 3, 1), owned(rank, 2, -1)]).collect();
                let mut slots = vec![vec![0i64; route.most_keys() * 5]; ranks];
                let mut visit = None;
                while let Some(next) = itineraries[0].next(visit) {
                    let mut incoming = vec![vec![0i64; route.most_keys() * 5]; ranks];
                    for (rank, slot) in slots.iter().enumerate() {
                        let sent = itineraries[rank].sent(visit, slot, [&own[rank][0], &own[rank][1]]);
                        let to = (rank + 1) % ranks;
                        let received = itineraries[to].received(next, &mut incoming[to]);
                        assert_eq!(sent.len(), received.len(), "{route:?}");
                        received.into_iter().zip(sent).for_each(|(to, from)| to.copy_from_slice(from));
                    }
                    slots = incoming;
                    for (rank, slot) in slots.iter().enumerate() {
                        let (parts, [k, v]) = itineraries[rank].visitor(next, slot);
                        let lane = itineraries[rank].lane(next);
                        let keys = || parts.iter().cloned().flatten();
                        let expected = |dim: usize, sign: i64| {
                            keys().flat_map(|p| (0..dim).map(move |d| sign * element(lane, p, d))).collect::<Vec<i64>>()
                        };
                        assert_eq!((k, v), (&expected(3, 1)[..], &expected(2, -1)[..]), "{route:?} rank {rank}");
                    }
                    visit = Some(next);
                }
            }
        }
    }
}
