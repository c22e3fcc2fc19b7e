"""Attention on one rank, tile by tile. No matrix of queries x keys is ever stored.

The online softmax keeps three running values for each query: the highest score m, the total of the
weights, and the weighted sum of the values. For each tile of queries it loops over the tiles of
keys with a visible cell:

    scores = scale * q k^T                 m' = max(m, rowmax scores)   p = exp(scores - m')
    total = exp(m - m') total + rowsum p   weighted = exp(m - m') weighted + p v
    after the last tile                    out = weighted / total       lse = m + log total

Subtracting m' keeps exp from overflowing. Derivation: notebooks/00_softmax_in_pieces.md. `merge`
joins two finished results over disjoint keys in the same way: steps of a ring, for example. With a
soft-cap, scores become softcap * tanh(scores / softcap) before they are masked. A *sink*, a learned
logit for each query head, joins the denominator once, after all keys (`_Sink`).

Cost: nothing is sent. area counts the visible cells of the mask; hidden cells of a computed tile
cost as much:

    FLOPs           2 b h area (d + dv), and b h area exponentials
    peak memory     float32 q and out, k and v of every query head, b h tiles of scores, the boolean
                    tiles of one row of tiles; beyond inputs and outputs; with a sink a second (b,
                    t, h, dv), because the backward pass reads out_keys

Limits: no dropout or bias.

Sources: Tri Dao, FlashAttention-2 (2023), algorithm 1; sinks: Xiao et al., Efficient Streaming
Language Models with Attention Sinks (2023); learned logits: OpenAI, gpt-oss-120b & gpt-oss-20b
Model Card (2025).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from canon.faces import public_attention, public_parts
from canon.masks.mask import Mask
from canon.reference.backward import attention_backward, gradients
from canon.reference.tiles import (
    heads_first,
    in_whole_tiles,
    mask_in_whole_tiles,
    over_visible,
    read,
    scores_of,
    visible_tiles,
)
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad, Side
from canon.route.call import Call
from canon.route.checks import Scale
from canon.route.differentiation import once_differentiable
from canon.route.sink_weights import over_width, sigmoid, sink_weight
from canon.route.sink_weights import weighted as with_sink

__all__ = ["attention", "attention_backward", "attention_forward", "merge"]


def tiled_forward(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g dv"],
    mask: Mask,
    *,
    scale: Scale,
    out_dtype: torch.dtype,
    whole_tiles: bool = False,
    max_logits: Float[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h t"]]:
    """Return out and lse as `attention_forward`, without checks: the step of every forward pass.

    ``whole_tiles``: compute all tiles with 128 x 128 tokens, so that the bits of a query do not
    depend on other tokens. ``max_logits`` is raised to the largest visible score of each head.
    """
    tokens, width = q.shape[1], v.shape[3]
    if whole_tiles:
        q, k, v, mask = *map(in_whole_tiles, (q, k, v)), mask_in_whole_tiles(mask)
    share, all_finite = q.shape[2] // k.shape[2], bool(v.isfinite().all())
    q, k, v = heads_first(q), heads_first(k, share), heads_first(v, share)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf)
    for queries, strip in visible_tiles(mask, q.device, whole_tiles=whole_tiles):
        q_tile = read(q, queries)
        highest = lse[:, :, queries].clone()  # m, so far -inf
        total, weighted = torch.zeros_like(highest), torch.zeros_like(out[:, :, queries])
        for keys, visible in strip:
            k_tile, v_tile = read(k, keys), read(v, keys)
            scores = scores_of(q_tile, k_tile, scale).masked_fill(~visible, -torch.inf)
            highest_now = torch.maximum(highest, scores.amax(-1))
            # exp(-inf - 0) = 0: no key seen yet
            shift = highest_now.masked_fill(highest_now == -torch.inf, 0)
            p = torch.exp(scores - shift[..., None])
            shrink = torch.exp(highest - shift)
            total = shrink * total + p.sum(-1)
            product = over_visible(p, v_tile, scores > -torch.inf, all_finite)
            weighted = shrink[..., None] * weighted + product
            highest = highest_now
        if max_logits is not None and highest.numel():
            max_logits.copy_(torch.maximum(max_logits, highest.amax((0, 2))))
        some = total != 0  # False for queries that see no key
        out[:, :, queries] = weighted / total.masked_fill(~some, 1)[..., None]
        lse[:, :, queries] = torch.where(
            some, highest + torch.log(total.masked_fill(~some, 1)), -torch.inf
        )
    out = out.transpose(1, 2).to(out_dtype)
    return out[:, :tokens, :, :width], lse[:, :, :tokens]


def local_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t)."""
    whole = call.options["rank_invariant"]
    return tiled_forward(
        q,
        k,
        v,
        call.mask,
        scale=call.scale,
        out_dtype=q.dtype,
        whole_tiles=whole,
        max_logits=max_logits,
    )


