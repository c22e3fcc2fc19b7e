"""Strided attention with overlap: the next heads' keys and the last heads' gradients travel while a step is computed.

Read `canon.reference.strided` first. The algorithm, the steps and the order of sums are the same here.
`pipeline.run_pipeline` runs the steps:

    stream           step i
    all-gather       K, V of step i + 1                                       its own communicator
    compute          kernel on K, V of step i; backward dk and dv first, then dq, if in kernels of their own
    all to all       dk, dv of step i - 1, started before dq of i - 1         its own communicator
    communication    copy K, V of step i + 1; sum dk, dv of step i - 1        one stream

- Kernels read K and V in the buffers that received them, with one stride from token to token. `gathered_mask` is in the
  coordinates of these buffers. A rank loads only the keys from the first to the last that its queries see.
- Kernels write out and dq of a step's heads into the results. They write dk and dv, rounded to reduce_dtype, into the sending
  buffer. After the exchange one kernel sums them in rank order: the same inputs give the same bits.
- `transport.py` chooses how the messages of a group travel.

Cost, with T the most tokens of a rank, N = b T g (d + dv), W ranks and n steps. Forward: 2 n messages, one less if packed.
Each rank receives (W - 1) N elements of the inputs' dtype. Backward: the same again, and n messages and (W - 1) N elements of
reduce_dtype.

    scratch     w, the most key heads of a step, gives buffers of W N w / g elements: two to gather, in the dtype of the inputs;
                backward also two to send and two to receive, in reduce_dtype; delta; the scratch of the backward method.
                With a single step, one buffer each.

Sources: as `canon.reference.strided`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import visible_keys
from canon.fast.backward import QueryInputs, begin_backward, make_delta
from canon.fast.differentiable import differentiable
from canon.fast.exchange import AllGather, ReduceScatter, gathered_mask
from canon.fast.local import empty_result, forward_into, forward_part
from canon.fast.owner_computes import owner_backward, owner_forward
from canon.fast.pipeline import prefetched, run_pipeline
from canon.fast.ring import ring_backward
from canon.fast.tile_exchanges import OwnTokens, TileGather
from canon.reference.call import Call, agreed_call
from canon.reference.checks import under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan
from canon.reference.strides import Steps, strided_steps, suggest_strides

__all__ = ["strided_attention", "suggest_strides"]


@torch.compiler.disable  # torch.compile breaks its graph here and does not trace plans
@under_autocast("q", "k", "v")
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
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of this rank's queries over the keys of all ranks. A collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: the visible cells of the whole sequence; None is causal.
        layout: the tokens that each rank holds; None is contiguous.
        head_stride: number of key heads in a step; divides g.
        forward_first_stride, backward_first_stride: number in the first step, below head_stride, so that it starts sooner.
        backward_last_stride: number in the last step, below head_stride, so that its reduction ends sooner.
        pack_first: K and V of the first step travel as one message.
        backward_schedule: "scatter", as above, or "ring", as in `ring_attention`, without backward strides.
        scale: factor of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: dtype in which dk and dv travel and are summed; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        rank_invariant: return the bits of one rank, on any number of ranks (`owner_computes.py`). Then layout=None has
            pieces that begin at multiples of 128 tokens, and any other layout must have such pieces.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options. The mask gives the number of
    tokens; without a mask the layout does; without either it is W t. The strides change only the order of sums.

    Raises:
        ValueError: on every rank, if the arguments of one rank do not fit or differ from the others', or a stride is out of
            range or has no effect, or an option or the layout contradicts rank_invariant.

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
    call = agreed_call(
        "strided_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward,
        rank_invariant=rank_invariant, **options,
    )  # fmt: skip
    steps = strided_steps(k.shape[-2], **options)  # after the agreement, so that a bad stride raises on all ranks
    if rank_invariant:
        exchange = TileGather(call) if call.ranks > 1 else OwnTokens(call)
        options = pack_first, exchange
        passes = (
            partial(owner_forward, call, steps.forward, *options),
            partial(owner_backward, call, steps.backward, *options),
        )
        return differentiable(q, k, v, *passes, call=call, return_lse=return_lse)
    ring = steps.backward is None or call.ranks == 1
    differentiate = partial(ring_backward, call) if ring else partial(_backward, call, steps)
    return differentiable(q, k, v, partial(_forward, call, steps), differentiate, call=call, return_lse=return_lse)


def _forward(call: Call, steps: Steps, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q and lse (b, h, t) in the accumulation dtype."""
    if call.ranks == 1:
        return forward_part(q, k, v, call.local_mask(0), call.scale, q.dtype)
    out, lse = empty_result(q, v, q.dtype)
    visible, mask = _visible_keys(call.layout, call.mask, call.rank)

    def compute(step: int, keys: Sequence[Tensor]) -> None:
        heads = _query_heads(steps.forward[step], q, k)
        k_part, v_part = (x[:, visible] for x in keys)
        forward_into(q[:, :, heads], k_part, v_part, mask, call.scale, out[:, :, heads], lse[:, heads])

    run_pipeline(len(steps.forward), AllGather(k, v, call, steps.forward, steps.pack_first).fetch, compute)
    return out, lse


def _backward(
    call: Call, steps: Steps, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are neither computed nor sent."""
    fetch = prefetched(AllGather(k, v, call, steps.backward, steps.pack_first).fetch)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    needed = needs_grad[0], any(needs_grad[1:]), any(needs_grad[1:])
    new = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dq, dk, dv = (new(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True))
    visible, mask = _visible_keys(call.layout, call.mask, call.rank)
    reduction = None if dk is None else ReduceScatter(dk, dv, call, steps.backward)

    def compute(step: int, keys: Sequence[Tensor]) -> tuple[None, Callable[[], None]]:
        """Stage dk and dv, and return the function that computes dq."""
        heads = _query_heads(steps.backward[step], q, k)
        k_part, v_part = (x[:, visible] for x in keys)
        dq_part = None if dq is None else dq[:, :, heads]
        staged = reduction.stage(step, visible) if reduction else (None, None)
        options = mask, call.scale, call.backward
        return None, begin_backward(inputs.heads(heads), k_part, v_part, *options, dq_part, *staged)

    run_pipeline(len(steps.backward), fetch, compute, lambda step, *_: reduction.start(step) if reduction else None)
    return dq, dk, dv


@cached_plan
def _visible_keys(layout: Layout, mask: Mask, rank: int) -> tuple[slice, Mask]:
    """Return the keys of a gathered buffer from the first to the last that ``rank`` sees, and the mask over them."""
    return visible_keys(gathered_mask(layout, mask, rank))


def _query_heads(heads: range, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share these key heads."""
    share = q.shape[2] // k.shape[2]
    return slice(share * heads.start, share * heads.stop)
