"""Magi attention at speed: the casts of `canon.reference.magi`, all started at once, each waited for where it is used.

    stream       step 0           step 1                   step 2
    casts        keys of step 1   keys of step 2           .
    compute      own keys         keys of cast 0           keys of cast 1
    reductions   .                .                        dk, dv of cast 0       dk, dv of cast 1

- All rows that a rank sends in a pass are gathered by one kernel; the casts follow one another without waiting for a kernel.
- A step computes only the queries from the first to the last that see its keys; parts are merged by one kernel, in place.
- With ``stages=0`` the own keys and the received ones stand in one buffer: one kernel, no merge, no float32 result.
- Gradients of received keys leave after their kernel and are added under the next one; by rows, in rank order, no atomics.
- With ``keep_kv`` nothing is fetched in the backward pass; so the own keys come last, and every reduction is under a kernel.

Cost: as `canon.reference.magi`. Memory: what is sent, S N items, and received, R N (stages=0: own K and V once more), at
once; backward as much again in reduce_dtype for one cast; float32 results and dq for more than one step.

Source: as `canon.reference.magi`.
"""

from functools import lru_cache

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon.fast.backward import make_delta
from canon.fast.casts import Exchange, cast_plan, group_cast, group_reduce, plan_report, rows_returned, rows_sent
from canon.fast.kernels.triton.rows import add_rows, take_rows
from canon.fast.local import attention_backward, attention_forward, merge_into
from canon.fast.planner import dispatch
from canon.fast.tiles import touched
from canon.fast.transport import way_of
from canon.reference.call import Call, accumulate_dtype, agreed_call, batched
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
def _magi(q, k, v, mask, layout, stages, keep_kv, scale, group, reduce_dtype, backward, return_lse):
    call = agreed_call(
        "magi_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, stages=stages, keep_kv=keep_kv,
    )  # fmt: skip
    plan = cast_plan(call.mask, call.layout, stages=stages)  # once all agree: what is wrong is wrong on all ranks
    out, lse = _Magi.apply(*batched(q, k, v), call, plan, keep_kv)
    out, lse = (out.squeeze(0), lse.squeeze(0)) if q.ndim == 3 else (out, lse)
    return (out, lse) if return_lse else out


class _Magi(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, plan, keep_kv):
        keys = _Keys(k, v, call, plan)
        out, lse = _forward(q, keys, call, plan)
        ctx.save_for_backward(q, k, v, out, lse, *(keys.buffers if keep_kv else ()))
        ctx.call = call, plan
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *kept = ctx.saved_tensors
        call, plan = ctx.call
        return *_backward(dout, q, k, v, out, lse, dlse, _Keys(k, v, call, plan, kept), call, plan), None, None, None


class _Keys:
    """K and V of each step: the own ones, or a buffer of rows (tokens, b, g, d + dv) that a cast fills, used as it comes."""

    def __init__(self, k: Tensor, v: Tensor, call: Call, plan: CastPlan, kept: list[Tensor] | None = None):
        self.k, self.v, self.plan = k, v, plan
        self.kept = bool(kept)
        self.buffers, self.casts = kept or [], []
        if plan.casts and not kept:
            self._start(call)

    def _start(self, call: Call) -> None:
        k, v, plan, rank = self.k, self.v, self.plan, call.rank
        (b, t, g, d), dv = k.shape, v.shape[-1]
        group, index = way_of(call.group, k.device).gathers, rows_sent(plan, None, rank, k.device)
        sent = k.new_empty(len(index), b, g, d + dv)
        take_rows(k, v, index, sent.transpose(0, 1))
        sizes = [(plan.receive_sizes(cast, rank), plan.send_sizes(cast, rank)) for cast in range(plan.casts)]
        own = 0 if plan.stages else t
        for (received_sizes, sent_sizes), part in zip(sizes, sent.split([sum(sent) for _, sent in sizes]), strict=True):
            buffer = k.new_empty(own + sum(received_sizes), b, g, d + dv)
            self.buffers.append(buffer)
            self.casts.append(Exchange(buffer[own:], part, received_sizes, sent_sizes, group))
        if own:  # copied while the rest is on its way
            k_rows, v_rows = (x[:own].transpose(0, 1) for x in self.buffers[0].split([d, dv], -1))
            k_rows.copy_(k)
            v_rows.copy_(v)

    def at(self, step: int) -> tuple[Tensor, ...]:
        """K (b, keys, g, d) and V (b, keys, g, dv), for what is launched from here on."""
        cast = self.plan.cast_of(step)
        if cast is None:
            return self.k, self.v
        if not self.kept:
            self.casts[cast].wait()
        return self.buffers[cast].transpose(0, 1).split([self.k.shape[-1], self.v.shape[-1]], -1)


