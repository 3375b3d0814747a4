//! Everything that happens to scores between Q K^T and the softmax, in one pass over them while they lie in L1: softcap, ALiBi, a user's
//! function, bias, mask. Calls that have none of these do not come here.
//!
//! It is dispatched on its own, once for each tile of scores (some microseconds of work), so that the micro-tiles are compiled
//! without knowing of it, and a user's function in the user's crate.

use std::ops::Range;

use pulp::Simd;

use crate::kernels::lane::{Lane, as_rows};
use crate::kernels::stored::Stored;
use crate::kernels::transpose::SIDE;
use crate::kernels::{MAX_LANES, MAX_PANEL_ROWS, WithTiles};
use crate::operands::{OperandRows, Operands};
use crate::packing::Packing;
use crate::row_block::RowBlock;
use crate::score_modifier::{Alibi, Lanes, MAX_PARAMETERS, ScoreContext, ScoreModifier, Softcap, Unmodified};
use crate::task::TaskKernels;
use crate::{AttentionInputs, AttentionPlan, Element, InstructionSet};

/// Scores of a panel, rows in the lanes. Scaled.
pub(crate) struct ScoreTile<'t, A> {
    pub(crate) task: &'t RowBlock,
    pub(crate) first_row: usize,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    /// `[keys][panel_rows]`
    pub(crate) scores: &'t mut [A],
    /// `[panel_rows]`, raised to each row's largest score, where wanted. NaN may count or not.
    pub(crate) max: Option<&'t mut [A]>,
}

/// Scores of one row, keys in the lanes. To be scaled first.
pub(crate) struct ScoreRow<'t, A> {
    pub(crate) task: &'t RowBlock,
    pub(crate) row: usize,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
    /// At least `keys`, and whole vectors.
    pub(crate) scores: &'t mut [A],
    pub(crate) scale: A,
}

/// What `prefill` and `decode` know of it.
pub(crate) trait ScorePass<A>: Sync {
    /// Modifies a tile. True where it hid any key from any row.
    fn modify_tile(&self, tile: ScoreTile<'_, A>) -> bool;
    /// Scales and modifies a row. True where it hid any key.
    fn modify_row(&self, row: ScoreRow<'_, A>) -> bool;
    /// Whether mask or bias hide this key from `[batch, head, query]`.
    fn hides(&self, index: [usize; 3], key: usize) -> bool;
    /// From the first to the last of these keys that the mask, which is cheap to ask, shows to any of these rows.
    fn shown(&self, task: &RowBlock, rows: Range<usize>, keys: Range<usize>) -> Range<usize>;
    /// Whether it may hide keys at all.
    fn may_hide(&self) -> bool;
}

/// The pass of a call.
pub(crate) struct CallPass<'a, T, M> {
    set: InstructionSet,
    modifiers: Modifiers<'a, M>,
    operands: Operands<'a, T>,
}

/// The functions of a score that a call has.
pub(crate) struct Modifiers<'a, M> {
    softcap: Option<Softcap>,
    alibi: Option<Alibi<'a>>,
    custom: &'a M,
}

impl<'a, T: Element> CallPass<'a, T, Unmodified> {
    /// What the crate itself has to do, if anything. The inputs are checked.
    pub(crate) fn built_in<K>(plan: &AttentionPlan<T::Acc>, inputs: &AttentionInputs<'a, T, K>) -> Option<Self> {
        let pass = Self::new(plan, inputs, &Unmodified);
        let Modifiers { softcap, alibi, .. } = &pass.modifiers;
        (softcap.is_some() || alibi.is_some() || !pass.operands.is_empty()).then_some(pass)
    }
}

impl<'a, T: Element, M: ScoreModifier> CallPass<'a, T, M> {
    /// The inputs are checked.
    pub(crate) fn new<K>(plan: &AttentionPlan<T::Acc>, inputs: &AttentionInputs<'a, T, K>, custom: &'a M) -> Self {
        let (softcap, alibi) = (plan.softcap.map(Softcap), inputs.alibi_slopes.map(Alibi));
        let modifiers = Modifiers { softcap, alibi, custom };
        Self { set: plan.instruction_set, modifiers, operands: Operands::new(inputs) }
    }
}

