"""Magi attention with overlap: each group cast travels while the step before it is computed.

Algorithm, order of sums and cost are those of `canon.reference.magi`. At most two casts are held;
with ``keep_kv`` all are.

- With ``own_keys_first=False`` and one cast, own and received keys share one buffer: one kernel, no
  merge, no float32 result.
- Kernels write dk and dv of received keys into the sending buffer, before the kernel of dq.
  Received gradients are added on the communication stream.
- With ``keep_kv`` the own keys come last in the backward pass, so that every reduction overlaps
  with a kernel.

Memory while the keys of cast i are used, with N = b g (d + dv) elements of K and V a token. R_i and
S_i are the tokens that this rank receives and sends in cast i:

    K, V         (R_i + R_{i+1} + S_{i+1}) N   of the inputs' dtype; keep_kv: all R N
    dk, dv       (R_i + R_{i-1} + S_{i-1}) N   of reduce_dtype; t N of float32, of the own keys,
                                               with keep_kv twice in the last step
    the rest     out and lse, or dq, twice     of float32; backward also delta
    one buffer   K, V (t + R) N, and S N at first; dk, dv (t + R) N of float32, S N of reduce_dtype

Source: as `canon.reference.magi`.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor

from canon.faces import public_magi
from canon.fast.active_queries import active_queries_of, query_indices, row_indices
from canon.fast.backward import QueryInputs, gradients, make_delta
from canon.fast.device import rows_for
from canon.fast.group_collectives import (
    GroupReduce,
    Transfer,
    begin_cast,
    cast_plan,
    columns,
    group_cast,
    group_reduce,
    plan_report,
    rows_returned,
    rows_sent,
)
from canon.fast.half import FAST, Part
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.planner import dispatch
from canon.fast.replay.recordings import replayed
from canon.fast.ring import VARIANTS
from canon.fast.schedule import (
    Step,
    StepBackward,
    cached_parts,
    parts_of,
    receiving,
    run_backward,
    run_forward,
)
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import META
from canon.fast.transport.messages import Pending, transport_for
from canon.fast.transport.tile_exchanges import OwnTokens, TileCast
from canon.masks.cast_plan import CastPlan
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call, kinds_of
from canon.route.checks import accumulate_dtype

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


def magi_plan(call: Call) -> "_Schedule":
    options = {name: call.options[name] for name in ("casts", "own_keys_first")}
    return _Schedule(call, cast_plan(call.mask, call.layout, **options))


class _Schedule:
    def __init__(self, call: Call, plan: CastPlan):
        self.call, self.plan = call, plan
        self.steps = [_Step(self, step) for step in range(plan.steps)]

    @property
    def nbytes(self) -> int:
        return 1000 + self.plan.nbytes + sum(1000 + step.active.nbytes for step in self.steps)


class _Step(Step):
    """A step over the ``own`` keys, if any, then those of the ``transfer``."""

    def __init__(self, schedule: _Schedule, number: int):
        call, plan, k = schedule.call, schedule.plan, schedule.call.shapes[1]
        self.holds_own, self.width = plan.holds_own(number), k[-1]
        active = active_queries_of(plan.local_mask(number, call.rank), self.holds_own)
        super().__init__(call, active, writes=self.holds_own)
        self.rows, self.own = active.mask.keys, k[-3] if self.holds_own else 0
        cast = plan.cast_of(number)
        self.transfer = None if cast is None else Transfer(plan, cast, call.rank)

    def keys(self, k: Tensor | None, v: Tensor | None, rows: Tensor | None) -> Sequence[Tensor]:
        return (k, v) if rows is None else columns(rows, self.width)

    def gradients(self, grads: Tensor) -> Sequence[Tensor]:
        return columns(grads, self.width)


@dataclass(eq=False)
class _StepKeys:
    """K and V of each step: the own ones, or rows that a cast brings; with ``keep`` in ``kept``.
    ``kinds``: a key for k and v, if not those of the call.
    """

    steps: Sequence[_Step]
    k: Tensor
    v: Tensor
    kept: list[Tensor] = field(default_factory=list)
    keep: bool = False
    kinds: Hashable = None

    def fetch(self, number: int) -> Pending:
        """Start to bring the keys of a step: (k, v, None), or (None, None, rows)."""
        step, k, v = self.steps[number], self.k, self.v
        if step.transfer is None:
            return Pending([], (k, v, None))
        if step.transfer.cast < len(self.kept):
            return Pending([], (None, None, self.kept[step.transfer.cast]))
        rows = _empty_rows(k, v, step.rows, k.dtype)
        received, group = rows[step.own :] if step.own else rows, step.call.group
        work, sent = begin_cast(k, v, step.transfer, received, group, kind=(step, self.kinds))
        # the next kernel fills all SMs: a cast that has not started before it would start after it
        if number:
            transport_for(group, k.device).wait_until_started()
        if step.own:  # copied while the others are in flight
            replayed(_copy_own, (k, v, rows), kind=(step, self.kinds))
        if self.keep:
            self.kept.append(rows)
        return Pending([work], (None, None, rows), [sent])


def _copy_own(k: Tensor, v: Tensor, rows: Tensor) -> None:
    own = k.shape[1]
    rows_for(k).take_rows(k, v, row_indices(0, own, k.device), rows[:own].transpose(0, 1))


def _empty_rows(k: Tensor, v: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    b, _, g, d = k.shape
    return k.new_empty(tokens, b, g, d + v.shape[-1], dtype=dtype)


def magi_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return also the rows that casts have brought, with ``keep_kv``."""
    steps = call.plan.steps
    keys = _StepKeys(steps, k, v, keep=call.options["keep_kv"])
    return *run_forward(steps, receiving(len(steps), keys.fetch), q, v, max_logits), *keys.kept


