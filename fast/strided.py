"""Strided attention with overlap: the next keys and the last gradients travel while a step is
computed.

Algorithm, sums and messages are those of `canon.reference.strided`. Kernels read K and V where they
were received, and write dk and dv, rounded to reduce_dtype, into the sending buffer. Copies and
sums of received parts run on the communication stream.

Scratch, with T the most tokens of a rank, N = b T g (d + dv), W ranks and w the most key heads of a
step, in buffers of W N w / g elements: two to gather, in the dtype of the inputs; backward also two
to send and one to receive, in reduce_dtype (with a single step, one each); delta; that of the
backward method.

Sources: as `canon.reference.strided`.
"""

from collections.abc import Iterator
from itertools import cycle, repeat

from torch import Tensor

from canon.faces import public_strided
from canon.fast.active_queries import active_queries_of, visible_keys
from canon.fast.backward import QueryInputs, empty_gradients, make_delta
from canon.fast.half import FAST, Part
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.ring import Ring, RingStep, ring_backward, ring_forward
from canon.fast.schedule import (
    Step,
    StepBackward,
    cached_parts,
    parts_of,
    receiving,
    run_backward,
    run_forward,
)
from canon.fast.transport.messages import (
    AllGather,
    HeadGroup,
    ReduceScatter,
    gathered_mask,
    padded_tokens,
)
from canon.fast.transport.tile_exchanges import OwnTokens, TileGather
from canon.masks.head_groups import Steps, steps_of
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call

__all__ = ["strided_attention"]


def strided_plan(call: Call) -> "_Schedule | _OwnerSchedule":
    """Return the steps of both passes. Raises ValueError if the strides do not fit the heads."""
    steps = steps_of(call.shapes[1][2], call.options)
    return _OwnerSchedule(call, steps) if call.options["rank_invariant"] else _Schedule(call, steps)


class _OwnerSchedule:
    def __init__(self, call: Call, steps: Steps):
        self.steps, self.exchange = steps, TileGather(call) if call.ranks > 1 else OwnTokens(call)


class _Schedule:
    """The steps of both passes; ``backward`` is None where that pass is the ring's."""

    def __init__(self, call: Call, steps: Steps):
        self.call = call
        visible, mask = visible_keys(gathered_mask(call.layout, call.mask, call.rank))
        self.active = active_queries_of(mask, all_queries=True)
        new = lambda steps: tuple(_Step(self, visible, heads) for heads in steps)
        self.forward, self.backward = new(steps.forward), None
        if steps.backward is not None and call.ranks > 1:
            self.backward = new(steps.backward)

    @property
    def nbytes(self) -> int:
        return 1000 + self.active.nbytes + 1000 * (len(self.forward) + len(self.backward or ()))


class _Step(Step):
    """Some key ``heads`` of all ranks, and the query heads that share them. ``visible``: the keys
    of a gathered buffer from the first to the last that this rank sees.
    """

    def __init__(self, schedule: _Schedule, visible: slice, heads: range):
        q, k, v = schedule.call.shapes
        share, self.visible = q[2] // k[2], visible
        self.group = HeadGroup(schedule.call, k[0], heads, (k[3], v[3]))
        queries = slice(share * heads.start, share * heads.stop)
        super().__init__(schedule.call, schedule.active, writes=True, heads=queries)

    def keys(self, buffer: Tensor) -> list[Tensor]:
        return [x[:, self.visible] for x in self.group.views(buffer)]

    def gradients(self, grads: Tensor) -> list[Tensor]:
        return self.group.zero_outside(grads, self.visible)


def strided_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    steps = call.plan.forward
    if call.ranks == 1:
        return ring_forward(call, q, k, v, max_logits)
    keys = receiving(len(steps), AllGather(k, v, call, [step.group for step in steps]).fetch)
    return run_forward(steps, keys, q, v, max_logits)


def strided_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> Gradients:  # fmt: skip
    schedule, steps = call.plan, call.plan.backward
    if steps is None:
        return ring_backward(call, needs_grad, dout, dlse, q, k, v, out, lse)
    groups = [step.group for step in steps]
    keys = receiving(len(steps), AllGather(k, v, call, groups).fetch)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    dq, dk, dv = empty_gradients(q, k, v, q.dtype, needs_grad)
    new = lambda step: StepBackward(step, inputs, v, dq, adds_dq=False)
    parts = cached_parts((schedule, dq is None, dk is None), inputs, new, steps)
    reduction = None if dk is None else ReduceScatter(dk, dv, call, groups)
    sent = cycle(reduction.sent) if reduction else repeat(None)
    start = lambda number, *_: reduction.start(number) if reduction else None
    run_backward(parts, keys, inputs, dq, sent, start)
    return dq, dk, dv


def invariant_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return owner_forward(call, call.plan.steps.forward, call.plan.exchange, q, k, v, max_logits)


def invariant_backward(call: Call, needs_grad: NeedsGrad, *given: Tensor | None) -> Gradients:
    return owner_backward(call, call.plan.steps.backward, call.plan.exchange, needs_grad, *given)


def strided_parts(call: Call, backward: bool) -> Iterator[Part]:
    key_heads = call.shapes[1][2]
    steps = steps_of(key_heads, call.options)
    if call.ranks == 1:
        yield Part(call.local_mask(0), key_heads)
        return
    padded_tokens(call.layout)
    _, mask = visible_keys(gathered_mask(call.layout, call.mask, call.rank))
    active_queries_of(mask, all_queries=True)
    for heads in set(map(len, steps.forward)):
        yield Part(mask, heads, backward=False)
    if backward and steps.backward is None:
        yield from parts_of(Ring(call, RingStep).steps, key_heads, forward=False)
    for heads in set(map(len, steps.backward or ())):
        yield Part(mask, heads, forward=False, sends=True)


VARIANTS = (
    "whole_forward",
    "whole_backward",
    "backward_parts",
    "masked_rows",
    "active_rows",
    "sinks",
    "rank_sums",
)
STRIDED = Algorithm(
    FAST,
    public_strided.STRIDED,
    strided_forward,
    strided_backward,
    invariant=(invariant_forward, invariant_backward),
    plan=strided_plan,
    parts=strided_parts,
    variants=VARIANTS,
)
strided_attention = public_strided.strided_attention(STRIDED)
