"""Ring attention at speed: the next block travels while this one is computed.

The algorithm, its order of sums and its messages are those of `canon.reference.ring`. What is added:

    stream       step i                                   step i + 1
    transport    K, V of step i + 1 | dk, dv of i - 1     K, V of step i + 2 | dk, dv of i
    compute      kernel on K, V of step i, add, ...       kernel on K, V of step i + 1, add, ...

- A hop is posted before the kernel that it runs under; K and V are one message, dk and dv another.
- Where dk and dv have a kernel of their own, they leave before that of dq, and the last hop has it to run under as well.
- A block's gradient is added to where it arrived, and leaves from there; the first part of it is written there by the kernel.
- Each step computes only the queries and keys that its mask touches: zigzag's half steps cost half.
- Parts are merged into the running float32 result by one kernel, in place; the first part is the running result.
- A step whose mask is empty launches nothing, but its blocks are passed on.

Cost, for b t g (d + dv) = N numbers of K and V a rank: forward W - 1 messages and (W - 1) N items of the inputs' dtype;
backward as many again, and W - 1 messages and (W - 1) N items of reduce_dtype. Scratch: 2 N items (K, V) in the dtype of the
inputs; forward the float32 running result, and one part of it; backward 2 N items of reduce_dtype, 2 N float32
(own dk, dv and, for W > 2, the newest), float32 dq twice (so far, and the newest), and delta.

Sources: as `canon.reference.ring`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import ActiveQueries, active_queries_of, seen_keys
from canon.fast.backward import attention_backward, begin_backward, make_delta
from canon.fast.differentiable import differentiable
from canon.fast.exchange import Hop, Lane, zero_outside
from canon.fast.local import attention_forward
from canon.fast.pipeline import run_pipeline
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan

__all__ = ["ring_attention", "striped_attention", "zigzag_attention"]


def ring_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
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
        layout: which rank holds which tokens; None is contiguous.
        scale: of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: in which dk and dv travel; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options; the number of tokens is the
    mask's, else the layout's, else W t.

    Raises:
        ValueError: on every rank, if the arguments of one do not fit or differ from the others'.

    Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
    """
    return _ring("ring_attention", q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse)


def zigzag_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """`ring_attention` over `Layout.zigzag`: under a causal mask every rank has the same work at every step.

    Arguments, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Zilin Zhu, ring-flash-attention issue 2 (2024); mlc-ai/Pith-Train pull request 39.
    """
    return _ring("zigzag_attention", q, k, v, mask, Layout.zigzag, scale, group, reduce_dtype, backward, return_lse)


def striped_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """`ring_attention` over `Layout.striped`: under a causal mask every step is causal, with or without its diagonal.

    Arguments, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Brandon et al., Striped Attention (2023).
    """
    return _ring("striped_attention", q, k, v, mask, Layout.striped, scale, group, reduce_dtype, backward, return_lse)


@torch.compiler.disable  # one opaque step: a compiled model breaks its graph here, and traces no plan
@under_autocast("q", "k", "v")
def _ring(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    scale: float | None,
    group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype | None,
    backward: str,
    return_lse: bool,
):
    call = agreed_call(
        function, q, k, v, mask, layout, scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward
    )
    return differentiable(
        q, k, v, partial(_forward, call), partial(ring_backward, call), call=call, return_lse=return_lse
    )


