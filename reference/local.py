"""Attention on one rank, tile by tile. No matrix of queries x keys is ever stored.

The online softmax keeps three running values for each query: the highest score m, the total of the weights, and the weighted
sum of the values. For each tile of queries, it loops over the tiles of keys with a visible cell:

    s = scale * q k^T                           m' = max(m, rowmax s)        p = exp(s - m')
    total = exp(m - m') total + rowsum p        weighted = exp(m - m') weighted + p v
    after the last tile                         out = weighted / total       lse = m + log total

Subtracting m' keeps exp from overflowing. The factor exp(m - m') rescales the old sums when m rises.

`merge` joins two finished results over disjoint keys in the same way. Ring steps and magi stages are joined by `merge`.
The gradients are in `backward.py`. With a mask for each sequence, the batch becomes one packed sequence (`packing.py`). A
sink is applied to a whole result (`sinks.py`). `decode_attention` merges the results of several ranks, each over its own keys.

Cost: 2 b h area (d + dv) FLOPs and b h area exponentials. area counts the visible cells of the mask. Only
`decode_attention` sends: one message.
Memory beyond inputs and outputs: float32 out, b h tiles of scores, and the boolean tiles of one row of tiles.
Limits: no dropout, bias or soft-cap.

This file exceeds 200 lines because it documents four public functions for both halves.

Source: Tri Dao, FlashAttention-2 (2023), algorithm 1.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.mask import Mask
from canon.reference.backward import attention_backward
from canon.reference.sinks import under_sink
from canon.reference.tiles import read, read_keys, visible_tiles
from canon.runtime.agreement import named_failures
from canon.runtime.autograd import differentiable
from canon.runtime.checks import (
    accumulate_dtype,
    batched,
    check_mask,
    check_method,
    check_parts,
    check_sink,
    check_tensors,
    default_mask,
    default_scale,
    under_autocast,
)
from canon.runtime.decode_call import agreed_decode
from canon.runtime.group import Group
from canon.runtime.operators import call_operator, is_traced
from canon.runtime.packing import attend_each
from canon.runtime.passes import Passes, makes_passes
from canon.runtime.rank_invariance import check_rank_invariant
from canon.runtime.sink_weights import weighted

__all__ = ["attention", "attention_backward", "attention_forward", "decode_attention", "merge"]


@under_autocast("q", "k", "v")
def attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask] | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    backward: str = "auto",
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return softmax(scale * q k^T) v over the visible cells, differentiable in q, k and v.

    A query that sees no key gets out 0 and lse -inf. Keys that no query sees and queries that see no key may hold
    anything, NaN included. Under autocast q, k and v are cast as `torch.nn.functional.scaled_dot_product_attention`
    casts them.

    Args:
        q, k, v: (b, t, h, d), (b, s, g, d), (b, s, g, dv), or packed without b. h is a multiple of g. Any strides.
        mask: the visible cells of t queries x s keys, for all sequences; None is causal and needs t = s. A tuple or a list
            of b Masks holds one for each sequence.
        scale: factor of the scores, finite; None is 1 / sqrt(d).
        sink: a logit (h,) of each query head in the denominator, float32 or in the dtype of q; None is none. out becomes
            out * sigmoid(lse - sink), differentiable in sink, too. lse stays that of the keys alone: parts still merge.
        backward: "fused", "split", "head_parallel", or "auto": the methods of `attention_backward`.
        rank_invariant: return the bits that `strided_attention` and `magi_attention` return with this option on any number
            of ranks. In this half, they are always the bits of this function. "fused" contradicts the option.
        return_lse: also return lse (b, h, t), the natural logarithm of the softmax's denominator, in float32 (float64
            for float64). It is differentiable.

    Raises:
        ValueError: shapes, dtypes, devices or the mask do not fit together, or ``backward`` is unknown or
            contradicts ``rank_invariant``.

    Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
    """
    if isinstance(mask, (tuple, list)):
        options = dict(scale=scale, sink=sink, backward=backward, rank_invariant=rank_invariant)
        return attend_each(attention, q, k, v, mask, **options, return_lse=return_lse)
    options = dict(scale=scale, backward=backward, rank_invariant=rank_invariant)
    if is_traced():
        check_sink(q, sink)
        out, lse = call_operator("reference", "attention", q, k, v, mask, None, **options)
    else:
        passes = _passes("attention", q, k, v, mask, None, **options)
        check_sink(q, sink)
        out, lse = differentiable(q, k, v, passes.forward, passes.backward, return_lse=True)
    return under_sink(out, lse, sink, return_lse)


@makes_passes("reference", "attention")
def _passes(
    _: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, __: None, *, scale, backward, rank_invariant
) -> Passes:
    check_tensors(q, k, v)
    check_method("backward", backward)
    check_rank_invariant("attention", rank_invariant, backward=backward)
    mask, scale = default_mask(q, k, mask), default_scale(q, scale)

    def forward(q, k, v):
        return tiled_forward(q, k, v, mask, scale=scale, out_dtype=q.dtype)

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse):
        return attention_backward(
            dout, q, k, v, out, lse, mask, scale=scale, dlse=dlse, method=backward, needs_grad=needs_grad
        )

    return Passes(forward, differentiate)


