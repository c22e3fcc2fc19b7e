"""Strided attention at speed: the next heads' keys travel while these are computed, and so do the last heads' gradients.

The algorithm, its steps and its order of sums are those of `canon.reference.strided`, run by `schedule.pipeline`:

    stream       step i
    gathers      K, V of step i + 1                                       its own communicator
    compute      kernel on K, V of step i; backward first dk and dv, then dq, if by kernels of their own
    reductions   dk, dv of step i - 1, all to all                         its own communicator; begins under dq of i - 1
    beside       copy K, V of step i + 1; sum dk, dv of step i - 1        one stream

- Keys are used where they arrive: kernels read one stride from token to token, and `gathered_mask` speaks the coordinates
  of the buffer. Only the keys from the first to the last that a rank's queries see are looked at.
- Kernels write out and dq of a step's heads where they belong, and dk and dv, rounded to reduce_dtype, where they are sent
  from. These are exchanged all to all, and summed in rank order by one kernel: the same inputs give the same bits.
- The way that messages take is chosen once per group, and named: `canon.fast.transport`.

Cost, with T the most tokens of a rank, N = b T g (d + dv), W ranks and n steps: forward 2 n messages (one less if packed)
with which each rank receives (W - 1) N items of the inputs' dtype; backward as many again, and n messages and (W - 1) N
items of reduce_dtype. Scratch, for w the most key heads of a step: two gather buffers of W N w / g items in the dtype
of the inputs; backward also two buffers to send and two to receive, of W N w / g items of reduce_dtype, delta, and what
the method takes for a step. One buffer each in place of two where there is one step.

Sources: as `canon.reference.strided`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import seen_keys
from canon.fast.backward import begin_backward, make_delta
from canon.fast.differentiable import differentiable
from canon.fast.exchange import Gathers, Reductions, gathered_mask
from canon.fast.local import attention_forward, forward_into
from canon.fast.pipeline import run_pipeline, started
from canon.fast.ring import ring_backward
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan
from canon.reference.strides import Steps, strided_steps, suggest_strides

__all__ = ["strided_attention", "suggest_strides"]


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
        head_stride: how many key heads are gathered at a time; divides g.
        forward_first_stride, backward_first_stride: how many of them are gathered first, to begin sooner; below head_stride.
        backward_last_stride: how many of them are reduced last, to end sooner; below head_stride.
        pack_first: K and V of the first step travel as one message.
        backward_schedule: "scatter", as here, or "ring", as in `ring_attention`, which knows no backward strides.
        scale: of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: in which dk and dv travel and are added up; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options; the number of tokens is the
    mask's, else the layout's, else W t. Results do not depend on the strides, but for the order of sums.

    Raises:
        ValueError: on every rank, if the arguments of one do not fit or differ from the others', or a stride is out of
            range or of no use.

    Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2; aqlaboratory/ring-flash-attention pull request 12.
    """
    options = {
        "head_stride": head_stride,
        "forward_first_stride": forward_first_stride,
        "backward_first_stride": backward_first_stride,
        "backward_last_stride": backward_last_stride,
        "pack_first": pack_first,
        "backward_schedule": backward_schedule,
    }
    return _strided(q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse, options)


@torch.compiler.disable  # one opaque step: a compiled model breaks its graph here, and traces no plan
@under_autocast("q", "k", "v")
def _strided(q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse, options):
    call = agreed_call(
        "strided_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, **options,
    )  # fmt: skip
    steps = strided_steps(k.shape[-2], **options)  # after the ranks agree: what is wrong is wrong on all of them
    ring = steps.backward is None or call.ranks == 1
    backward = partial(ring_backward, call) if ring else partial(_backward, call, steps)
    return differentiable(q, k, v, partial(_forward, call, steps), backward, call=call, return_lse=return_lse)


def _forward(call: Call, steps: Steps, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) in the dtype of q, lse (b, h, t) in the accumulation dtype."""
    if call.ranks == 1:
        return attention_forward(q, k, v, call.local_mask(0), scale=call.scale)
    b, t, h, _ = q.shape
    out = torch.empty(b, t, h, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, t, dtype=accumulate_dtype(q.dtype), device=q.device)
    columns, mask = _seen(call.layout, call.mask, call.rank)

    def compute(step: int, keys: list[Tensor]) -> None:
        own = _query_heads(steps.forward[step], q, k)
        k_part, v_part = (x[:, columns] for x in keys)
        forward_into(q[:, :, own], k_part, v_part, mask, call.scale, out[:, :, own], lse[:, own])

    run_pipeline(len(steps.forward), Gathers(k, v, call, steps.forward, steps.pack_first).fetch, compute)
    return out, lse


def _backward(
    call: Call, steps: Steps, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    fetch = started(Gathers(k, v, call, steps.backward, steps.pack_first).fetch)
    delta = make_delta(dout, out, lse, dlse)
    needed = needs_grad[0], any(needs_grad[1:]), any(needs_grad[1:])
    new = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dq, dk, dv = (new(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True))
    columns, mask = _seen(call.layout, call.mask, call.rank)
    reductions = None if dk is None else Reductions(dk, dv, call, steps.backward)

    def compute(step: int, keys: list[Tensor]) -> tuple[None, Callable[[], None]]:
        """Stage the gradients of the keys, and return the function that makes dq."""
        own = _query_heads(steps.backward[step], q, k)
        k_part, v_part = (x[:, columns] for x in keys)
        return None, begin_backward(
            dout[:, :, own], q[:, :, own], k_part, v_part, lse[:, own], delta[:, own], mask, call.scale, call.backward,
            None if dq is None else dq[:, :, own], *(reductions.stage(step, columns) if reductions else (None, None)),
        )  # fmt: skip

    run_pipeline(len(steps.backward), fetch, compute, lambda step, *_: reductions.start(step) if reductions else None)
    return dq, dk, dv


@cached_plan
def _seen(layout: Layout, mask: Mask, rank: int) -> tuple[slice, Mask]:
    """The keys of a gathered buffer from the first to the last that the queries of ``rank`` see, and the mask over them."""
    return seen_keys(gathered_mask(layout, mask, rank))


def _query_heads(heads: range, q: Tensor, k: Tensor) -> slice:
    """The query heads that share these key heads."""
    share = q.shape[2] // k.shape[2]
    return slice(share * heads.start, share * heads.stop)