def magi_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *kept: Tensor,
) -> Gradients:  # fmt: skip
    schedule, plan = call.plan, call.plan.plan
    if not plan.casts:
        cells = Cells(plan.local_mask(0, call.rank))
        return gradients(
            dout, q, k, v, out, lse, dlse, cells, call.scale, call.backward, needs_grad
        )
    keys = _StepKeys(schedule.steps, k, v, list(kept), kinds=kinds_of(k, v, *kept))
    order = (*range(1, plan.steps), 0) if kept else range(plan.steps)
    received = receiving(plan.steps, lambda place: keys.fetch(order[place]))
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    state = _Backward(schedule, order, inputs, keys, needs_grad)
    rows = state.gradient_rows() if any(needs_grad[1:]) else repeat(None)
    run_backward(state.parts, received, inputs, state.dq, rows, state.reduce)
    dk, dv = (None, None) if state.own_rows is None else columns(state.own_rows, k.shape[-1])
    return tuple(None if x is None else x.to(q.dtype) for x in (state.dq, dk, dv))


class _Backward:
    """The running dq of a pass, and ``own_rows``, the running dk and dv of the own tokens."""

    def __init__(
        self,
        schedule: _Schedule,
        order: Sequence[int],
        inputs: QueryInputs,
        keys: _StepKeys,
        needs_grad: NeedsGrad,
    ):
        self.call, self.k, self.v = schedule.call, keys.k, keys.v
        self.accumulate, self.own_rows, self.dq = accumulate_dtype(self.k.dtype), None, None
        own_is_first = order[0] == 0
        if needs_grad[0]:
            dtype = self.k.dtype if len(schedule.steps) == 1 else self.accumulate
            self.dq = (torch.empty if own_is_first else torch.zeros)(
                inputs.q.shape, dtype=dtype, device=self.k.device
            )
        key = schedule, own_is_first, needs_grad[0], any(needs_grad[1:]), keys.kinds
        new = lambda number: StepBackward(
            schedule.steps[number], inputs, keys.v, self.dq, adds_dq=number > 0 or not own_is_first
        )
        self.parts = cached_parts(key, inputs, new, order)

    def reduce(self, place: int, rows: Tensor | None, _: Tensor | None) -> GroupReduce | None:
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

    def gradient_rows(self) -> Iterator[Tensor]:
        for part in self.parts:
            dtype = self.accumulate if part.step.holds_own else self.call.reduce_dtype
            yield _empty_rows(self.k, self.v, part.step.rows, dtype)


def kept_rows(call: Call) -> list[int]:
    if not call.options["keep_kv"]:
        return []
    if call.options["rank_invariant"]:
        return [TileCast(call).plans[False].rows] if call.ranks > 1 else []
    return [step.rows for step in call.plan.steps if step.transfer is not None]


def invariant_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    exchange = TileCast(call, keep=call.options["keep_kv"]) if call.ranks > 1 else OwnTokens(call)
    out, lse = owner_forward(call, [range(k.shape[2])], exchange, q, k, v, max_logits)
    return out, lse, *exchange.rows


def invariant_backward(
    call: Call,
    needs_grad: NeedsGrad,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *kept: Tensor,
) -> Gradients:
    exchange = TileCast(call, kept) if call.ranks > 1 else OwnTokens(call)
    return owner_backward(
        call, [range(k.shape[2])], exchange, needs_grad, dout, dlse, q, k, v, out, lse
    )


def magi_parts(call: Call, backward: bool) -> Iterator[Part]:
    schedule, rank = magi_plan(call), call.rank
    plan, steps = schedule.plan, schedule.steps
    for cast in range(plan.casts):
        rows_sent(plan, cast, rank, META)
        if backward:
            rows_returned(plan, cast, rank, META)
    if plan.casts and call.options["keep_kv"] and steps[0].holds_own:
        query_indices(steps[0].active, META)  # its part of dq is added last
    yield from parts_of(steps, call.shapes[1][2], sends=plan.casts > 0)


MAGI = Algorithm(
    FAST,
    public_magi.MAGI,
    magi_forward,
    magi_backward,
    invariant=(invariant_forward, invariant_backward),
    plan=magi_plan,
    parts=magi_parts,
    kept_rows=kept_rows,
    variants=(*VARIANTS, "cast_rows"),
)
magi_attention = public_magi.magi_attention(MAGI)
