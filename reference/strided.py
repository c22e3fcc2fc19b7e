"""Strided attention: gather K and V of a few heads from all ranks, compute these heads, go on to
the next heads.

A *head group* is `head_stride` neighbouring key heads, with the query heads that share them. With 8
query heads, 4 key heads and head_stride=2:

    step   gathered from all ranks   computed on each rank            backward: sent to the owners
    0      K, V of key heads 0, 1    query heads 0-3, over all keys   dk, dv of key heads 0, 1
    1      K, V of key heads 2, 3    query heads 4-7, over all keys   dk, dv of key heads 2, 3

A query head sees all its keys in one step, so nothing is merged and out is rounded once. Gathered
keys lie in rank order.

Backward, K and V are gathered again. A step gives the final dq of its query heads, and this rank's
part of dk and dv for the keys of all ranks, which one all-to-all sends to the owners in
reduce_dtype. An owner adds the n parts in rank order, in float32 (float64 for float64), so a
repeated call gives the same bits. With ``rank_invariant=True`` any number of ranks does
(`owner_computes.py`). With ``backward_schedule="ring"`` the backward pass is that of
`ring_attention`.

The next gather and the previous all-to-all are in flight while a step computes. Nothing hides the
first gather and the last all-to-all. Only the work over all keys must be equal on all ranks: pass
`Layout.zigzag` for a causal mask. If the buffers do not fit, or if g = 1, use the ring: its buffers
do not grow with n.

Cost of a rank for equal shards, in m steps. K and V have N = b t g (d + dv) elements of e bytes, E
bytes in reduce_dtype:

                       messages   bytes received   peak memory, in buffers of n N / m elements
    each pass   K, V   m          (n - 1) N e      3 in the dtype of k; NCCL has one more for each
                                                   gather in flight
    backward  dk, dv   m          (n - 1) N E      5 of float32; with a narrower reduce_dtype 2, and
                                                   3 of it

Limits: head_stride must divide g. A gather pads each shard to the size of the largest.

Sources: all-gather: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2. Some heads at a
time: Zilin Zhu, ring-flash-attention. Split head groups, float32 reduction:
aqlaboratory/ring-flash-attention pull request 12.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces import public_strided
from canon.masks.head_groups import Steps, steps_of
from canon.masks.mask import Mask
from canon.ranks.profiling import named_steps
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.local import REFERENCE, tiled_forward
from canon.reference.owner_computes import of_heads, owner_backward, owner_forward, query_heads
from canon.reference.ring import ring_backward, ring_parts
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.checks import accumulate_dtype

__all__ = ["strided_attention"]


def strided_plan(call: Call) -> Steps:
    """Return the key heads of each step. Raises ValueError if the strides do not fit the heads."""
    return steps_of(call.shapes[1][2], call.options)


def strided_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t)."""
    mask, steps = gathered_mask(call), call.plan.forward
    outs, lses = [], []
    gather = AllGather(k, v, steps[0], call)
    for heads, next_heads in named_steps(zip(steps, (*steps[1:], None), strict=True)):
        k_full, v_full = gather.wait()
        if next_heads:
            gather = AllGather(k, v, next_heads, call)
        sharing = query_heads(heads, q, k)
        highest = of_heads(max_logits, sharing)
        out, lse = tiled_forward(
            q[:, :, sharing],
            k_full,
            v_full,
            mask,
            scale=call.scale,
            out_dtype=q.dtype,
            max_logits=highest,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


def strided_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv as `ring_backward`."""
    if call.plan.backward is None:  # backward_schedule is "ring"
        return ring_backward(call, needs_grad, dout, dlse, q, k, v, out, lse)
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    mask, steps = gathered_mask(call), call.plan.backward
    delta = make_delta(dout, out, dlse)
    dqs, sums, reduction = [], [], None
    gather = AllGather(k, v, steps[0], call)
    for heads, next_heads in named_steps(zip(steps, (*steps[1:], None), strict=True)):
        k_full, v_full = gather.wait()
        if next_heads:
            gather = AllGather(k, v, next_heads, call)
        sharing = query_heads(heads, q, k)
        dq, dk_full, dv_full = tiled_backward(
            dout[:, :, sharing],
            q[:, :, sharing],
            k_full,
            v_full,
            lse[:, sharing],
            delta[:, sharing],
            mask,
            scale=call.scale,
            method=call.backward,
            grad_dtype=accumulate,
            needs_grad=needs_grad,
        )
        dqs.append(dq)
        if reduction:  # at most one reduce-scatter is in flight
            sums.append(reduction.wait())
        reduction = ReduceScatter(dk_full, dv_full, call) if keys_need_grad else None
    sums += [reduction.wait()] if reduction else []
    dq = torch.cat(dqs, dim=2).to(q.dtype) if needs_grad[0] else None
    if not sums:
        return dq, None, None
    dk, dv = (torch.cat(parts, dim=2).to(k.dtype) for parts in zip(*sums, strict=True))
    return dq, dk, dv


def invariant_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results of `strided_forward` with the bits of one rank (`owner_computes.py`)."""
    return owner_forward(
        call, call.plan.forward, partial(SequenceGather, call=call), q, k, v, max_logits
    )


def invariant_backward(call: Call, needs_grad: NeedsGrad, *given: Tensor | None) -> Gradients:
    """Return the gradients of `strided_backward`, likewise."""
    fetch = partial(SequenceGather, call=call)
    return owner_backward(call, call.plan.backward, fetch, fetch, needs_grad, *given)


def strided_parts(call: Call, backward: bool) -> Iterator[Mask]:
    """Yield the local mask of each step."""
    strided_plan(call)  # raises
    yield gathered_mask(call)
    if backward and call.options["backward_schedule"] == "ring":
        yield from ring_parts(call, backward)


def gathered_mask(call: Call) -> Mask:
    """Return the mask between this rank's queries and the keys of all ranks, in rank order."""
    return call.layout.local_mask(call.mask, call.rank, range(call.ranks))


class AllGather:
    """An all-gather in flight: K and V of some heads, from all ranks, in one message."""

    def __init__(self, k: Tensor, v: Tensor, heads: range | slice, call: Call):
        own = torch.cat([x[:, :, heads.start : heads.stop] for x in (k, v)], dim=-1)
        self.layout, self.widths, self.request = call.layout, [k.shape[-1], v.shape[-1]], None
        self.sizes = [call.layout.size(rank) for rank in range(call.ranks)]
        padded = own.new_zeros(own.shape[0], max(self.sizes), *own.shape[2:])
        padded[:, : own.shape[1]] = own
        self.shards = [padded]
        if call.ranks > 1:  # the request keeps `padded` until the message is complete
            self.shards = [torch.empty_like(padded) for _ in self.sizes]
            self.request = dist.all_gather(self.shards, padded, group=call.group, async_op=True)

    def wait(self) -> tuple[Tensor, Tensor]:
        if self.request:
            self.request.wait()
        full = self.joined(
            [shard[:, :size] for shard, size in zip(self.shards, self.sizes, strict=True)]
        )
        k, v = full.split(self.widths, dim=-1)
        return k, v

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(shards, dim=1)


class SequenceGather(AllGather):
    """An all-gather in flight, of tokens in the order of the sequence, for `owner_computes.py`."""

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        full = shards[0].new_empty(shards[0].shape[0], sum(self.sizes), *shards[0].shape[2:])
        for rank, shard in enumerate(shards):
            full[:, self.layout.positions(rank).to(full.device)] = shard
        return full


class ReduceScatter:
    """A reduce-scatter in flight: parts of dk and dv go to the owners of the keys."""

    def __init__(self, dk_full: Tensor, dv_full: Tensor, call: Call):
        self.widths = [dk_full.shape[-1], dv_full.shape[-1]]
        parts = torch.cat([dk_full, dv_full], dim=-1).to(call.reduce_dtype)
        # tokens first: the message is split along axis 0
        parts = parts.transpose(0, 1).contiguous()
        sizes = [call.layout.size(r) for r in range(call.ranks)]
        # a part from each rank
        self.received = parts.new_empty(call.ranks, sizes[call.rank], *parts.shape[1:])
        self.request = None
        if call.ranks == 1:
            self.received[0] = parts
        else:
            received = self.received.flatten(0, 1)  # a view
            received_sizes = [sizes[call.rank]] * call.ranks
            self.request = dist.all_to_all_single(
                received, parts, received_sizes, sizes, group=call.group, async_op=True
            )

    def wait(self) -> tuple[Tensor, ...]:
        """Return the sums of dk and dv for this rank's tokens, in float32 or float64."""
        if self.request:
            self.request.wait()
        total = self.received[0].to(accumulate_dtype(self.received.dtype))
        for other in self.received[1:]:  # in rank order
            total = total + other
        return total.transpose(0, 1).split(self.widths, dim=-1)


STRIDED = Algorithm(
    REFERENCE,
    public_strided.STRIDED,
    strided_forward,
    strided_backward,
    invariant=(invariant_forward, invariant_backward),
    plan=strided_plan,
    parts=strided_parts,
)
strided_attention = public_strided.strided_attention(STRIDED)