/// A pass with a user's function.
pub(crate) struct CustomPass<'a, T, M>(CallPass<'a, T, M>);

impl<'a, T: Element, M: ScoreModifier> CustomPass<'a, T, M> {
    /// The inputs are checked.
    pub(crate) fn new<K>(plan: &AttentionPlan<T::Acc>, inputs: &AttentionInputs<'a, T, K>, custom: &'a M) -> Self {
        Self(CallPass::new(plan, inputs, custom))
    }
}

macro_rules! score_pass {
    ($pass:ty, [$($parameters:tt)*], $self:ident => $call:expr, $tile:expr, $row:expr) => {
        impl<$($parameters)*> ScorePass<T::Acc> for $pass {
            fn modify_tile(&$self, tile: ScoreTile<'_, T::Acc>) -> bool {
                let CallPass { set, modifiers, operands } = $call;
                $tile(*set, TileOp { modifiers, operands, tile })
            }
            fn modify_row(&$self, row: ScoreRow<'_, T::Acc>) -> bool {
                let CallPass { set, modifiers, operands } = $call;
                $row(*set, RowOp { modifiers, operands, row })
            }
            fn hides(&$self, index: [usize; 3], key: usize) -> bool {
                $call.operands.hides::<T::Acc>(index, key)
            }
            fn shown(&$self, task: &RowBlock, rows: Range<usize>, keys: Range<usize>) -> Range<usize> {
                $call.operands.shown(task, rows, keys)
            }
            fn may_hide(&$self) -> bool {
                !$call.operands.is_empty()
            }
        }
    };
}

