"""Strided attention: gather K and V of a few heads from all ranks, compute these heads, go on to the next heads.

Each of W ranks holds q, k and v of its own tokens. A *head group* is s = `head_stride` neighbouring key heads and the query
heads that share them. A step computes one group; options split the first or the last group into two steps
(`strides.py`). With 8 query heads, 4 key heads and s = 2:

    step    gathered from all ranks     computed on rank r                      backward: sent to the owners of the keys
    0       K, V of key heads 0, 1      heads 0-3 of its queries, all keys      dk, dv of key heads 0, 1
    1       K, V of key heads 2, 3      heads 4-7 of its queries, all keys      dk, dv of key heads 2, 3

A query head sees all its keys in one step, so no results are merged and out is rounded once. The outputs of the steps
are concatenated along the heads. Gathered keys lie in rank order, not in order of position. For every layout,
`Layout.local_mask` gives the mask between this rank's queries and the gathered keys.

Backward: K and V are gathered again, because a rank saves only its own q, k, v, out and lse, the log of the softmax's
denominator. A step gives the final dq of its query heads, and this rank's part of dk and dv for the keys of all ranks.
The order of additions in NCCL's reduce-scatter depends on its algorithm and the topology, so three operations replace
it here. Each rank rounds its part to reduce_dtype. One all-to-all sends each owner the parts for its keys. The owner
adds these W parts in rank order 0, 1, ..., W - 1, in reduce_dtype. At the end it rounds the sums to the dtype of the
inputs. For bfloat16 inputs and reduce_dtype float32, the default, only this last rounding is to bfloat16. With
reduce_dtype bfloat16, each part and each addition is rounded to bfloat16, too. The order is fixed, so a repeated call
gives the same bits. With ``rank_invariant=True``, any number of ranks gives the same bits: the owner of a key adds
over all queries, and no partial sums travel (`owner_computes.py`).

During a step's computation, the next gather and the previous all-to-all are in flight. Nothing hides the first gather, the
last all-to-all, and the copies, casts and additions before and after messages. Split groups shorten the first gather
and the last all-to-all: see `strides.py`. Overlap depends on the backend. NCCL has its own
stream, and runs the messages of one process group one after the other. Gloo overlaps if it finds free CPU cores.

Balance: a visible cell is a pair of a query and a key that it sees. A rank's work in a step is the cells of its queries
times the query heads of the step. So mask and layout decide the balance: pass `Layout.zigzag` for a causal mask.

Stride: a small s takes the least memory and has the shortest first gather. A large s makes fewer, larger messages and
kernels. Rule: begin with 1. Try the next divisor of g as long as a pass gets faster and the peak memory, from the
table below, fits. For s > 1, `suggest_strides` chooses the splits. If s = g and no group is split, there is one step
and no overlap. The ring of `ring.py` receives the same number of bytes in all, in W - 1 hops. It merges results, and
needs balance at every hop, not only in total. Its buffers do not grow with W. Here a buffer holds K and V of s heads
of all ranks. Use the ring if the buffers do not fit, or if g = 1.

Cost of a rank, for equal shards of t tokens. Its K and V have N = b t g (d + dv) elements of e bytes: batch b, g key heads,
widths d and dv. An element of reduce_dtype has E bytes. A message is one collective; n is the number of steps of the
pass. With backward_schedule="scatter" and without rank_invariant (`owner_computes.py`):

                            messages                       bytes received
    each pass     K, V      2 n; 2 n - 1 if pack_first     (W - 1) N e
    backward      dk, dv    n                              (W - 1) N E

FLOPs: 2 b h area (d + dv) forward, where h is the number of query heads and area the number of visible cells of the
rank's queries; backward as in `backward.py`. Peak memory beyond inputs and outputs, with n equal head groups and
buffers of W N / n elements:

    K, V        two buffers of the inputs' dtype: K and V of this step, and the shards of the next gather. Three while a
                gather starts, because the old shards are freed afterwards, and while `wait` concatenates the shards,
                because K and V of the previous step are still held. NCCL has one more for each gather in flight
    dk, dv      parts of this step: one buffer of the accumulation dtype. Parts sent and received, in this and the previous
                step: four buffers of reduce_dtype. While the parts are joined, one more of the accumulation dtype
                instead of the buffer that receives
    sent        the padded K and V of this rank, 1 / W of a buffer for each gather in flight
    sums        N elements of reduce_dtype; at the end, the larger one of dk and dv once more, to concatenate it
    out, dq     the results of all steps; dq in the accumulation dtype, and once more to concatenate it

The accumulation dtype is float32, or float64 for float64 inputs. When dk and dv peak, K and V hold two buffers, and NCCL
the one of the gather in flight.

Limits: s must divide g, and g must divide h. A gather pads each shard to the size of the largest, so W - 1 shards of
that size arrive. The reduce-scatter does not pad. If only one of k and v needs a gradient, both dk and dv are
computed and sent.

This file exceeds 200 lines, so that the options, the costs and the code stay on one page.

Sources: all-gather: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2. Some heads at a time: Zilin Zhu,
ring-flash-attention. Split groups, float32 reduction: aqlaboratory/ring-flash-attention pull request 12.
"""

