"""Strided attention with overlap: the next heads' keys and the last heads' gradients travel while a step is computed.

Read `canon.reference.strided` first. The algorithm, the steps and the order of sums are the same here.
`pipeline.run_pipeline` runs the steps:

    stream           step i
    all-gather       K, V of step i + 1                                       its own communicator
    compute          kernel on K, V of step i; backward dk and dv first, then dq, if in kernels of their own
    all to all       dk, dv of step i - 1, started before dq of i - 1         its own communicator
    communication    copy K, V of step i + 1; sum dk, dv of step i - 1        one stream

- Kernels read K and V in the buffers that received them, with one stride from token to token. `gathered_mask` is in the
  coordinates of these buffers. A rank loads only the keys from the first to the last that its queries see.
- Kernels write out and dq of a step's heads into the results. They write dk and dv, rounded to reduce_dtype, into the sending
  buffer. After the exchange one kernel sums them in rank order: the same inputs give the same bits.
- `transport.py` chooses how the messages of a group travel.

Cost, with T the most tokens of a rank, N = b T g (d + dv), W ranks and n steps. Forward: 2 n messages, one less if packed.
Each rank receives (W - 1) N elements of the inputs' dtype. Backward: the same again, and n messages and (W - 1) N elements of
reduce_dtype.

    scratch     w, the most key heads of a step, gives buffers of W N w / g elements: two to gather, in the dtype of the inputs;
                backward also two to send and two to receive, in reduce_dtype; delta; the scratch of the backward method.
                With a single step, one buffer each.

Sources: as `canon.reference.strided`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from canon import reference
from canon.fast.active_queries import active_queries_of, visible_keys
from canon.fast.backward import QueryInputs, make_delta
from canon.fast.device import chosen_backend
from canon.fast.differentiable import makes_passes
from canon.fast.distributed_call import attend_distributed
from canon.fast.exchange import AllGather, HeadGroup, ReduceScatter, gathered_mask
from canon.fast.local import empty_result, forward_into, forward_part
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.partial_backward import PartialBackward
from canon.fast.pipeline import prefetched, run_pipeline
from canon.fast.replay.recordings import replayed
from canon.fast.ring import ring_backward
from canon.fast.tile_exchanges import OwnTokens, TileGather
from canon.fast.twins import twin_of
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS
from canon.reference.strides import Steps, strided_steps, suggest_strides
from canon.runtime.call import Call, agreed_call
from canon.runtime.call_arguments import kinds_of
from canon.runtime.checks import batched, under_autocast
from canon.runtime.group import Group
from canon.runtime.passes import Passes

__all__ = ["strided_attention", "suggest_strides"]


@twin_of(reference.strided_attention)
@under_autocast("q", "k", "v")
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
    options = {
        "scale": scale,
        "group": group,
        "reduce_dtype": reduce_dtype,
        "backward": backward,
        "rank_invariant": rank_invariant,
        "head_stride": head_stride,
        "forward_first_stride": forward_first_stride,
        "backward_first_stride": backward_first_stride,
        "backward_last_stride": backward_last_stride,
        "pack_first": pack_first,
        "backward_schedule": backward_schedule,
    }
    return attend_distributed("strided_attention", _passes, q, k, v, mask, layout, sink, return_lse, **options)


@makes_passes("strided_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None,
    *, scale, group, reduce_dtype, backward, rank_invariant, pass_name="forward", sink=None, **strides,
) -> Passes:  # fmt: skip
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, pass_name=pass_name)
    options |= {"rank_invariant": rank_invariant}
    call = agreed_call(function, q, k, v, mask, layout, **options, **strides, sink=sink)
    # after the agreement, so that a bad stride raises on all ranks
    if rank_invariant:
        steps, pack_first = strided_steps(k.shape[-2], **strides), strides["pack_first"]
        exchange = TileGather(call) if call.ranks > 1 else OwnTokens(call)
        forward = partial(owner_forward, call, steps.forward, pack_first, exchange)
        return Passes(forward, partial(owner_backward, call, steps.backward, pack_first, exchange), call)
    schedule = PLANS.find((_Schedule, call), lambda: _Schedule(call, strided_steps(k.shape[-2], **strides), q, k, v))
    differentiate = partial(ring_backward, call) if schedule.backward is None else partial(_backward, schedule)
    return Passes(partial(_forward, schedule), differentiate, call)


class _Schedule:
    """The steps of both passes for one kind of call. ``backward`` is None where the backward pass is that of the ring."""

    def __init__(self, call: Call, steps: Steps, q: Tensor, k: Tensor, v: Tensor):
        q, k, v = batched(q, k, v)
        self.call = call
        keys, self.mask = visible_keys(gathered_mask(call.layout, call.mask, call.rank))
        self.active = active_queries_of(self.mask, all_queries=True)
        new = lambda steps: tuple(_Step(self, keys, steps, i, q, k, v) for i in range(len(steps)))
        self.packed = steps.pack_first
        self.forward, self.backward = new(steps.forward), None
        if steps.backward is not None and call.ranks > 1:
            self.backward = new(steps.backward)

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return 1000 + self.mask.nbytes + 1000 * (len(self.forward) + len(self.backward or ()))


class _Step:
    """A step of a schedule: some key heads of all ranks, and the query heads that share them.

    ``keys``: the keys of a gathered buffer from the first to the last that this rank sees.
    """

    def __init__(
        self, schedule: _Schedule, keys: slice, steps: Sequence[range], number: int, q: Tensor, k: Tensor, v: Tensor
    ):
        heads, widths, share = steps[number], (k.shape[3], v.shape[3]), q.shape[2] // k.shape[2]
        self.schedule, self.keys = schedule, keys
        self.queries = slice(share * heads.start, share * heads.stop)
        self.gathered = HeadGroup(schedule.call, k.shape[0], heads, widths, schedule.packed and number == 0)
        self.reduced = HeadGroup(schedule.call, k.shape[0], heads, widths, packed=True)

    def visible(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the visible K and V in a gathered buffer."""
        return [x[:, self.keys] for x in self.gathered.views(buffer)]