score_pass!(CallPass<'_, T, Unmodified>, [T: Element], self => self, <T as Packing<T::Acc>>::modify_tile, <T as Packing<T::Acc>>::modify_row);
score_pass!(CustomPass<'_, T, M>, [T: Element, M: ScoreModifier], self => &self.0, <T::Acc as TaskKernels>::run, <T::Acc as TaskKernels>::run);

/// [`ScorePass::modify_tile`] as vector code.
pub(crate) struct TileOp<'p, 't, T, A, M> {
    modifiers: &'p Modifiers<'p, M>,
    operands: &'p Operands<'p, T>,
    tile: ScoreTile<'t, A>,
}

impl<T: Stored<A>, A: Lane, M: ScoreModifier> WithTiles for TileOp<'_, '_, T, A, M> {
    type Output = bool;

    /// A few keys at a time, function after function: they stay in L1, and the code grows with the functions, not with
    /// their combinations.
    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) -> bool {
        let Modifiers { softcap, alibi, custom } = self.modifiers;
        let ScoreTile { task, first_row, first_key, keys, scores, max } = self.tile;
        let panel_rows = task.panel_rows;
        // One group of vectors, but several where a wide portable set has this done by the narrow one.
        let group_rows = ROW_VECTORS * A::lanes::<S>();
        let groups = panel_rows / group_rows;
        assert_eq!(panel_rows, groups * group_rows);
        let has_operands = !self.operands.is_empty();
        let operands = OperandRows::<T, MAX_PANEL_ROWS>::new(self.operands, task, (first_row, panel_rows), first_key);
        let mut bias = [A::ZERO; SIDE * MAX_PANEL_ROWS];

        let [zero, one] = [0, 1].map(|x| A::splat(simd, A::from_index(x)));
        let (negative_infinity, lowest) = (A::splat(simd, A::NEG_INFINITY), A::splat(simd, A::LOWEST));
        let scores = &mut as_rows::<S, A, ROW_VECTORS>(scores)[..keys * groups];
        let mut max = max;
        let mut any = zero;
        for group in 0..groups {
            let rows = PanelContext::<S, A, ROW_VECTORS>::new(simd, task, first_row + group * group_rows, first_key);
            let no_parameters = rows.parameters(simd, &Unmodified);
            let slopes = match alibi {
                Some(alibi) => rows.parameters(simd, alibi),
                None => no_parameters,
            };
            let parameters = rows.parameters(simd, *custom);
            let mut largest = [negative_infinity; ROW_VECTORS];
            let mut has_hidden = [zero; ROW_VECTORS]; // 1 in lanes that have
            let mut first = 0;
            while first < keys {
                let count = SIDE.min(keys - first);
                let has_bias = has_operands && operands.tile::<S, A>(simd, (first, count), &mut bias);
                for key in 0..count {
                    let at = rows.at(simd, first + key);
                    let scores = &mut scores[(first + key) * groups + group];
                    for vector in 0..ROW_VECTORS {
                        // All of it in registers. [measured, T = 2048, head_dim 128, AVX-512] ALiBi 0.96 to 0.99 of the rate without, 0.92 when each
                        // modifier went over eight keys in memory; a bias 0.83, was 0.80.
                        let mut score = scores[vector];
                        if let Some(softcap) = softcap {
                            score = rows.modify(simd, softcap, &no_parameters, (&at, vector), score);
                        }
                        if let Some(alibi) = alibi {
                            score = rows.modify(simd, alibi, &slopes, (&at, vector), score);
                        }
                        score = rows.modify(simd, *custom, &parameters, (&at, vector), score);
                        if has_bias {
                            let lane = group * group_rows + vector * A::lanes::<S>();
                            let bias = A::load_slice::<S>(&bias[key * panel_rows + lane..]);
                            let is_hidden = A::less_than(simd, bias, lowest);
                            score = A::select(simd, is_hidden, negative_infinity, A::add(simd, score, bias));
                            has_hidden[vector] = A::select(simd, is_hidden, one, has_hidden[vector]);
                        }
                        largest[vector] = A::max(simd, score, largest[vector]);
                        scores[vector] = score;
                    }
                }
                first += count;
            }
            if let Some(max) = &mut max {
                let max = &mut as_rows::<S, A, ROW_VECTORS>(max)[group];
                for vector in 0..ROW_VECTORS {
                    max[vector] = A::max(simd, largest[vector], max[vector]);
                }
            }
            for vector in 0..ROW_VECTORS {
                any = A::max(simd, any, has_hidden[vector]);
            }
        }
        !A::reduce_max(simd, any).is_zero()
    }
}

/// What a modifier may ask of the rows of a panel.
struct PanelContext<'t, S: Simd, A: Lane, const ROW_VECTORS: usize> {
    task: &'t RowBlock,
    first_row: usize,
    first_key: usize,
    queries: [A::Vector<S>; ROW_VECTORS],
    /// From each row's position to the first key of the block.
    distances: [A::Vector<S>; ROW_VECTORS],
}

impl<'t, S: Simd, A: Lane, const ROW_VECTORS: usize> PanelContext<'t, S, A, ROW_VECTORS> {
    #[inline(always)]
    fn new(simd: S, task: &'t RowBlock, first_row: usize, first_key: usize) -> Self {
        let zero = A::splat(simd, A::ZERO);
        let (queries, distances) = ([zero; ROW_VECTORS], [zero; ROW_VECTORS]);
        let mut context = Self { task, first_row, first_key, queries, distances };
        let numbers = row_numbers::<A>(task, first_row, first_key, ROW_VECTORS * A::lanes::<S>());
        for vector in 0..ROW_VECTORS {
            context.queries[vector] = A::load_slice::<S>(&numbers[0][vector * A::lanes::<S>()..]);
            context.distances[vector] = A::load_slice::<S>(&numbers[1][vector * A::lanes::<S>()..]);
        }
        context
    }

