"""Magi attention at speed: the casts of `canon.reference.magi`, each under the kernel before it, by `schedule.pipeline`.

    stream       step 0           step 1                   step 2
    casts        keys of step 1   keys of step 2           .
    compute      own keys         keys of cast 0           keys of cast 1
    reductions   .                .                        dk, dv of cast 0       dk, dv of cast 1

- Two casts are held at most, the one that is computed on and the one that is coming; all of them with ``keep_kv``.
- A step computes only the queries that see its keys (`canon.fast.active_queries`); parts are merged by one kernel.
- With ``stages=0`` the own keys and the received ones stand in one buffer: one kernel, no merge, no float32 result.
- Kernels write gradients of received keys where they leave from. Where dk and dv have a kernel of their own, they leave before
  that of dq, so even a single reduction has a kernel to run under. They are added to the own part beside it: cast by cast, and
  rank by rank in each, by rows and without atomics.
- With ``keep_kv`` nothing is fetched in the backward pass; so the own keys come last, and every reduction is under a kernel.
  Their gradient is then added last, too.

Cost: as `canon.reference.magi`. Memory while the keys of cast i are used, R_i and S_i being the tokens that this rank receives
and sends in it, with N = b g (d + dv) numbers of K and V each:

    K, V        (R_i + R_{i+1} + S_{i+1}) N    of the inputs' dtype; keep_kv: all R N, until they have been used again
    dk, dv      (R_i + R_{i-1} + S_{i-1}) N    of reduce_dtype: written, leaving and coming back; then (R_i + S_i) N
                t N                            of float32, of the own keys; keep_kv: twice in the last step
    the rest    out and lse, or dq, twice      of float32, so far and the newest part; backward also delta
    stages=0    K, V (t + R) N, and S N at first; dk, dv (t + R) N of float32, S N of reduce_dtype (and R N, if it is
                another); delta

Source: as `canon.reference.magi`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import ActiveQueries, active_queries_of
from canon.fast.backward import attention_backward, begin_backward, make_delta
from canon.fast.differentiable import differentiable
from canon.fast.exchange import Arriving
from canon.fast.group_collectives import GroupCast, GroupReduce, cast_plan, group_cast, group_reduce, plan_report
from canon.fast.local import attention_forward
from canon.fast.pipeline import run_pipeline, started
from canon.fast.planner import dispatch
from canon.fast.transport import transport_for
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


def magi_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    stages: int = 1,
    keep_kv: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Attention of this rank's queries over the keys of all ranks: a collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: over the whole sequence; None is causal.
        layout: which rank holds which tokens, as `dispatch` plans it, or any other; None is contiguous.
        stages: in how many casts the keys come, each under the kernel before it; 0 waits for all, then runs one kernel.
        keep_kv: keep the received keys for the backward pass instead of fetching them again.
        scale: of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: in which dk and dv travel; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options; the number of tokens is the
    mask's, else the layout's, else W t.

    Raises:
        ValueError: on every rank, if the arguments of one do not fit or differ from the others'.

    Source: Tao and Huang, MagiAttention (2025).
    """
    return _magi(q, k, v, mask, layout, stages, keep_kv, scale, group, reduce_dtype, backward, return_lse)


@torch.compiler.disable  # one opaque step: a compiled model breaks its graph here, and traces no plan
@under_autocast("q", "k", "v")
def _magi(q, k, v, mask, layout, stages, keep_kv, scale, group, reduce_dtype, backward, return_lse):
    call = agreed_call(
        "magi_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, stages=stages, keep_kv=keep_kv,
    )  # fmt: skip
    plan = cast_plan(call.mask, call.layout, stages=stages)  # once all agree: what is wrong is wrong on all ranks

    def forward(q, k, v):
        keys = _Keys(k, v, call, plan, keep=keep_kv)
        return *_forward(q, keys, call, plan), *keys.kept

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse, *kept):
        return _backward(needs_grad, dout, dlse, q, k, v, out, lse, _Keys(k, v, call, plan, kept), call, plan)

    return differentiable(q, k, v, forward, differentiate, call=call, return_lse=return_lse)


class _Keys:
    """K and V of each step: the own ones, or rows as a cast brings them; ``kept`` are those of each cast, if they stay."""

    def __init__(
        self, k: Tensor, v: Tensor, call: Call, plan: CastPlan, kept: Sequence[Tensor] = (), keep: bool = False
    ):
        self.k, self.v, self.call, self.plan, self.kept, self.keep = k, v, call, plan, list(kept), keep

    def fetch(self, step: int) -> Arriving:
        """Start to bring those of a step; `wait` gives K (b, keys, g, d) and V (b, keys, g, dv)."""
        k, v, cast = self.k, self.v, self.plan.cast_of(step)
        if cast is None:
            return Arriving([], [k, v])
        if cast < len(self.kept):
            return Arriving([], _columns(self.kept[cast], k))
        rows = _rows(k, v, self.plan, step, self.call.rank, k.dtype)
        own = k.shape[1] if self.plan.holds_own(step) else 0
        came = GroupCast(k, v, self.plan, cast, self.call.rank, rows[own:], self.call.group)
        if step:  # the kernel of the step before comes next, and beside one that fills all processors nothing begins
            transport_for(self.call.group, k.device).wait_until_started()
        if own:  # copied while the others are on their way
            for target, source in zip(_columns(rows[:own], k), (k, v), strict=True):
                target.copy_(source)
        if self.keep:
            self.kept.append(rows)
        return Arriving([came], _columns(rows, k))


