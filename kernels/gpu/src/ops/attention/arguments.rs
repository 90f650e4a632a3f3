//! Arguments of attention's operators.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::lower::{Lowering, Operand, Spot};
use crate::tiling::{Matrices, ceil_div};
use tandem_executor::ir::{Mem, Ty};

/// Sizes in a call of attention.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) batch: i64,
    pub(super) heads: i64,
    /// Number of heads of keys and values. `heads / shared` query heads use the same head of keys and values.
    pub(super) shared: i64,
    pub(super) queries: i64,
    pub(super) keys: i64,
    pub(super) dim: i64,
}

/// The arguments that the forward and the backward operators have in common.
pub(super) struct Attention {
    pub(super) query: Operand,
    pub(super) key: Operand,
    pub(super) value: Operand,
    pub(super) mask: Option<Operand>,
    pub(super) causal: bool,
    /// Index of the scale among the arguments, if it is given.
    pub(super) scale: Option<usize>,
    pub(super) dropout: Option<Dropout>,
    pub(super) shape: Shape,
}

/// Dropout of softmax weights.
pub(super) struct Dropout {
    /// Key of the random numbers, two words.
    pub(super) seed: Operand,
    /// Index of the probability among the arguments.
    pub(super) probability: usize,
}

/// Operands of the gradients besides the arguments of the forward pass.
#[derive(Clone, Copy)]
pub(super) struct Given<'o> {
    /// Gradient of the output.
    pub(super) grad: &'o Operand,
    /// Statistics of the rows of queries, see [`super::statistics`].
    pub(super) stats: &'o Operand,
}

/// Indices of the arguments.
struct Places {
    /// The query, which key and value follow.
    query: usize,
    mask: usize,
    causal: usize,
    scale: usize,
}

impl Attention {
    fn of(l: &mut Lowering<'_>, places: &Places, dropout: Option<Dropout>) -> Option<Attention> {
        let first = places.query;
        let (query, key, value) = (l.tensor(first)?, l.tensor(first + 1)?, l.tensor(first + 2)?);
        let causal = l.flag(places.causal, false);
        let mask = l.optional(places.mask)?;
        let scale = l.has(places.scale).then_some(places.scale);
        let [batch, heads, queries, dim] = query.sizes[..].try_into().ok()?;
        let [_, shared, keys, _] = key.sizes[..].try_into().ok()?;
        let fits = key.sizes[..] == [batch, shared, keys, dim]
            && value.sizes == key.sizes
            && key.dtype == query.dtype
            && value.dtype == query.dtype
            && query.mem.ty() == Ty::F32
            && (1..=256).contains(&dim)
            && query.numel() > 0
            && key.numel() > 0
            && heads % shared == 0;
        let mask = match mask {
            None => None,
            Some(mask) => {
                let scores = [batch, heads, queries, keys];
                let lead = scores.len().checked_sub(mask.ndim())?;
                let fits = mask.sizes.iter().zip(&scores[lead..]).all(|(m, s)| m == s || *m == 1);
                if !fits || mask.mem.ty() != Ty::F32 || !matches!(mask.place, Spot::Memory(_)) {
                    return None;
                }
                Some(mask.expanded(&scores))
            }
        };
        let shape = Shape { batch, heads, shared, queries, keys, dim };
        let counted = batch * heads * queries * ceil_div(keys, 4) < 1 << 32;
        let drops = dropout.as_ref().is_none_or(|d| {
            counted && d.seed.dtype == Dtype::INT32 && d.seed.sizes[..] == [2] && d.seed.is_contiguous()
        });
        (fits && drops).then_some(Attention { query, key, value, mask, causal, scale, dropout, shape })
    }

    /// The arguments of an operator without dropout: `(.., dropout_p, is_causal, attn_mask, scale)` from index
    /// `dropout` on.
    pub(super) fn plain(l: &mut Lowering<'_>, query: usize, dropout: usize) -> Option<Attention> {
        if l.pin(dropout)? != 0.0 {
            return None;
        }
        let places = Places { query, causal: dropout + 1, mask: dropout + 2, scale: dropout + 3 };
        Attention::of(l, &places, None)
    }

    /// The arguments of an operator with dropout: `(query, key, value, mask, seed, ..)` from index `query` on and `(..,
    /// dropout_p, is_causal, scale)` from index `dropout` on.
    pub(super) fn dropping(l: &mut Lowering<'_>, query: usize, dropout: usize) -> Option<Attention> {
        l.within(dropout, 0.0, 1.0)?;
        let places = Places { query, mask: query + 3, causal: dropout + 1, scale: dropout + 2 };
        let seed = l.tensor(query + 4)?;
        Attention::of(l, &places, Some(Dropout { seed, probability: dropout }))
    }

    /// The device's matrices, if they compute the call: its tensors are halves, there are enough rows on both sides to
    /// fill the matrices, and heads are not too wide for registers.
    pub(super) fn matrices(&self, l: &Lowering<'_>) -> Option<Matrices> {
        let Shape { queries, keys, dim, .. } = self.shape;
        let has = |matrices: &Matrices| {
            // Each thread of a subgroup has at least one vector of a row of scores.
            let [sharing, vectors] = [matrices.subgroup / matrices.size, matrices.size / 2];
            (1..=vectors).contains(&sharing)
                && match self.query.mem {
                    Mem::F16 => true,
                    Mem::Bf16 => matrices.bfloat16,
                    _ => false,
                }
        };
        l.matrices().filter(has).filter(|_| queries.min(keys) >= 32 && dim <= 128)
    }
}
