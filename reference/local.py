"""Attention on one rank, tile by tile, so that no matrix of queries x keys is ever held.

For each tile of queries, over the tiles of keys that it sees (the online softmax):

    s = scale * q k^T        m' = max(m, rowmax s)        p = exp(s - m')
    total = exp(m - m') total + rowsum p        out = exp(m - m') out + p v
    at the end: out / total, and lse = m + log total

`merge` does the same for whole results: two parts of the keys, each with its out and lse, become one. Tiles of one
rank, hops of a ring and stages of a schedule are all put together in this way. The backward pass is in `backward.py`.

Cost: 2 b h area (d + dv) operations. Memory beyond inputs and outputs: the running tile. Nothing is sent.
It does not drop out, bias or soft-cap.

Source: Tri Dao, FlashAttention-2 (2023), algorithm 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from canon.reference.backward import attention_backward
from canon.reference.checks import (
    accumulate_dtype,
    batched,
    check_mask,
    check_method,
    check_tensors,
    default_mask,
    default_scale,
    under_autocast,
)
from canon.reference.differentiable import differentiable
from canon.reference.mask import Mask
from canon.reference.tiles import read, read_keys, visible_tiles

__all__ = ["attention", "attention_backward", "attention_forward", "merge"]


@under_autocast("q", "k", "v")
def attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """softmax(scale * q k^T) v over the visible cells, and on request the logarithm of the softmax's denominator.

    A query that sees no key gets out 0 and lse -inf. Keys that no query sees and queries that see no key may hold
    anything, NaN included. Differentiable in q, k, v, through out and through lse. Under autocast q, k, v are cast as
    `torch.nn.functional.scaled_dot_product_attention` casts them.

    Args:
        q, k, v: (b, t, h, d), (b, s, g, d), (b, s, g, dv), or packed without b; h a multiple of g; any strides.
        mask: who sees whom; None is causal, for as many queries as keys.
        scale: of the scores, finite; None is 1 / sqrt(d).
        backward: "fused", "split", "head_parallel", or "auto" (here: "split").
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes, devices or the mask do not fit together, or ``backward`` is unknown.

    Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
    """
    check_tensors(q, k, v)
    check_method("backward", backward)
    mask, scale = default_mask(q, k, mask), default_scale(q, scale)

    def forward(q, k, v):
        return attention_forward(q, k, v, mask, scale=scale)

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse):
        return attention_backward(
            dout, q, k, v, out, lse, mask, scale=scale, dlse=dlse, method=backward, needs_grad=needs_grad
        )

    return differentiable(q, k, v, forward, differentiate, return_lse=return_lse)


@under_autocast("q", "k", "v")
def attention_forward(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask,
    *,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """out (b, t, h, dv) and lse (b, h, t) of these queries over these keys alone: a result, or a part to `merge`.

    Args: as `attention`; ``out_dtype`` of out, q's by default (the schedules ask for float32 and round once, at the
    end). Not differentiable by itself. Raises ValueError if the arguments do not fit.
    Source: Dao, FlashAttention-2 (2023), algorithm 1.
    """
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    packed, scale, out_dtype = q.ndim == 3, default_scale(q, scale), out_dtype or q.dtype
    q, k, v = (x.transpose(1, 2) for x in batched(q, k, v))  # heads first: (b, heads, tokens, width)
    group, accumulate = q.shape[1] // k.shape[1], accumulate_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=accumulate)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulate)
    for rows, row in visible_tiles(mask, q.device):
        highest, total, weighted = lse[:, :, rows].clone(), torch.zeros_like(lse[:, :, rows]), out[:, :, rows].clone()
        for columns, seen in row:
            q_tile, k_tile, v_tile = read(q, rows, seen.any(1)), *read_keys(k, v, columns, seen, group)
            scores = (scale * q_tile @ k_tile.mT).masked_fill(~seen, -torch.inf)
            new = torch.maximum(highest, scores.amax(-1))
            finite = new.masked_fill(new == -torch.inf, 0)  # a row without a visible key so far: exp(-inf - 0) = 0
            p = torch.exp(scores - finite[..., None])
            shrink = torch.exp(highest - finite)
            total = shrink * total + p.sum(-1)
            weighted = shrink[..., None] * weighted + p @ v_tile
            highest = new
        some = total > 0
        out[:, :, rows] = weighted / total.masked_fill(~some, 1)[..., None]
        lse[:, :, rows] = torch.where(some, highest + torch.log(total.masked_fill(~some, 1)), -torch.inf)
    out = out.transpose(1, 2).to(out_dtype)
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


@under_autocast()
def merge(
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    other_out: Float[Tensor, "*b t h dv"],
    other_lse: Float[Tensor, "*b h t"],
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Attention over the keys of two disjoint parts: out in the dtype of ``out``, and lse.

        lse' = log(exp(lse) + exp(other_lse))        out' = exp(lse - lse') out + exp(other_lse - lse') other_out

    A part that saw nothing (lse -inf) has no weight, whatever its out holds. Not differentiable by itself.
    Raises ValueError if the shapes differ. Source: Dao, FlashAttention-2 (2023), section 2.3.1.
    """
    if out.shape != other_out.shape or lse.shape != other_lse.shape:
        raise ValueError(
            f"the parts differ in shape: out {tuple(out.shape)} and {tuple(other_out.shape)}, "
            f"lse {tuple(lse.shape)} and {tuple(other_lse.shape)}"
        )
    merged = torch.logaddexp(lse, other_lse)

    def weighted(part, part_lse):
        seen = part_lse > -torch.inf
        weight = torch.exp(part_lse - merged.masked_fill(~seen, 0)).masked_fill(~seen, 0)
        weight, seen = (x.transpose(-1, -2)[..., None] for x in (weight, seen))  # (b, t, h, 1)
        return weight * part.to(lse.dtype).masked_fill(~seen, 0)

    return (weighted(out, lse) + weighted(other_out, other_lse)).to(out.dtype), merged
