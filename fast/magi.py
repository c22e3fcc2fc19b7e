"""Magi attention with overlap: each group cast travels while the step before it is computed.

Read `canon.reference.magi` first. The algorithm and the order of sums are the same here. `pipeline.run_pipeline` runs the
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

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import ActiveQueries, active_queries_of
from canon.fast.backward import QueryInputs, begin_backward, gradients, make_delta
from canon.fast.differentiable import differentiable
from canon.fast.exchange import PendingKeys
from canon.fast.group_collectives import GroupCast, GroupReduce, cast_plan, group_cast, group_reduce, plan_report
from canon.fast.local import forward_part
from canon.fast.pipeline import prefetched, run_pipeline
from canon.fast.planner import dispatch
from canon.fast.tile_exchanges import cast_passes
from canon.fast.transport import transport_for
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


@torch.compiler.disable  # torch.compile breaks its graph here and does not trace plans
@under_autocast("q", "k", "v")
def magi_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    stages: int | None = None,
    keep_kv: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of this rank's queries over the keys of all ranks. A collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: the visible cells of the whole sequence; None is causal.
        layout: the tokens that each rank holds, from `dispatch` or any other; None is contiguous.
        stages: number of casts, each overlapping with the kernel before it; 0 waits for all keys and runs one kernel. None
            is 1, or 0 with rank_invariant.
        keep_kv: keep the received keys for the backward pass instead of fetching them again.
        scale: factor of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: dtype in which dk and dv travel; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        rank_invariant: return the bits of one rank, on any number of ranks (`owner_computes.py`). Then the pieces of the
            layout must begin at multiples of 128 tokens: pass ``dispatch(mask, ranks, rank_invariant=True)``.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options. The mask gives the number of
    tokens; without a mask the layout does; without either it is W t.

    Raises:
        ValueError: on every rank, if the arguments of one rank do not fit or differ from the others', or an option or
            the layout contradicts rank_invariant.

    Source: Tao and Huang, MagiAttention (2025).
    """
    stages = (0 if rank_invariant is True else 1) if stages is None else stages
    call = agreed_call(
        "magi_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward,
        rank_invariant=rank_invariant, stages=stages, keep_kv=keep_kv,
    )  # fmt: skip
    if rank_invariant:
        return differentiable(q, k, v, *cast_passes(call, keep_kv), call=call, return_lse=return_lse)
    plan = cast_plan(call.mask, call.layout, stages=stages)  # after the agreement, so that it raises on all ranks

    def forward(q, k, v):
        keys = _StepKeys(k, v, call, plan, keep=keep_kv)
        return *_forward(q, keys, call, plan), *keys.kept

    return differentiable(q, k, v, forward, partial(_backward, call, plan), call=call, return_lse=return_lse)


class _StepKeys:
    """K and V of each step: the own ones, or rows that a cast brings. ``kept`` holds the rows of each cast with ``keep``."""

    def __init__(
        self, k: Tensor, v: Tensor, call: Call, plan: CastPlan, kept: Sequence[Tensor] = (), keep: bool = False
    ):
        self.k, self.v, self.call, self.plan, self.kept, self.keep = k, v, call, plan, list(kept), keep

    def fetch(self, step: int) -> PendingKeys:
        """Start to bring K (b, keys, g, d) and V (b, keys, g, dv) of a step."""
        k, v, cast = self.k, self.v, self.plan.cast_of(step)
        if cast is None:
            return PendingKeys([], [k, v])
        if cast < len(self.kept):
            return PendingKeys([], _columns(self.kept[cast], k))
        rows = _empty_rows(k, v, self.plan.local_mask(step, self.call.rank).keys, k.dtype)
        own = k.shape[1] if self.plan.holds_own(step) else 0
        group_cast = GroupCast(k, v, self.plan, cast, self.call.rank, rows[own:], self.call.group)
        if step:  # the next kernel fills all SMs: a cast that has not started before it would start after it
            transport_for(self.call.group, k.device).wait_until_started()
        if own:  # copied while the others are in flight
            for target, source in zip(_columns(rows[:own], k), (k, v), strict=True):
                target.copy_(source)
        if self.keep:
            self.kept.append(rows)
        return PendingKeys([group_cast], _columns(rows, k))


