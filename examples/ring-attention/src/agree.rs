//! Before anything travels, ranks tell one another what they were called with, and find the same error if there is one.

use fused_attention::{AttentionConfig, Mask};
use mpi::traits::CommunicatorCollectives;

use crate::shares::Shares;
use crate::{Ring, RingError, RingShape, Wire};

/// Numbers that must be the same on all ranks, with their names.
pub(crate) type Fields = Vec<(&'static str, u64)>;

pub(crate) fn shape_fields<K: Wire>(shape: &RingShape) -> Fields {
    let RingShape { batch, num_heads, num_kv_heads, head_dim, value_dim } = *shape;
    let sizes = [
        ("batch", batch),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("value_dim", value_dim),
        ("bytes of an element of K and V", size_of::<K>()),
    ];
    sizes.map(|(field, size)| (field, size as u64)).to_vec()
}

pub(crate) fn shares_fields(shares: &Shares) -> Fields {
    vec![
        ("a sequence length of", shares.seq_len() as u64),
        ("ranks that share it:", shares.ranks() as u64),
        ("shares of the fingerprint", shares.fingerprint()),
    ]
}

pub(crate) fn config_fields(config: &AttentionConfig) -> Fields {
    let some = |x: Option<usize>| x.map_or(u64::MAX, |x| x as u64);
    let bits = |x: Option<f64>| x.map_or(u64::MAX, f64::to_bits);
    let (mask, offset) = match config.mask {
        Mask::Full => (0, 0),
        // Bottom-right and top-left are one where a sequence attends to itself; they need not agree.
        Mask::Causal(fused_attention::CausalAlignment::Offset(offset)) => (1, offset as u64),
        _ => (1, 0),
    };
    vec![
        ("mask (0 full, 1 causal)", mask),
        ("causal offset", offset),
        ("window.left", some(config.window.left)),
        ("window.right", some(config.window.right)),
        ("prefix_len", config.prefix_len as u64),
        ("softcap (bits)", bits(config.softcap)),
        ("softmax_scale (bits)", bits(config.softmax_scale)),
    ]
}

impl Ring {
    /// Everybody's numbers, `[ranks][N]`; all ranks must call this.
    fn gather(&self, mine: &[u64]) -> Vec<Vec<u64>> {
        let mut all = vec![0u64; mine.len() * self.ranks()];
        mpi::request::scope(|scope| {
            let request = self.comm.immediate_all_gather_into(scope, mine, &mut all[..]);
            self.finish(request, "all ranks to make the same call");
        });
        all.chunks(mine.len()).map(<[u64]>::to_vec).collect()
    }

    /// Compares `same` among the ranks, then gives everybody's numbers that may differ. `refused`: what this rank found wrong by
    /// itself, which the others must hear of. The error is the same on all ranks, but for that one.
    pub(crate) fn agree(
        &self,
        same: &[(&'static str, u64)],
        own: &[u64],
        refused: Option<RingError>,
    ) -> Result<Vec<Vec<u64>>, RingError> {
        // As many numbers as any rank may send, so that even ranks in different calls understand one another.
        const NUMBERS: usize = 32;
        let mut mine = vec![0; NUMBERS];
        mine[0] = u64::from(refused.is_some());
        mine[1] = same.len() as u64;
        for (to, number) in mine[2..].iter_mut().zip(same.iter().map(|field| field.1).chain(own.iter().copied())) {
            *to = number;
        }
        assert!(2 + same.len() + own.len() <= NUMBERS);
        let all = self.gather(&mine);
        let names = ["fields:"].into_iter().chain(same.iter().map(|field| field.0));
        for (index, field) in names.enumerate() {
            let expected = all[0][1 + index];
            if let Some(rank) = (0..self.ranks()).find(|&rank| all[rank][1 + index] != expected) {
                return Err(RingError::Disagreement { rank, field, expected, found: all[rank][1 + index] });
            }
        }
        match ((0..self.ranks()).find(|&rank| all[rank][0] != 0), refused) {
            (_, Some(error)) => Err(error),
            (Some(rank), None) => Err(RingError::Refused { rank }),
            (None, None) => {
                Ok(all.into_iter().map(|numbers| numbers[2 + same.len()..][..own.len()].to_vec()).collect())
            }
        }
    }
}
