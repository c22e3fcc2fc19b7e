"""Magi attention: tokens are dispatched once, queries never move, and keys go only where some query sees them.

    layout = dispatch(mask, ranks)                  once for a pack: chunks, balanced by area, few keys to move
    q, k, v = (layout.shard(x, rank) ...)           once: the loader, the labels and the rotary embedding follow it
    out = magi_attention(q, k, v, mask, layout)     in every layer
    full = layout.unshard(out)                      once, if at all

Each rank computes its queries over the keys that they see, its own and received ones (`cast_plan`, `group_cast`):

    stages=0    | cast           | all keys |                           one exchange, then one kernel and no merge
    stages=2    | own keys       | keys of cast 0 | keys of cast 1 |    a cast travels under the kernel before it
                | cast 0         | cast 1         |

Parts are merged in float32 and rounded once. Backward, from the saved out and lse: the keys come again in the same casts (or
were kept: ``keep_kv``), each step gives a part of dq, which stays, and float32 dk and dv of its keys, which go back to
their owners (`group_reduce`) under the kernel after it. Own parts first, then cast by cast, and rank by rank in each.

Cost, for R tokens received and S sent by a rank, b g (d + dv) = N numbers of K and V each: forward R N items of the inputs'
dtype; backward as many again (none with keep_kv), and S N items of reduce_dtype back. Messages: one all-to-all
a cast and pass, and as many again for the gradients. Memory: own K and V once more, two casts (keep_kv: all of them, from
forward to backward), what is sent of one; float32 out, lse and dq. `plan_report` says R and S of each rank: their mean is
`volume` x (W - 1) / W of the sequence.

It does not move queries or outputs, and does not choose the layout or the number of stages.

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.reference.backward import attention_backward, make_delta
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.differentiable import differentiable
from canon.reference.group_collectives import GroupCast, GroupReduce, cast_plan, group_cast, group_reduce, plan_report
from canon.reference.layout import Layout
from canon.reference.local import attention_forward, merge
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan
from canon.reference.planner import dispatch

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


@under_autocast("q", "k", "v")
def _magi(q, k, v, mask, layout, stages, keep_kv, scale, group, reduce_dtype, backward, return_lse):
    call = agreed_call(
        "magi_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, stages=stages, keep_kv=keep_kv,
    )  # fmt: skip
    plan = cast_plan(call.mask, call.layout, stages=stages)  # once all agree: what is wrong is wrong on all ranks

    def forward(q, k, v):
        fetched: list[Tensor] = []
        out, lse = magi_forward(q, fetch(rows(k, v), plan, call, fetched), v.shape[-1], call, plan)
        return out.to(q.dtype), lse, *(fetched if keep_kv else ())

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse, *kept):
        own = rows(k, v)
        again = ((step, together(own, came, plan, step)) for step, came in enumerate(kept))
        steps = again if kept else fetch(own, plan, call)
        return magi_backward(needs_grad, dout, dlse, q, k, v, out, lse, steps, call, plan)

    return differentiable(q, k, v, forward, differentiate, call=call, return_lse=return_lse)


def magi_forward(
    q: Tensor, steps: Iterator[tuple[int, Tensor]], dv: int, call: Call, plan: CastPlan
) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) and lse (b, h, t), both in the accumulation dtype."""
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, d = q.shape
    out = q.new_zeros(b, t, h, dv, dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    for step, held in steps:
        k, v = columns(held, d)
        part = attention_forward(q, k, v, plan.local_mask(step, call.rank), scale=call.scale, out_dtype=accumulate)
        out, lse = merge(out, lse, *part)
    return out, lse


def magi_backward(
    needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    steps: Iterator[tuple[int, Tensor]], call: Call, plan: CastPlan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    t, d = q.shape[1], q.shape[-1]
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    home = torch.zeros_like(rows(k, v), dtype=accumulate) if keys_need_grad else None
    going_back = None
    for step, held in steps:
        dq_part, *part = attention_backward(
            dout, q, *columns(held, d), out, lse, plan.local_mask(step, call.rank), scale=call.scale, delta=delta,
            method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        if dq is not None:
            dq += dq_part
        if home is None:
            continue
        grads = rows(*part)
        if going_back:  # it travelled while this step was computed
            going_back.wait()
        if plan.holds_own(step):
            home += grads[:t]
            grads = grads[t:]
        cast = plan.cast_of(step)
        if cast is not None:
            going_back = GroupReduce(grads.to(call.reduce_dtype), plan, cast, call.group, home)
    if going_back:
        going_back.wait()
    home = (None, None) if home is None else columns(home, d)
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, *home))


def fetch(
    own: Tensor, plan: CastPlan, call: Call, received: list[Tensor] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(step, its keys and values), the next step's cast being started before each. ``received`` is given what came."""
    casts = [plan.cast_of(step) for step in range(plan.steps)]
    start = lambda cast: None if cast is None else GroupCast(own, plan, cast, call.group)
    coming = start(casts[0])
    for step in range(plan.steps):
        came = coming.wait() if coming else own[:0]
        coming = start(casts[step + 1]) if step + 1 < plan.steps else None
        if received is not None:
            received.append(came)
        yield step, together(own, came, plan, step)


def together(own: Tensor, came: Tensor, plan: CastPlan, step: int) -> Tensor:
    """The buffer of a step: the own keys first, if it has them."""
    return torch.cat([own, came]) if plan.holds_own(step) else came


def rows(k: Tensor, v: Tensor) -> Tensor:
    """K and V as one row for each token: (t, b, g, d + dv)."""
    return torch.cat([k, v], -1).transpose(0, 1).contiguous()


def columns(x: Tensor, d: int) -> Sequence[Tensor]:
    """K (b, t, g, d) and V (b, t, g, dv) of such rows."""
    return x.transpose(0, 1).split([d, x.shape[-1] - d], -1)