def _empty_rows(k: Tensor, v: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Allocate a row (b, g, d + dv) for each token, for K and V or their gradients."""
    b, _, g, d = k.shape
    return k.new_empty(tokens, b, g, d + v.shape[-1], dtype=dtype)


def _columns(rows: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Return views of such rows: K (b, tokens, g, d) and V (b, tokens, g, dv)."""
    d = k.shape[-1]
    return rows.transpose(0, 1).split([d, rows.shape[-1] - d], -1)


def _active_queries(plan: CastPlan, step: int, rank: int) -> ActiveQueries:
    """Return the queries that see a key of the step. If the step has the own keys, return all queries."""
    return active_queries_of(plan.local_mask(step, rank), plan.holds_own(step))


def _forward(q: Tensor, keys: _StepKeys, call: Call, plan: CastPlan) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q and lse (b, h, t) in the accumulation dtype."""
    dtype = q.dtype if plan.steps == 1 else accumulate_dtype(q.dtype)
    running: list[Tensor] = []  # out and lse of all queries over the keys so far

    def compute(step: int, held: Sequence[Tensor]) -> None:
        active = _active_queries(plan, step, call.rank)
        if not active.mask.bands and running:
            return
        part = forward_part(active.take(q), *held, active.mask, call.scale, dtype)
        if running:
            active.merge(running, part)
        else:
            running.extend(part)

    run_pipeline(plan.steps, keys.fetch, compute)
    out, lse = running
    return out.to(q.dtype), lse


def _backward(
    call: Call, plan: CastPlan, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *kept: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are neither computed nor sent."""
    if not plan.casts:
        mask = plan.local_mask(0, call.rank)
        return gradients(dout, q, k, v, out, lse, dlse, mask, call.scale, call.backward, needs_grad)
    keys = _StepKeys(k, v, call, plan, kept)
    order = (*range(1, plan.steps), 0) if kept else range(plan.steps)
    fetch = prefetched(lambda place: keys.fetch(order[place]))
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    backward = _Backward(call, plan, order, inputs, k, v, needs_grad)
    run_pipeline(plan.steps, fetch, backward.compute, backward.reduce)
    dk, dv = (None, None) if backward.own_rows is None else _columns(backward.own_rows, k)
    return tuple(None if x is None else x.to(q.dtype) for x in (backward.dq, dk, dv))


class _Backward:
    """One backward pass: the running dq, and ``own_rows``, the running dk and dv of the own tokens.

    ``order`` lists the steps in the order in which they are computed.
    """

    def __init__(
        self,
        call: Call,
        plan: CastPlan,
        order: Sequence[int],
        inputs: QueryInputs,
        k: Tensor,
        v: Tensor,
        needs_grad: tuple[bool, bool, bool],
    ):
        self.call, self.plan, self.order, self.inputs, self.k, self.v = call, plan, order, inputs, k, v
        self.accumulate, self.keys_need_grad = accumulate_dtype(k.dtype), any(needs_grad[1:])
        self.dq = self.own_rows = None
        if needs_grad[0]:
            dtype = k.dtype if plan.steps == 1 else self.accumulate
            self.dq = torch.empty(inputs.q.shape, dtype=dtype, device=k.device)

    def compute(self, place: int, held: Sequence[Tensor]) -> tuple[Tensor | None, Callable[[], None]]:
        """Launch the kernels of dk and dv. Return their rows, and the function that launches dq."""
        step = self.order[place]
        active, holds_own = _active_queries(self.plan, step, self.call.rank), self.plan.holds_own(step)
        rows = self._gradient_rows(step) if self.keys_need_grad else None
        writes_dq = holds_own and place == 0  # this step writes all of dq; other steps add to it
        if self.dq is not None and place == 0 and not writes_dq:
            self.dq.zero_()
        if not active.mask.bands and not holds_own:
            return rows, lambda: None
        inputs, dq_part = active.take_inputs(self.inputs), self.dq
        if self.dq is not None and not writes_dq:
            dq_part = torch.empty_like(inputs.q, dtype=self.dq.dtype)
        grads = dq_part, *((None, None) if rows is None else _columns(rows, self.k))
        compute_dq = begin_backward(inputs, *held, active.mask, self.call.scale, self.call.backward, *grads)

        def add_dq() -> None:
            compute_dq()
            if self.dq is not None and not writes_dq:
                active.add(self.dq, dq_part)

        return rows, add_dq

    def reduce(self, place: int, rows: Tensor | None, _: None) -> GroupReduce | None:
        """Add the own rows of the step to ``own_rows``, and start to send the other rows to their owners."""
        if rows is None:
            return None
        step, own = self.order[place], self.k.shape[1]
        if self.plan.holds_own(step):
            own_part, rows = rows[:own], rows[own:]
            self.own_rows = own_part if self.own_rows is None else self.own_rows.add_(own_part)
        elif self.own_rows is None:
            self.own_rows = rows.new_zeros(own, *rows.shape[1:], dtype=self.accumulate)
        cast = self.plan.cast_of(step)
        if cast is None:
            return None
        rows = rows.to(self.call.reduce_dtype)
        return GroupReduce(rows, self.plan, cast, self.call.rank, self.own_rows, self.call.group)

    def _gradient_rows(self, step: int) -> Tensor:
        """Allocate rows for dk and dv of the step's keys: in the accumulation dtype if some are own keys."""
        dtype = self.accumulate if self.plan.holds_own(step) else self.call.reduce_dtype
        return _empty_rows(self.k, self.v, self.plan.local_mask(step, self.call.rank).keys, dtype)