@lru_cache(maxsize=4096)
def _seeing(plan: CastPlan, step: int, rank: int) -> tuple[slice, Mask]:
    """The queries from the first to the last that see a key of the step, and the mask of these: all in the first step."""
    mask = plan.local_mask(step, rank)
    if plan.holds_own(step):
        return slice(0, mask.queries), mask
    rows, _ = touched(mask)
    return slice(rows.start, rows.stop), mask.crop(queries=rows)


def _forward(q: Tensor, keys: _Keys, call: Call, plan: CastPlan) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) in the dtype of q, lse (b, h, t) in the accumulation dtype."""
    dtype = q.dtype if plan.steps == 1 else accumulate_dtype(q.dtype)
    out, lse = attention_forward(q, *keys.at(0), plan.local_mask(0, call.rank), scale=call.scale, out_dtype=dtype)
    for step in range(1, plan.steps):
        rows, mask = _seeing(plan, step, call.rank)
        held = keys.at(step)
        if mask.bands:
            part = attention_forward(q[:, rows], *held, mask, scale=call.scale, out_dtype=dtype)
            merge_into(out[:, rows], lse[:, :, rows], *part)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    keys: _Keys, call: Call, plan: CastPlan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of this rank's tokens, in the dtype of q."""
    delta, accumulate = make_delta(dout, out, lse, dlse), accumulate_dtype(q.dtype)
    home = _Home(k, v, call, plan)
    dq = None
    for step in (*range(1, plan.steps), 0) if keys.kept else range(plan.steps):
        (rows, mask), held = _seeing(plan, step, call.rank), keys.at(step)
        if not mask.bands and not plan.holds_own(step):
            home.take(step, [x[:, :0].to(accumulate) for x in held])
            continue
        dq_part, *parts = attention_backward(
            dout[:, rows], q[:, rows], *held, out[:, rows], lse[:, :, rows], mask, scale=call.scale,
            delta=delta[:, :, rows], method=call.backward, grad_dtype=accumulate if plan.casts else None,
        )  # fmt: skip
        if dq is None and plan.holds_own(step):  # of all queries
            dq = dq_part
        else:
            dq = torch.zeros(q.shape, dtype=accumulate, device=q.device) if dq is None else dq
            dq[:, rows] += dq_part
        home.take(step, parts)
    return dq.to(q.dtype), *home.finish()


class _Home:
    """dk and dv of the own tokens, to which the other ranks' parts come back; at most one reduction is under way."""

    def __init__(self, k: Tensor, v: Tensor, call: Call, plan: CastPlan):
        self.k, self.v, self.call, self.plan = k, v, call, plan
        self.sums: list[Tensor] = []  # the own part, float32, once it is there; then with what has come
        self.waiting: list[tuple[Tensor, int]] = []  # what came before the own part was there
        self.leaving: tuple[Exchange, Tensor, int] | None = None

    def take(self, step: int, parts: list[Tensor]) -> None:
        """What a step found, dk and dv (b, keys, g, width): the own part stays, the rest starts on its way."""
        self._arrive()
        t, cast = self.k.shape[1], self.plan.cast_of(step)
        if self.plan.holds_own(step):
            self.sums = [part[:, :t] for part in parts]
            parts = [part[:, t:] for part in parts]
        if cast is None:
            return
        sent_sizes, received_sizes = (f(cast, self.call.rank) for f in (self.plan.send_sizes, self.plan.receive_sizes))
        sent = torch.cat([part.to(self.call.reduce_dtype) for part in parts], -1).transpose(0, 1).contiguous()
        received = sent.new_empty(sum(sent_sizes), *sent.shape[1:])  # what had been sent comes back
        group = way_of(self.call.group, self.k.device).reductions
        self.leaving = Exchange(received, sent, sent_sizes, received_sizes, group), received, cast

    def finish(self) -> list[Tensor]:
        """dk and dv, in the dtype of k."""
        self._arrive()
        for received, cast in self.waiting:
            self._add(received, cast)
        return [x.to(self.k.dtype) for x in self.sums]

    def _arrive(self) -> None:
        if self.leaving is None:
            return
        (exchange, received, cast), self.leaving = self.leaving, None
        exchange.wait()
        if self.sums:
            self._add(received, cast)
        else:
            self.waiting.append((received, cast))

    def _add(self, received: Tensor, cast: int) -> None:
        table = rows_returned(self.plan, cast, self.call.rank, self.k.device)
        parts = received.transpose(0, 1).split([x.shape[-1] for x in self.sums], -1)
        for total, part in zip(self.sums, parts, strict=True):
            add_rows(total, part, *table, total)