    #[inline(always)]
    fn parameters<N: ScoreModifier>(&self, simd: S, modifier: &N) -> [[Lanes<S, A>; MAX_PARAMETERS]; ROW_VECTORS] {
        const { assert!(N::PARAMETERS <= MAX_PARAMETERS, "a score modifier has too many parameters") };
        let mut vectors = [[Lanes::new(simd, A::splat(simd, A::ZERO)); MAX_PARAMETERS]; ROW_VECTORS];
        for slot in 0..N::PARAMETERS {
            let lanes = ROW_VECTORS * A::lanes::<S>();
            let values = parameter_of_rows::<A, N>(modifier, slot, (self.task, self.first_row), lanes);
            for vector in 0..ROW_VECTORS {
                let values = A::load_slice::<S>(&values[vector * A::lanes::<S>()..]);
                vectors[vector][slot] = Lanes::new(simd, values);
            }
        }
        vectors
    }

    /// The number of a key of the block, counted from the start of the block and of the tensor.
    #[inline(always)]
    fn at(&self, simd: S, key: usize) -> [A::Vector<S>; 2] {
        [key, self.first_key + key].map(|key| A::splat(simd, A::from_index(key)))
    }

    /// A vector of scores of a key.
    #[inline(always)]
    fn modify<N: ScoreModifier>(
        &self,
        simd: S,
        modifier: &N,
        parameters: &[[Lanes<S, A>; MAX_PARAMETERS]; ROW_VECTORS],
        ([in_block, in_tensor], vector): (&[A::Vector<S>; 2], usize),
        score: A::Vector<S>,
    ) -> A::Vector<S> {
        let at = ScoreContext {
            query: Lanes::new(simd, self.queries[vector]),
            key: Lanes::new(simd, *in_tensor),
            distance: Lanes::new(simd, A::sub(simd, self.distances[vector], *in_block)),
            parameters: &parameters[vector][..N::PARAMETERS],
        };
        modifier.modify(Lanes::<S, A>::new(simd, score), &at).vector
    }
}

/// The row of the task in a lane of a panel. Lanes past the last row have that one; nobody reads their results.
fn row_of(task: &RowBlock, first_row: usize, lane: usize) -> usize {
    (first_row + lane).min(task.rows - 1)
}

/// Queries of the rows of a panel, and distances from their positions to a key. Not inlined, like the next: plain code that would be unrolled
/// over the lanes in each set's copy of the pass.
#[inline(never)]
fn row_numbers<A: Lane>(task: &RowBlock, first_row: usize, first_key: usize, lanes: usize) -> [[A; MAX_PANEL_ROWS]; 2] {
    let mut numbers = [[A::ZERO; MAX_PANEL_ROWS]; 2];
    for lane in 0..lanes {
        let row = row_of(task, first_row, lane);
        numbers[0][lane] = A::from_index(task.index(row)[2]);
        numbers[1][lane] = from_difference(task.position(row), first_key);
    }
    numbers
}

/// A parameter of a modifier for the rows of a panel.
#[inline(never)]
fn parameter_of_rows<A: Lane, N: ScoreModifier>(
    modifier: &N,
    slot: usize,
    (task, first_row): (&RowBlock, usize),
    lanes: usize,
) -> [A; MAX_PANEL_ROWS] {
    let mut values = [A::ZERO; MAX_PANEL_ROWS];
    for (lane, value) in values[..lanes].iter_mut().enumerate() {
        let [batch, head, _] = task.index(row_of(task, first_row, lane));
        *value = A::from_f64(modifier.parameter(slot, batch, head));
    }
    values
}

/// `position - key`, subtracted as integers: exact where the difference is.
#[inline(always)]
fn from_difference<A: Lane>(position: isize, key: usize) -> A {
    let difference = position.saturating_sub_unsigned(key);
    let size = A::from_index(difference.unsigned_abs());
    if difference < 0 { size.mul_scalar(A::from_f64(-1.0)) } else { size }
}

/// [`ScorePass::modify_row`] as vector code.
pub(crate) struct RowOp<'p, 't, T, A, M> {
    modifiers: &'p Modifiers<'p, M>,
    operands: &'p Operands<'p, T>,
    row: ScoreRow<'t, A>,
}

