"""Magi attention with overlap: each group cast travels while the step before it is computed.

Read `canon.reference.magi` first. The algorithm and the order of sums are the same here. `schedule.run_pipeline` runs the
steps:

    stream           step 0           step 1              step 2               after
    group cast       keys of step 1   keys of step 2      .                    .
    compute          own keys         keys of cast 0      keys of cast 1       .
    group reduce     .                .                   dk, dv of cast 0     dk, dv of cast 1

- At most two casts are held: the one that is computed on and the one that is in flight. With ``keep_kv`` all are held.
- A step computes only its active queries (`active_queries.py`). One kernel merges a part into the running result.
- With ``stages=0`` the own and the received keys share one buffer: one kernel, no merge, no float32 result.
- Kernels write dk and dv of received keys into the sending buffer. dk and dv leave before the kernel of dq, if they have a
  kernel of their own, so even a single reduction overlaps with a kernel. Received gradients are added on the communication
  stream, cast by cast and rank by rank, by rows and without atomics.
- With ``keep_kv`` the backward pass fetches nothing. The own keys then come last, so that every reduction overlaps with a
  kernel; the gradient of the own keys is then added last.

Cost: as `canon.reference.magi`. Memory while the keys of cast i are used, with N = b g (d + dv) elements of K and V a token.
R_i and S_i are the tokens that this rank receives and sends in cast i:

    K, V        (R_i + R_{i+1} + S_{i+1}) N    of the inputs' dtype; keep_kv: all R N, until they have been used again
    dk, dv      (R_i + R_{i-1} + S_{i-1}) N    of reduce_dtype: written, sent and received; then (R_i + S_i) N
                t N                            of float32, of the own keys; keep_kv: twice in the last step
    the rest    out and lse, or dq, twice      of float32, running and newest part; backward also delta
    stages=0    K, V (t + R) N, and S N at first; dk, dv (t + R) N of float32, S N of reduce_dtype (and R N, if it is
                another); delta

Source: as `canon.reference.magi`.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from canon.fast.active_queries import active_queries_of, row_indices
from canon.fast.backward import QueryInputs, gradients, make_delta
from canon.fast.device import chosen_backend
from canon.fast.group_collectives import (
    GroupCast,
    GroupReduce,
    Transfer,
    cast_plan,
    group_cast,
    group_reduce,
    plan_report,
)
from canon.fast.kernels.triton.rows import take_rows
from canon.fast.local import empty_result, forward_into, forward_part
from canon.fast.messages import Pending, transport_for
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.planner import dispatch
from canon.fast.replay.recordings import replayed
from canon.fast.schedule import PartialBackward, prefetched, run_pipeline
from canon.fast.sinks import FAST
from canon.fast.tile_exchanges import OwnTokens, TileCast
from canon.masks.cast_plan import CastPlan
from canon.masks.plan_cache import PLANS
from canon.runtime import public_ranks
from canon.runtime.call import Algorithm, Call, kinds_of
from canon.runtime.checks import accumulate_dtype

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


def magi_plan(call: Call) -> "_Schedule":
    """Return the steps of both passes, without ``rank_invariant``. Raise if ``stages`` is not a whole number >= 0."""
    return _Schedule(call, cast_plan(call.mask, call.layout, stages=call.options["stages"]))


class _Schedule:
    """The steps of one kind of call."""

    def __init__(self, call: Call, plan: CastPlan):
        self.call, self.plan = call, plan
        self.steps = [_Step(self, step) for step in range(plan.steps)]

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return 1000 + self.plan.nbytes + sum(1000 + step.active.nbytes for step in self.steps)


class _Step:
    """A step of one kind of call. Its keys are the ``own`` ones, then those of the ``transfer``.

    ``active``: the queries that see a key. If the step has the own keys, all queries.
    """

    def __init__(self, schedule: _Schedule, number: int):
        call, plan, k = schedule.call, schedule.plan, schedule.call.shapes[1]
        self.call, self.number, self.width, self.holds_own = call, number, k[-1], plan.holds_own(number)
        self.active = active_queries_of(plan.local_mask(number, call.rank), self.holds_own)
        self.keys, self.own = self.active.mask.keys, k[-3] if self.holds_own else 0
        cast = plan.cast_of(number)
        self.transfer = None if cast is None else Transfer(plan, cast, call.rank)
        self.has_work = self.holds_own or bool(self.active.mask.bands)

    def columns(self, k: Tensor | None, v: Tensor | None, rows: Tensor | None) -> tuple[Tensor, ...]:
        """Return K and V of the step: the own ones where there are no rows."""
        return _columns(rows, self.width) if rows is not None else (k, v)


class _StepKeys:
    """K and V of each step: the own ones, or rows that a cast brings. ``kept`` holds the rows with ``keep``.

    ``kinds``: a key for k and v, if their kinds may differ from those of the call.
    """

    def __init__(
        self,
        steps: Sequence[_Step],
        k: Tensor,
        v: Tensor,
        kept: Sequence[Tensor] = (),
        keep: bool = False,
        kinds: Hashable = None,
    ):
        self.steps, self.k, self.v, self.kept, self.keep, self.kinds = steps, k, v, list(kept), keep, kinds

    def fetch(self, number: int) -> Pending:
        """Start to bring the keys of a step: (k, v, None), or (None, None, rows)."""
        step, k, v = self.steps[number], self.k, self.v
        if step.transfer is None:
            return Pending([], (k, v, None))
        if step.transfer.cast < len(self.kept):
            return Pending([], (None, None, self.kept[step.transfer.cast]))
        rows = _empty_rows(k, v, step.keys, k.dtype)
        received, group = rows[step.own :] if step.own else rows, step.call.group
        group_cast = GroupCast(k, v, step.transfer, received, group, kind=(step, self.kinds))
        if number:  # the next kernel fills all SMs: a cast that has not started before it would start after it
            transport_for(group, k.device).wait_until_started()
        if step.own:  # copied while the others are in flight
            replayed(_copy_own, (k, v, rows), kind=(step, self.kinds))
        if self.keep:
            self.kept.append(rows)
        return Pending([group_cast], (None, None, rows))


def _copy_own(k: Tensor, v: Tensor, rows: Tensor) -> None:
    """Write K and V of the own tokens into the first rows."""
    own = k.shape[1]
    take_rows(k, v, row_indices(0, own, k.device), rows[:own].transpose(0, 1))


def _empty_rows(k: Tensor, v: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Allocate a row (b, g, d + dv) for each token, for K and V or their gradients."""
    b, _, g, d = k.shape
    return k.new_empty(tokens, b, g, d + v.shape[-1], dtype=dtype)