def _forward(schedule: _Schedule, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q and lse (b, h, t) in the accumulation dtype."""
    call, steps = schedule.call, schedule.forward
    if call.ranks == 1:
        return forward_part(q, k, v, call.local_mask(0), call.scale, q.dtype)
    out, lse = empty_result(q, v, q.dtype)

    def compute(number: int, buffer: Tensor) -> None:
        replayed(_forward_step, (q, buffer, out, lse), steps[number], kind=steps[number])

    run_pipeline(len(steps), AllGather(k, v, call, [step.gathered for step in steps]).fetch, compute)
    return out, lse


def _forward_step(q: Tensor, buffer: Tensor, out: Tensor, lse: Tensor, step: _Step) -> None:
    """Write out and lse of the heads of a step."""
    heads, options = step.queries, (step.schedule.mask, step.schedule.call.scale)
    forward_into(q[:, :, heads], *step.visible(buffer), *options, out[:, :, heads], lse[:, heads])


def _backward(
    schedule: _Schedule, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are neither computed nor sent."""
    call, steps = schedule.call, schedule.backward or ()
    fetch = prefetched(AllGather(k, v, call, [step.gathered for step in steps]).fetch)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    needed = needs_grad[0], any(needs_grad[1:]), any(needs_grad[1:])
    new = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dq, dk, dv = (new(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True))
    reduction = None if dk is None else ReduceScatter(dk, dv, call, [step.reduced for step in steps])
    key = _StepBackward, schedule, needed, kinds_of(dout, q, lse), chosen_backend()
    parts = PLANS.find(key, lambda: tuple(_StepBackward(step, inputs, v, dq) for step in steps))

    def compute(number: int, buffer: Tensor) -> tuple[None, Callable[[], None]]:
        """Launch dk and dv, into the sending buffer. Return the function that launches dq."""
        part = parts[number]
        sent = reduction.sent[number % 2] if reduction else None
        tensors = (*inputs, buffer, dq, sent, part.kernels.scratch.empty(q.device))
        replayed(_launch_dkdv, tensors, part, kind=part)
        return None, lambda: replayed(_launch_dq, tensors, part, kind=part)

    run_pipeline(len(steps), fetch, compute, lambda step, *_: reduction.start(step) if reduction else None)
    return dq, dk, dv


class _StepBackward:
    """The backward pass of a step for one kind of call."""

    def __init__(self, step: _Step, inputs: QueryInputs, v: Tensor, dq: Tensor | None):
        self.step = step
        active, some = step.schedule.active, inputs.heads(step.queries)
        self.kernels = PartialBackward(step.schedule.call, active, some, v, dq, adds_dq=False)

    def dq(self, dq: Tensor | None) -> Tensor | None:
        """Return dq of the step's heads."""
        return None if dq is None else dq[:, :, self.step.queries]


def _launch_dkdv(dout, q, lse, delta, buffer, dq, sent, room, part: _StepBackward) -> None:
    """Write dk and dv of the visible keys into the sending buffer, and 0 for the other keys."""
    inputs = QueryInputs(dout, q, lse, delta).heads(part.step.queries)
    staged = (None, None) if sent is None else part.step.reduced.zero_outside(sent, part.step.keys)
    part.kernels.dkdv(inputs, *part.step.visible(buffer), part.dq(dq), *staged, room)


def _launch_dq(dout, q, lse, delta, buffer, dq, sent, room, part: _StepBackward) -> None:
    inputs = QueryInputs(dout, q, lse, delta).heads(part.step.queries)
    part.kernels.dq(inputs, *part.step.visible(buffer), part.dq(dq), sent, room)