@cached_plan
def _touched(mask: Mask) -> tuple[ActiveQueries, slice]:
    """The queries that see a key, under the mask of the keys from the first to the last that are seen, and these keys."""
    columns, seen = seen_keys(mask)
    return active_queries_of(seen), columns


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) in the dtype of q, lse (b, h, t) in the accumulation dtype."""
    if call.ranks == 1:
        return attention_forward(q, k, v, call.local_mask(0), scale=call.scale)
    keys, accumulate = _DkDvRing(k, v, call), accumulate_dtype(q.dtype)
    running: list[Tensor] = []  # out and lse of every query: first of the own keys, then the other parts merged in

    def compute(step: int, held: list[Tensor]) -> None:
        local = call.local_mask(keys.owner(step))
        if step == 0:
            running.extend(attention_forward(q, *held, local, scale=call.scale, out_dtype=accumulate))
            return
        seen, columns = _touched(local)
        if seen.mask.bands:
            k_part, v_part = (x[:, columns] for x in held)
            part = attention_forward(seen.take(q), k_part, v_part, seen.mask, scale=call.scale, out_dtype=accumulate)
            seen.merge(running, part)

    run_pipeline(call.ranks, keys.fetch, compute)
    out, lse = running
    return out.to(q.dtype), lse


def ring_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    if call.ranks == 1:
        return attention_backward(
            dout, q, k, v, out, lse, call.local_mask(0),
            scale=call.scale, dlse=dlse, method=call.backward, needs_grad=needs_grad,
        )  # fmt: skip
    keys_need_grad = any(needs_grad[1:])
    delta, accumulate = make_delta(dout, out, lse, dlse), accumulate_dtype(q.dtype)
    like = lambda x: torch.empty(x.shape, dtype=accumulate, device=x.device)
    dq = like(q) if needs_grad[0] else None  # so far
    dk, dv = (like(x) if keys_need_grad else None for x in (k, v))  # of the own keys; what others found is added last
    keys = _DkDvRing(k, v, call)
    sums = (
        None if dk is None else Lane(call, q.shape[0], (k.shape[2:], v.shape[2:]), k, call.reduce_dtype)
    )  # step i's block is in buffer i % 2

    def write(held, seen, columns, *grads) -> Callable[[], None]:
        k_part, v_part = (x[:, columns] for x in held)
        return begin_backward(
            seen.take(dout), seen.take(q), k_part, v_part, seen.take(lse, 2), seen.take(delta, 2), seen.mask,
            call.scale, call.backward, *grads,
        )  # fmt: skip

    def compute(step: int, held: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Return what is added to the block that arrives meanwhile, where and what, and the function that makes dq."""
        local = call.local_mask(keys.owner(step))
        if step == 0:
            return [], write(held, active_queries_of(local, everyone=True), slice(None), dq, dk, dv)
        seen, columns = _touched(local)
        first = step == 1  # the first part of a block is written where it leaves from
        targets, parts = [], [None, None]
        if keys_need_grad:
            block = sums.block(step % 2, keys.owner(step))
            targets = [zero_outside(x, columns) if first else x[:, columns] for x in block]
        if not seen.mask.bands:
            return [], lambda: None
        if keys_need_grad:
            parts = targets if first else [like(x) for x in targets]
        dq_part = None
        if dq is not None:
            dq_part = q.new_empty(q.shape[0], seen.mask.queries, *q.shape[2:], dtype=accumulate)
        make_dq_part = write(held, seen, columns, dq_part, *parts)

        def make_dq():
            make_dq_part()
            if dq is not None:
                seen.add(dq, dq_part)

        return [] if first else list(zip(targets, parts, strict=False)), make_dq

    def send_on(step: int, parts: list[tuple[Tensor, Tensor]], _: list[Tensor] | None) -> Hop | None:
        for total, part in parts:
            total += part
        return sums.hop(step % 2, keys.owner(step), keys.owner(step + 1)) if step and keys_need_grad else None

    received = run_pipeline(call.ranks, keys.fetch, compute, send_on)
    for mine, others in zip((dk, dv), received or (), strict=False):
        mine += others
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, dk, dv))


class _DkDvRing:
    """Every rank's K and V, one block a step: the own one first, then that of the rank before, and so on."""

    def __init__(self, k: Tensor, v: Tensor, call: Call):
        self.call = call
        self.lane = Lane(call, k.shape[0], (k.shape[2:], v.shape[2:]), k, k.dtype)
        for target, source in zip(self.lane.block(0, call.rank), (k, v), strict=True):
            target.copy_(source)

    def owner(self, step: int) -> int:
        return (self.call.rank - step) % self.call.ranks

    def fetch(self, step: int) -> Hop:
        """Start to bring the block of this step, by sending that of the step before on."""
        if step == 0:
            return Hop([], self.lane.block(0, self.call.rank))
        return self.lane.hop((step - 1) % 2, self.owner(step - 1), self.owner(step))