def _columns(rows: Tensor, d: int) -> tuple[Tensor, ...]:
    """Return views of such rows: K (b, tokens, g, d) and V (b, tokens, g, dv)."""
    return rows.transpose(0, 1).split([d, rows.shape[-1] - d], -1)


def magi_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return out (b, t, h, dv) in the dtype of q, lse (b, h, t), and with ``keep_kv`` the rows that casts have brought."""
    keep = call.options["keep_kv"]
    if call.options["rank_invariant"]:
        exchange = TileCast(call, keep=keep) if call.ranks > 1 else OwnTokens(call)
        out, lse = owner_forward(call, [range(k.shape[2])], exchange, q, k, v)
        return out, lse, *exchange.rows
    steps = call.plan.steps
    keys = _StepKeys(steps, k, v, keep=keep)
    dtype = q.dtype if len(steps) == 1 else accumulate_dtype(q.dtype)
    running: list[Tensor] = []  # out and lse of all queries over the keys so far

    def compute(number: int, held: tuple[Tensor | None, ...]) -> None:
        step = steps[number]
        if not running:  # now, because the tokens that step 0 has sent need no memory any more
            running.extend(empty_result(q, keys.v, dtype))
        if step.has_work:
            replayed(_forward_step, (q, *held, *running), step, kind=step)

    run_pipeline(len(steps), keys.fetch, compute)
    out, lse = running
    return out.to(q.dtype), lse, *keys.kept


def _forward_step(q, k, v, rows: Tensor | None, out, lse, step: _Step) -> None:
    """Compute the part of a step, and merge it into ``out`` and ``lse``. Step 0 writes them."""
    active, scale, held = step.active, step.call.scale, step.columns(k, v, rows)
    if step.number == 0:
        forward_into(q, *held, active.mask, scale, out, lse)
    else:
        active.merge([out, lse], forward_part(active.take(q), *held, active.mask, scale=scale, out_dtype=out.dtype))


def magi_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *kept: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are neither computed nor sent."""
    if call.options["rank_invariant"]:
        exchange = TileCast(call, kept) if call.ranks > 1 else OwnTokens(call)
        steps = [range(k.shape[2])]
        return owner_backward(call, steps, exchange, needs_grad, dout, dlse, q, k, v, out, lse)
    schedule, plan = call.plan, call.plan.plan
    if not plan.casts:
        mask = plan.local_mask(0, call.rank)
        return gradients(dout, q, k, v, out, lse, dlse, mask, call.scale, call.backward, needs_grad)
    keys = _StepKeys(schedule.steps, k, v, kept, kinds=kinds_of(k, v, *kept))
    order = (*range(1, plan.steps), 0) if kept else range(plan.steps)
    fetch = prefetched(lambda place: keys.fetch(order[place]))
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    backward = _Backward(schedule, order, inputs, keys, needs_grad)
    run_pipeline(plan.steps, fetch, backward.compute, backward.reduce)
    dk, dv = (None, None) if backward.own_rows is None else _columns(backward.own_rows, k.shape[-1])
    return tuple(None if x is None else x.to(q.dtype) for x in (backward.dq, dk, dv))