@under_autocast("q", "k", "v")
def attention_forward(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask],
    *,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return out (b, t, h, dv) and lse (b, h, t) of these queries over these keys: a whole result, or a part to `merge`.

    Args: those of `attention`. ``out_dtype`` is the dtype of out, by default that of q. Parts to be merged should be
        float32, so that the merged result is rounded once. The result is not differentiable.
    Raises ValueError if the arguments do not fit together.
    Source: Dao, FlashAttention-2 (2023), algorithm 1.
    """
    if isinstance(mask, (tuple, list)):
        return attend_each(attention_forward, q, k, v, mask, scale=scale, out_dtype=out_dtype)
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    packed, (q, k, v) = q.ndim == 3, batched(q, k, v)
    out, lse = tiled_forward(q, k, v, mask, scale=default_scale(q, scale), out_dtype=out_dtype or q.dtype)
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def tiled_forward(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g dv"],
    mask: Mask,
    *,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h t"]]:
    """Return out and lse as `attention_forward`, without checks: the step of every forward pass."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # heads first: (b, heads, tokens, width)
    group, accumulate = q.shape[1] // k.shape[1], accumulate_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=accumulate)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulate)
    for queries, strip in visible_tiles(mask, q.device):
        highest = lse[:, :, queries].clone()  # m, so far -inf
        total, weighted = torch.zeros_like(highest), out[:, :, queries].clone()
        for keys, visible in strip:
            q_tile, k_tile, v_tile = read(q, queries, visible.any(1)), *read_keys(k, v, keys, visible, group)
            scores = (scale * q_tile @ k_tile.mT).masked_fill(~visible, -torch.inf)
            new = torch.maximum(highest, scores.amax(-1))
            finite = new.masked_fill(new == -torch.inf, 0)  # exp(-inf - 0) = 0 for a query that has seen no key yet
            p = torch.exp(scores - finite[..., None])
            shrink = torch.exp(highest - finite)
            total = shrink * total + p.sum(-1)
            weighted = shrink[..., None] * weighted + p @ v_tile
            highest = new
        some = total > 0  # False for queries that see no key
        out[:, :, queries] = weighted / total.masked_fill(~some, 1)[..., None]
        lse[:, :, queries] = torch.where(some, highest + torch.log(total.masked_fill(~some, 1)), -torch.inf)
    out = out.transpose(1, 2).to(out_dtype)
    return out, lse


@under_autocast()
def merge(
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    other_out: Float[Tensor, "*b t h dv"],
    other_lse: Float[Tensor, "*b h t"],
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return (out, lse) over the keys of two disjoint parts, with out in the dtype of ``out``.

        lse' = log(exp(lse) + exp(other_lse))        out' = exp(lse - lse') out + exp(other_lse - lse') other_out

    A part in which a query sees no key (lse -inf) has no weight, whatever its out holds. The result is not
    differentiable. Raises ValueError if the shapes differ. Source: Dao, FlashAttention-2 (2023), section 2.3.1.
    """
    check_parts(out, lse, other_out, other_lse)
    merged = torch.logaddexp(lse, other_lse)

    def weighted(part, part_lse):
        visible = part_lse > -torch.inf
        weight = torch.exp(part_lse - merged.masked_fill(~visible, 0)).masked_fill(~visible, 0)
        weight, visible = (x.transpose(-1, -2)[..., None] for x in (weight, visible))  # (b, t, h, 1)
        return weight * part.to(lse.dtype).masked_fill(~visible, 0)

    return (weighted(out, lse) + weighted(other_out, other_lse)).to(out.dtype), merged


@under_autocast("q", "k", "v")
def decode_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask] | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of queries that all ranks hold over keys that are divided among the ranks. A collective.

    Use it to generate or evaluate: few queries see many keys. Each rank computes the part of its own keys in the
    accumulation dtype. One all-gather brings out and lse of all ranks to each of them: (W - 1) b t h (dv + 1) elements
    received by each of W ranks. All ranks merge the parts in rank order and round once, so they return the same bits.

    Args:
        q: (b, t, h, d), or packed without b, equal on all ranks.
        k, v: this rank's keys, (b, s, g, d), (b, s, g, dv), or packed. s may differ between ranks, and may be 0.
        mask: the visible cells of t queries x s keys of this rank, or b Masks, one for each sequence. None: all are seen.
        scale: factor of the scores; None is 1 / sqrt(d).
        sink: a logit (h,) of each query head, as in `attention`, equal on all ranks. It is applied after the last merge.
        group: a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this process
            is the only rank.
        return_lse: also return lse (b, h, t) over the keys of all ranks, as `attention` does.

    The result is not differentiable. Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit
    together, or dtypes, scales or shapes except s differ between ranks.
    Source: Dao, FlashAttention-2 (2023), section 2.3.1, for the merge.
    """
    group, _, ranks, mask, scale = agreed_decode(q, k, v, mask, scale, sink, group)
    with torch.no_grad():
        part = attention_forward(q, k, v, mask, scale=scale, out_dtype=accumulate_dtype(q.dtype))
        (out, lse), *others = _parts_of_ranks(*part, ranks, group)
        for other in others:
            out, lse = merge(out, lse, *other)
        out = (out if sink is None else weighted(out, lse, sink)).to(q.dtype)
    return (out, lse) if return_lse else out


def _parts_of_ranks(
    out: Tensor, lse: Tensor, ranks: int, group: dist.ProcessGroup | None
) -> list[tuple[Tensor, Tensor]]:
    """Return out and lse of each rank, which travel as one message."""
    if ranks == 1 or not out.numel():
        return [(out, lse)]
    sent = torch.cat([out.flatten(), lse.flatten()])
    received = [torch.empty_like(sent) for _ in range(ranks)]
    with named_failures("decode_attention", group, ranks):
        dist.all_gather(received, sent, group=group)
    return [(x[: out.numel()].view(out.shape), x[out.numel() :].view(lse.shape)) for x in received]
