"""`attention` on one rank."""

from jaxtyping import Float
from torch import Tensor

from canon.masks.mask import Masks
from canon.route.algorithm import Algorithm
from canon.route.attend import attend
from canon.route.operators import declared


def attention(algorithm: Algorithm):
    """Return `attention` of a half."""

    def attention(
        q: Float[Tensor, "*b t h d"],
        k: Float[Tensor, "*b s g d"],
        v: Float[Tensor, "*b s g dv"],
        mask: Masks | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " h"] | None = None,
        backward: str = "auto",
        rank_invariant: bool = False,
        return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Float[Tensor, "*b t h dv"] | tuple[Tensor, ...]:
        """Return softmax(scale * q k^T) v over the visible cells, differentiable in q, k and v.

        A query that sees no key gets out 0 and lse -inf. It, and keys that no query sees, may hold
        anything, NaN included. Autocast casts q, k and v as for `scaled_dot_product_attention`.

        Args:
            q, k, v: (b, t, h, d), (b, s, g, d), (b, s, g, dv), or packed without b, with any
                strides. h is a multiple of g.
            mask: the visible cells of t queries x s keys; None is causal and needs t = s. A tuple
                or a list of b Masks holds one for each sequence.
            scale: factor of the scores, finite; None is 1 / sqrt(d).
            softcap: the limit of the scores s = scale * q k^T, which become softcap * tanh(s /
                softcap). Positive; None is no limit.
            sink: a logit (h,) of each query head in the denominator, float32 or in the dtype of q:
                out becomes out * sigmoid(lse - sink), differentiable in sink. lse stays that of the
                keys.
            backward: a method of `attention_backward`: "fused", "split", "head_parallel", or
                "auto", the fastest. Under `torch.use_deterministic_algorithms(True)` it is the
                fastest that repeats its bits.
            rank_invariant: let the bits of a query depend on the keys that it sees and their
                positions modulo 128 alone (`canon.route.rank_invariance`): equal on any number of
                ranks, in prefill by chunks, in decoding, among other documents and in a tree.
                "fused" contradicts the option.
            return_lse: also return lse (b, h, t), the natural logarithm of the softmax's
                denominator, differentiable, in float32 (float64 for float64).
            return_max_logits: also return, last, the largest visible score of each query head (h,),
                scaled and capped, over batch, tokens and ranks: float32, not differentiable, -inf
                for a head that sees no key.

        Raises ValueError if shapes, dtypes, devices or the mask do not fit together, or
        ``backward`` is unknown or contradicts ``rank_invariant``. Warns if mask is None, h = g, and
        there are fewer tokens than heads, as if q were (b, h, t, d). Source: Dao, FlashAttention-2
        (2023), algorithms 1 and 2.
        """
        options = {
            "scale": scale,
            "softcap": softcap,
            "backward": backward,
            "rank_invariant": rank_invariant,
            "return_max_logits": return_max_logits,
        }
        return attend(algorithm, (q, k, v), mask, None, sink, return_lse, options)

    return algorithm.bind(attention)


ATTENTION = declared(attention)