class _Backward:
    """One backward pass: the running dq, and ``own_rows``, the running dk and dv of the own tokens.

    ``order`` lists the steps in the order in which they are computed.
    """

    def __init__(
        self,
        schedule: _Schedule,
        order: Sequence[int],
        inputs: QueryInputs,
        keys: _StepKeys,
        needs_grad: tuple[bool, bool, bool],
    ):
        self.call, self.inputs, self.k, self.v = schedule.call, inputs, keys.k, keys.v
        self.accumulate, self.keys_need_grad = accumulate_dtype(self.k.dtype), any(needs_grad[1:])
        self.dq = self.own_rows = None
        if needs_grad[0]:
            dtype = self.k.dtype if len(schedule.steps) == 1 else self.accumulate
            self.dq = torch.empty(inputs.q.shape, dtype=dtype, device=self.k.device)
        grads = needs_grad[0], self.keys_need_grad
        key = _StepBackward, schedule, order[0], grads, kinds_of(*inputs[:3]), keys.kinds, chosen_backend()
        new = lambda place: _StepBackward(schedule.steps[order[place]], place, inputs, keys.v, self.dq)
        self.parts = PLANS.find(key, lambda: tuple(map(new, range(len(order)))))

    def compute(self, place: int, held: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Callable[[], None]]:
        """Launch the kernels of dk and dv. Return their rows, and the function that launches dq."""
        part = self.parts[place]
        rows = self._gradient_rows(part.step) if self.keys_need_grad else None
        if self.dq is not None and place == 0 and part.kernels.adds_dq:
            self.dq.zero_()
        if not part.step.has_work:
            return rows, lambda: None
        room = part.kernels.scratch.empty(self.k.device)
        tensors = (*self.inputs, *held, self.dq, rows, room)
        replayed(_launch_dkdv, tensors, part, kind=part)
        return rows, lambda: replayed(_launch_dq, tensors, part, kind=part)

    def reduce(self, place: int, rows: Tensor | None, _: None) -> GroupReduce | None:
        """Add the own rows of the step to ``own_rows``, and start to send the other rows to their owners."""
        if rows is None:
            return None
        step, own = self.parts[place].step, self.k.shape[1]
        if step.holds_own:
            own_part, rows = rows[:own], rows[own:]
            self.own_rows = own_part if self.own_rows is None else self.own_rows.add_(own_part)
        elif self.own_rows is None:
            self.own_rows = rows.new_zeros(own, *rows.shape[1:], dtype=self.accumulate)
        if step.transfer is None:
            return None
        rows = rows.to(self.call.reduce_dtype)
        return GroupReduce(rows, step.transfer, self.own_rows, self.call.group, kind=step)

    def _gradient_rows(self, step: _Step) -> Tensor:
        """Allocate rows for dk and dv of the step's keys: in the accumulation dtype if some are own keys."""
        dtype = self.accumulate if step.holds_own else self.call.reduce_dtype
        return _empty_rows(self.k, self.v, step.keys, dtype)


class _StepBackward:
    """The backward pass of a step for one kind of call. At ``place`` 0 the own keys write all of dq; other steps add to it."""

    def __init__(self, step: _Step, place: int, inputs: QueryInputs, v: Tensor, dq: Tensor | None):
        self.step = step
        adds_dq = not (step.holds_own and place == 0)
        self.kernels = PartialBackward(step.call, step.active, inputs, v, dq, adds_dq)


def _launch_dkdv(dout, q, lse, delta, k, v, held, dq, rows, room, part: _StepBackward) -> None:
    grads = (None, None) if rows is None else _columns(rows, part.step.width)
    part.kernels.dkdv(QueryInputs(dout, q, lse, delta), *part.step.columns(k, v, held), dq, *grads, room)


def _launch_dq(dout, q, lse, delta, k, v, held, dq, rows, room, part: _StepBackward) -> None:
    part.kernels.dq(QueryInputs(dout, q, lse, delta), *part.step.columns(k, v, held), dq, rows, room)


def kept_rows(call: Call) -> list[int]:
    """Return the numbers of rows that the forward pass keeps with ``keep_kv``, by cast."""
    if not call.options["keep_kv"]:
        return []
    if call.options["rank_invariant"]:
        return [TileCast(call).plans[False].rows] if call.ranks > 1 else []
    return [step.keys for step in call.plan.steps if step.transfer is not None]


MAGI = Algorithm(FAST, "magi_attention", magi_forward, magi_backward, magi_plan, kept_rows=kept_rows)
magi_attention = public_ranks.magi_attention(MAGI)
