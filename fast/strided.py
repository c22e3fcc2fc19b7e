"""Strided attention with overlap: the next heads' keys and the last heads' gradients travel while a step is computed.

Read `canon.reference.strided` first. The algorithm, the steps and the order of sums are the same here.
`schedule.run_pipeline` runs the steps:

    stream           step i
    all-gather       K, V of step i + 1                                       its own communicator
    compute          kernel on K, V of step i; backward dk and dv first, then dq, if in kernels of their own
    all to all       dk, dv of step i - 1, started before dq of i - 1         its own communicator
    communication    copy K, V of step i + 1; sum dk, dv of step i - 1        one stream

- Kernels read K and V in the buffers that received them, with one stride from token to token. `gathered_mask` is in the
  coordinates of these buffers. A rank loads only the keys from the first to the last that its queries see.
- Kernels write out and dq of a step's heads into the results. They write dk and dv, rounded to reduce_dtype, into the sending
  buffer. After the exchange one kernel sums them in rank order: the same inputs give the same bits.

Cost, with T the most tokens of a rank, N = b T g (d + dv), W ranks and n steps. Forward: n messages.
Each rank receives (W - 1) N elements of the inputs' dtype. Backward: the same again, and n messages and (W - 1) N elements of
reduce_dtype.

    scratch     w, the most key heads of a step, gives buffers of W N w / g elements: two to gather, in the dtype of the inputs;
                backward also two to send and two to receive, in reduce_dtype; delta; the scratch of the backward method.
                With a single step, one buffer each.

Sources: as `canon.reference.strided`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from canon.fast.active_queries import active_queries_of, visible_keys
from canon.fast.backward import QueryInputs, make_delta
from canon.fast.device import chosen_backend
from canon.fast.local import empty_result, forward_into, forward_part
from canon.fast.messages import AllGather, HeadGroup, ReduceScatter, gathered_mask
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.replay.recordings import replayed
from canon.fast.ring import ring_backward
from canon.fast.schedule import PartialBackward, prefetched, run_pipeline
from canon.fast.sinks import FAST
from canon.fast.tile_exchanges import OwnTokens, TileGather
from canon.masks.head_groups import Steps, strided_steps
from canon.masks.plan_cache import PLANS
from canon.runtime import public_ranks
from canon.runtime.call import Algorithm, Call, kinds_of

__all__ = ["strided_attention"]


def strided_plan(call: Call) -> "_Schedule | _OwnerSchedule":
    """Return the steps of both passes. Raise ValueError if the strides do not fit the heads."""
    strides = {name: value for name, value in call.options.items() if name != "rank_invariant"}
    steps = strided_steps(call.shapes[1][2], **strides)
    return _OwnerSchedule(call, steps) if call.options["rank_invariant"] else _Schedule(call, steps)


class _OwnerSchedule:
    """The steps and the exchange of one kind of call with ``rank_invariant``."""

    def __init__(self, call: Call, steps: Steps):
        self.steps, self.exchange = steps, TileGather(call) if call.ranks > 1 else OwnTokens(call)


class _Schedule:
    """The steps of both passes for one kind of call. ``backward`` is None where the backward pass is that of the ring."""

    def __init__(self, call: Call, steps: Steps):
        self.call = call
        keys, self.mask = visible_keys(gathered_mask(call.layout, call.mask, call.rank))
        self.active = active_queries_of(self.mask, all_queries=True)
        new = lambda steps: tuple(_Step(self, keys, steps, i) for i in range(len(steps)))
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

    def __init__(self, schedule: _Schedule, keys: slice, steps: Sequence[range], number: int):
        q, k, v = schedule.call.shapes
        heads, widths, share = steps[number], (k[3], v[3]), q[2] // k[2]
        self.schedule, self.keys = schedule, keys
        self.queries = slice(share * heads.start, share * heads.stop)
        self.group = HeadGroup(schedule.call, k[0], heads, widths)

    def visible(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the visible K and V in a gathered buffer."""
        return [x[:, self.keys] for x in self.group.views(buffer)]


def strided_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q and lse (b, h, t) in the accumulation dtype."""
    if call.options["rank_invariant"]:
        return owner_forward(call, call.plan.steps.forward, call.plan.exchange, q, k, v)
    steps = call.plan.forward
    if call.ranks == 1:
        return forward_part(q, k, v, call.local_mask(0), scale=call.scale, out_dtype=q.dtype)
    out, lse = empty_result(q, v, q.dtype)

    def compute(number: int, buffer: Tensor) -> None:
        replayed(_forward_step, (q, buffer, out, lse), steps[number], kind=steps[number])

    run_pipeline(len(steps), AllGather(k, v, call, [step.group for step in steps]).fetch, compute)
    return out, lse


def _forward_step(q: Tensor, buffer: Tensor, out: Tensor, lse: Tensor, step: _Step) -> None:
    """Write out and lse of the heads of a step."""
    heads, options = step.queries, (step.schedule.mask, step.schedule.call.scale)
    forward_into(q[:, :, heads], *step.visible(buffer), *options, out[:, :, heads], lse[:, heads])


def strided_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are neither computed nor sent."""
    if call.options["rank_invariant"]:
        steps, exchange = call.plan.steps.backward, call.plan.exchange
        return owner_backward(call, steps, exchange, needs_grad, dout, dlse, q, k, v, out, lse)
    schedule, steps = call.plan, call.plan.backward
    if steps is None:
        return ring_backward(call, needs_grad, dout, dlse, q, k, v, out, lse)
    fetch = prefetched(AllGather(k, v, call, [step.group for step in steps]).fetch)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    needed = needs_grad[0], any(needs_grad[1:]), any(needs_grad[1:])
    new = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dq, dk, dv = (new(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True))
    reduction = None if dk is None else ReduceScatter(dk, dv, call, [step.group for step in steps])
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
    staged = (None, None) if sent is None else part.step.group.zero_outside(sent, part.step.keys)
    part.kernels.dkdv(inputs, *part.step.visible(buffer), part.dq(dq), *staged, room)


def _launch_dq(dout, q, lse, delta, buffer, dq, sent, room, part: _StepBackward) -> None:
    inputs = QueryInputs(dout, q, lse, delta).heads(part.step.queries)
    part.kernels.dq(inputs, *part.step.visible(buffer), part.dq(dq), sent, room)


STRIDED = Algorithm(FAST, "strided_attention", strided_forward, strided_backward, strided_plan)
strided_attention = public_ranks.strided_attention(STRIDED)