impl<T: Stored<A>, A: Lane, M: ScoreModifier> WithTiles for RowOp<'_, '_, T, A, M> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd, const TILE: usize, const SHORT: usize, const ROW_VECTORS: usize>(self, simd: S) -> bool {
        let Modifiers { softcap, alibi, custom } = self.modifiers;
        let ScoreRow { task, row, first_key, keys, scores, scale } = self.row;
        let lanes = A::lanes::<S>();
        let scale = A::splat(simd, scale);
        let mut first = 0;
        while first < keys {
            let scores = &mut scores[first..][..lanes];
            A::store_slice::<S>(scores, A::mul(simd, A::load_slice::<S>(scores), scale));
            first += lanes;
        }
        if let Some(softcap) = softcap {
            apply_to_row(simd, softcap, (task, row), (first_key, keys), &mut *scores);
        }
        if let Some(alibi) = alibi {
            apply_to_row(simd, alibi, (task, row), (first_key, keys), &mut *scores);
        }
        apply_to_row(simd, *custom, (task, row), (first_key, keys), &mut *scores);
        if self.operands.is_empty() {
            return false;
        }

        let operands = OperandRows::<T, 1>::new(self.operands, task, (row, 1), first_key);
        let [zero, one] = [0, 1].map(|x| A::splat(simd, A::from_index(x)));
        let (negative_infinity, lowest) = (A::splat(simd, A::NEG_INFINITY), A::splat(simd, A::LOWEST));
        let mut has_hidden = zero; // 1 in lanes that have
        let mut first = 0;
        while first < keys {
            let scores = &mut scores[first..][..lanes];
            let bias = operands.vector::<S, A>(simd, first, keys - first);
            let is_hidden = A::less_than(simd, bias, lowest);
            let sum = A::add(simd, A::load_slice::<S>(scores), bias);
            A::store_slice::<S>(scores, A::select(simd, is_hidden, negative_infinity, sum));
            has_hidden = A::select(simd, is_hidden, one, has_hidden);
            first += lanes;
        }
        !A::reduce_max(simd, has_hidden).is_zero()
    }
}

/// A modifier on the scores of one row. `scores` are whole vectors, of keys from `first_key` on.
#[inline(always)]
fn apply_to_row<S: Simd, A: Lane, N: ScoreModifier>(
    simd: S,
    modifier: &N,
    (task, row): (&RowBlock, usize),
    (first_key, keys): (usize, usize),
    scores: &mut [A],
) {
    const { assert!(N::PARAMETERS <= MAX_PARAMETERS, "a score modifier has too many parameters") };
    let lanes = A::lanes::<S>();
    let [batch, head, query] = task.index(row);
    let mut parameters = [Lanes::<S, A>::new(simd, A::splat(simd, A::ZERO)); MAX_PARAMETERS];
    for slot in 0..N::PARAMETERS {
        let value = A::from_f64(modifier.parameter(slot, batch, head));
        parameters[slot] = Lanes::new(simd, A::splat(simd, value));
    }
    let mut lane_numbers = [A::ZERO; MAX_LANES];
    for lane in 0..lanes {
        lane_numbers[lane] = A::from_index(lane);
    }
    let lane_numbers = A::load_slice::<S>(&lane_numbers);
    let query = Lanes::new(simd, A::splat(simd, A::from_index(query)));
    let distance = A::splat(simd, from_difference(task.position(row), first_key));
    let mut first = 0;
    while first < keys {
        let scores = &mut scores[first..][..lanes];
        let in_block = A::add(simd, lane_numbers, A::splat(simd, A::from_index(first)));
        let in_tensor = A::add(simd, lane_numbers, A::splat(simd, A::from_index(first_key + first)));
        let at = ScoreContext {
            query,
            key: Lanes::new(simd, in_tensor),
            distance: Lanes::new(simd, A::sub(simd, distance, in_block)),
            parameters: &parameters[..N::PARAMETERS],
        };
        let score = Lanes::<S, A>::new(simd, A::load_slice::<S>(scores));
        A::store_slice::<S>(scores, modifier.modify(score, &at).vector);
        first += lanes;
    }
}