def _rows(k: Tensor, v: Tensor, plan: CastPlan, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Room for a step's K and V or their gradients, a row (b, g, d + dv) for each token: the own ones first, if any."""
    (b, _, g, d), tokens = k.shape, plan.local_mask(step, rank).keys
    return k.new_empty(tokens, b, g, d + v.shape[-1], dtype=dtype)


def _columns(rows: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Such rows as K (b, tokens, g, d) and V (b, tokens, g, dv)."""
    d = k.shape[-1]
    return rows.transpose(0, 1).split([d, rows.shape[-1] - d], -1)


def _seeing(plan: CastPlan, step: int, rank: int) -> ActiveQueries:
    """The queries that see a key of the step: of the own keys all."""
    return active_queries_of(plan.local_mask(step, rank), plan.holds_own(step))


def _forward(q: Tensor, keys: _Keys, call: Call, plan: CastPlan) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) in the dtype of q, lse (b, h, t) in the accumulation dtype."""
    dtype = q.dtype if plan.steps == 1 else accumulate_dtype(q.dtype)
    running: list[Tensor] = []  # out and lse of every query: first over the own keys, then the other parts merged in

    def compute(step: int, held: Sequence[Tensor]) -> None:
        seen = _seeing(plan, step, call.rank)
        if not seen.mask.bands and running:
            return
        part = attention_forward(seen.take(q), *held, seen.mask, scale=call.scale, out_dtype=dtype)
        if running:
            seen.merge(running, part)
        else:
            running.extend(part)

    run_pipeline(plan.steps, keys.fetch, compute)
    out, lse = running
    return out.to(q.dtype), lse


def _backward(
    needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: _Keys, call: Call, plan: CastPlan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """GroupReduce dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    if not plan.casts:
        return attention_backward(
            dout, q, k, v, out, lse, plan.local_mask(0, call.rank),
            scale=call.scale, dlse=dlse, method=call.backward, needs_grad=needs_grad,
        )  # fmt: skip
    order = (*range(1, plan.steps), 0) if keys.kept else range(plan.steps)
    fetch = started(lambda turn: keys.fetch(order[turn]))
    delta, accumulate, own = make_delta(dout, out, lse, dlse), accumulate_dtype(q.dtype), k.shape[1]
    dq, keys_need_grad = None, any(needs_grad[1:])
    if needs_grad[0]:
        dq = torch.empty(q.shape, dtype=q.dtype if plan.steps == 1 else accumulate, device=q.device)
    home: Tensor | None = None  # rows of dk and dv of the own tokens, so far

    def compute(turn: int, held: Sequence[Tensor]) -> tuple[Tensor | None, Callable[[], None]]:
        """GroupReduce dk and dv of the step's keys, and the function that makes dq."""
        step = order[turn]
        seen, own_keys = _seeing(plan, step, call.rank), plan.holds_own(step)
        grads = None
        if keys_need_grad:
            grads = _rows(k, v, plan, step, call.rank, accumulate if own_keys else call.reduce_dtype)
        at_once = own_keys and not turn  # all of dq, and the first part of it
        if dq is not None and not turn and not at_once:
            dq.zero_()
        if not seen.mask.bands and not own_keys:
            return grads, lambda: None
        queries, part = seen.take(q), dq
        if dq is not None and not at_once:
            part = torch.empty_like(queries, dtype=dq.dtype)
        make_part = begin_backward(
            seen.take(dout), queries, *held, seen.take(lse, 2), seen.take(delta, 2), seen.mask,
            call.scale, call.backward, part, *((None, None) if grads is None else _columns(grads, k)),
        )  # fmt: skip

        def make_dq():
            make_part()
            if dq is not None and not at_once:
                seen.add(dq, part)

        return grads, make_dq

    def send_home(turn: int, grads: Tensor | None, _: None) -> GroupReduce | None:
        nonlocal home
        if grads is None:
            return None
        step = order[turn]
        if plan.holds_own(step):
            mine, grads = grads[:own], grads[own:]
            home = mine if home is None else home.add_(mine)
        elif home is None:
            home = torch.zeros(own, *grads.shape[1:], dtype=accumulate, device=grads.device)
        cast = plan.cast_of(step)
        return (
            None if cast is None else GroupReduce(grads.to(call.reduce_dtype), plan, cast, call.rank, home, call.group)
        )

    run_pipeline(plan.steps, fetch, compute, send_home)
    dk, dv = (None, None) if home is None else _columns(home, k)
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, dk, dv))