from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.local import tiled_forward
from canon.reference.owner_computes import owner_backward, owner_forward, query_heads
from canon.reference.ring import ring_backward
from canon.reference.sequence_exchanges import SequenceGather
from canon.reference.sinks import under_sink
from canon.reference.strides import Steps, strided_steps, suggest_strides
from canon.runtime.autograd import differentiable
from canon.runtime.call import Call, agreed_call
from canon.runtime.checks import accumulate_dtype, check_sink, kind_of_sink, under_autocast
from canon.runtime.group import Group
from canon.runtime.operators import call_operator, is_traced
from canon.runtime.passes import Passes, makes_passes

__all__ = ["strided_attention", "suggest_strides"]


def strided_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    head_stride: int = 1,
    forward_first_stride: int | None = None,
    backward_first_stride: int | None = None,
    backward_last_stride: int | None = None,
    pack_first: bool = True,
    backward_schedule: str = "scatter",
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of this rank's queries over the keys of all ranks. All ranks must call it and its backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or all without the batch axis.
        mask: over the whole sequence; None is causal.
        layout: the tokens of each rank; None is contiguous.
        head_stride: number of key heads in a head group.
        forward_first_stride, backward_first_stride: number of key heads in the first step, less than head_stride. None: no
            split.
        backward_last_stride: number of key heads in the last step, likewise. If both backward strides are given, there
            must be two head groups or more: one group is split only once.
        pack_first: send K and V of the first step as one message. False: two messages, and one copy less.
        backward_schedule: "scatter" (module's docstring) or "ring": the backward pass of `ring_attention`, whose
            memory does not grow with W. It takes no backward strides.
        scale: factor of the scores; None is 1 / sqrt(d).
        sink: a logit (h,) of each query head, as in `attention`, equal on all ranks. A rank's gradient of it is the sum
            over its own tokens: add the gradients of all ranks, as for every replicated parameter.
        group: a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this process
            is the only rank.
        reduce_dtype: dtype in which dk and dv are sent. None: float32 (float64 for float64). "scatter" also computes
            the sums in it.
        backward: "fused", "split", "head_parallel" or "auto", the method in each step: see `backward.py`.
        rank_invariant: return, on any number of ranks, the bits that one rank would return (`owner_computes.py`). Each
            piece of the layout, a run of tokens on one rank, must then start at a multiple of 128, in the sequence and
            in the rank's shard. layout=None is then contiguous with such pieces, so shards can differ in size.
        return_lse: also return lse (b, h, t), the natural logarithm of the softmax's denominator without the sink, in
            float32 (float64 for float64). It is differentiable.

    All ranks must pass equal masks, layouts, dtypes, batches, heads, head widths, scales, options and requires_grad.
    The sequence is as long as the mask; without a mask, as the layout; without both, W t tokens. The strides of a call
    can change its results by rounding only.

    Raises:
        ValueError or TypeError: on every rank, if the arguments of one rank do not fit together or differ from those
            of the others. Also if strides do not fit the heads, a backward stride is given with "ring", or an option
            or the layout contradicts rank_invariant.

    For costs and sources, see the module's docstring.
    """
    strides = dict(
        head_stride=head_stride,
        forward_first_stride=forward_first_stride,
        backward_first_stride=backward_first_stride,
        backward_last_stride=backward_last_stride,
        pack_first=pack_first,
        backward_schedule=backward_schedule,
    )
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    options |= dict(rank_invariant=rank_invariant)
    return _strided(q, k, v, mask, layout, sink, return_lse, strides, **options)


@under_autocast("q", "k", "v")
def _strided(q, k, v, mask, layout, sink, return_lse, strides, **options):
    if is_traced():
        check_sink(q, sink)
        out, lse = call_operator("reference", "strided_attention", q, k, v, mask, layout, **strides, **options)
    else:
        passes = _passes("strided_attention", q, k, v, mask, layout, sink=kind_of_sink(sink), **strides, **options)
        # `_passes` has compared its shape and dtype between ranks: a wrong sink raises on all of them.
        check_sink(q, sink)
        out, lse = differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=True)
    return under_sink(out, lse, sink, return_lse)


@makes_passes("reference", "strided_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None,
    *, scale, group, reduce_dtype, backward, rank_invariant, pass_name="forward", sink=None, **strides,
) -> Passes:  # fmt: skip
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, pass_name=pass_name)
    options |= dict(rank_invariant=rank_invariant)
    call = agreed_call(function, q, k, v, mask, layout, **options, **strides, sink=sink)
    steps = strided_steps(k.shape[-2], **strides)  # all ranks agree on the strides: bad ones raise on all of them
    forward, backward = partial(strided_forward, call, steps), partial(strided_backward, call, steps)
    if rank_invariant:
        fetch = partial(SequenceGather, call, steps.pack_first)
        forward = partial(owner_forward, call, steps.forward, fetch)
        backward = partial(owner_backward, call, steps.backward, fetch, fetch)
    elif steps.backward is None:  # backward_schedule is "ring"
        backward = partial(ring_backward, call)
    return Passes(forward, backward, call)


def strided_forward(call: Call, steps: Steps, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t)."""
    mask = call.layout.local_mask(call.mask, call.rank, range(call.ranks))
    outs, lses = [], []
    gather = AllGather(k, v, steps.forward[0], call, steps.pack_first)
    for heads, next_heads in zip(steps.forward, (*steps.forward[1:], None), strict=True):
        k_full, v_full = gather.wait()
        if next_heads:
            gather = AllGather(k, v, next_heads, call)
        sharing = query_heads(heads, q, k)
        out, lse = tiled_forward(q[:, :, sharing], k_full, v_full, mask, scale=call.scale, out_dtype=q.dtype)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


def strided_backward(
    call: Call, steps: Steps, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv in the dtype of q. dq is None if q needs no gradient; dk, dv if neither k nor v needs one."""
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    mask = call.layout.local_mask(call.mask, call.rank, range(call.ranks))
    delta = make_delta(dout, out, dlse)
    dqs, sums, reduction = [], [], None
    gather = AllGather(k, v, steps.backward[0], call, steps.pack_first)
    for heads, next_heads in zip(steps.backward, (*steps.backward[1:], None), strict=True):
        k_full, v_full = gather.wait()
        if next_heads:
            gather = AllGather(k, v, next_heads, call)
        sharing = query_heads(heads, q, k)
        dq, dk_full, dv_full = tiled_backward(
            dout[:, :, sharing], q[:, :, sharing], k_full, v_full, lse[:, sharing], delta[:, sharing], mask,
            scale=call.scale, method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
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


class AllGather:
    """An all-gather in flight: K and V of some heads, from all ranks."""

    def __init__(self, k: Tensor, v: Tensor, heads: range, call: Call, packed: bool = False):
        self.k, self.v = (x[:, :, heads.start : heads.stop] for x in (k, v))
        self.sizes, self.shards, self.requests = [call.layout.size(r) for r in range(call.ranks)], [], []
        if call.ranks == 1:
            return
        tensors = [torch.cat([self.k, self.v], dim=-1)] if packed else [self.k, self.v]
        for x in tensors:
            padded = x.new_zeros(x.shape[0], max(self.sizes), *x.shape[2:])
            padded[:, : x.shape[1]] = x
            shards = [torch.empty_like(padded) for _ in self.sizes]
            # The request keeps `padded` until the message is complete.
            self.requests.append(dist.all_gather(shards, padded, group=call.group, async_op=True))
            self.shards.append(shards)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the messages and return K and V of all ranks' tokens, in rank order."""
        if not self.requests:
            return self.k, self.v
        for request in self.requests:
            request.wait()
        full = [
            torch.cat([shard[:, :size] for shard, size in zip(shards, self.sizes, strict=True)], dim=1)
            for shards in self.shards
        ]
        return tuple(full) if len(full) == 2 else full[0].split([self.k.shape[-1], self.v.shape[-1]], dim=-1)


class ReduceScatter:
    """A reduce-scatter in flight: this rank's parts of dk and dv go to the owners of the keys."""

    def __init__(self, dk_full: Tensor, dv_full: Tensor, call: Call):
        self.widths = [dk_full.shape[-1], dv_full.shape[-1]]
        parts = torch.cat([dk_full, dv_full], dim=-1).to(call.reduce_dtype)
        parts = parts.transpose(0, 1).contiguous()  # tokens first: the message is split along axis 0
        sizes = [call.layout.size(r) for r in range(call.ranks)]
        self.received = parts.new_empty(call.ranks, sizes[call.rank], *parts.shape[1:])  # a part from each rank
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
        """Wait for the messages and return the sums of dk and dv for this rank's tokens, in reduce_dtype."""
        if self.request:
            self.request.wait()
        total, *others = self.received.unbind(0)
        for other in others:  # in rank order, rounded to reduce_dtype each time
            total = total + other
        return total.transpose(0, 1).split(self.widths, dim=-1)