def local_backward(
    call: Call,
    needs_grad: NeedsGrad,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Gradients:
    """Return dq, dk, dv in the dtype of q. Unneeded ones are None."""
    return gradients(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse,
        None,
        call.mask,
        scale=call.scale,
        method=call.backward,
        grad_dtype=q.dtype,
        needs_grad=needs_grad,
        whole_tiles=call.options["rank_invariant"],
    )


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of two parts as `merge`, without checks."""
    whole = torch.logaddexp(lse, other_lse)

    def weighted(part, part_lse):
        visible = part_lse != -torch.inf
        weight = torch.exp(part_lse - whole.masked_fill(~visible, 0)).masked_fill(~visible, 0)
        # (..., t, h, 1)
        weight, visible = (x.transpose(-1, -2)[..., None] for x in (weight, visible))
        return weight * part.to(lse.dtype).masked_fill(~visible, 0)

    return (weighted(out, lse) + weighted(other_out, other_lse)).to(out.dtype), whole


def under_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return out (*b, t, h, dv) under ``sink`` (h,)."""
    return _Sink.apply(out, lse, sink)


class _Sink(torch.autograd.Function):
    """Attention with a sink z: the result of the keys, out_keys (*b, t, h, dv), times a. lse (*b,
    h, t) stays that of the keys.

        a = sigmoid(lse - z)    out = sum_j exp(score_j) v_j / (exp(lse) + exp(z)) = a out_keys

    With da / dlse = a (1 - a) = -da / dz and r = rowsum(dout * out_keys), the gradients are

        dout_keys = a dout    dlse gets a (1 - a) r more
        dz = - sum over batch and tokens of a (1 - a) r

        sink    lse       a     gradients through it
        any     -inf      0     0: the query sees no key, and its dout may hold anything
        -inf    > -inf    1     dout_keys = dout; dlse and dz get 0: attention without a sink
        +inf    > -inf    0     0

    out_keys, its product with a, and dout_keys are each rounded to the dtype of q.
    """

    @staticmethod
    def forward(ctx, out, lse, sink):
        ctx.save_for_backward(out, lse, sink)
        return with_sink(out, lse, sink)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], dout: Tensor):
        out, lse, sink = saved
        a, visible = sink_weight(lse, sink), lse != -torch.inf
        dout = dout.to(lse.dtype).masked_fill(~over_width(visible), 0)
        r = (dout * out).sum(-1).transpose(-1, -2)
        dlse = torch.where(visible, a * sigmoid(sink[:, None] - lse) * r, 0)  # 1 - a would cancel
        dsink = (
            -dlse.transpose(-1, -2).reshape(-1, len(sink)).sum(0)
            if ctx.needs_input_grad[2]
            else None
        )
        return (
            (over_width(a) * dout).to(out.dtype),
            dlse,
            None if dsink is None else dsink.to(sink.dtype),
        )


# The public functions: they check their arguments, then call the functions above.
REFERENCE = Side("reference", under_sink)
LOCAL = Algorithm(REFERENCE, public_attention.ATTENTION, local_forward, local_backward)
attention = public_attention.attention(LOCAL)
attention_forward = public_parts.attention_forward(tiled_forward)
merge = public_parts.merge(merged)
