"""Magi attention: a layout places the tokens, and each rank receives only the keys that its queries see.

A ring or a gather sends every key to every rank. In a pack (several documents in one sequence) most of them are not needed,
because a query sees only its own document. Below, keys are K and V, W is the number of ranks, and float32 means the
accumulation dtype (float64 for float64 inputs).

    layout = dispatch(mask, ranks)                  plan once per pack: the chunks of tokens of each rank
    x = layout.shard(tokens, rank)                  shard once per pack, before the first layer: data and labels
    out = magi_attention(q, k, v, mask, layout)     attend in every layer: queries stay, needed keys travel
    full = layout.unshard(out)                      gather the tokens once, if at all

    dispatch        cuts the sequence into chunks and gives each rank some of them, so that the queries of all ranks have
                    nearly equally many visible cells (query-key pairs), and few keys travel (`planner.py`)
    group cast      one all-to-all with its own size for each pair of ranks: a rank receives the keys that its queries
                    see and that other ranks hold (`group_collectives.py`)
    group reduce    the transpose: dk and dv of received keys go back to their owners, who add them

All ranks derive the same `CastPlan` (`plan.py`) from mask, layout and ``stages``. So each rank can send without a request.

Forward: a step is attention over one buffer of keys. The received keys are divided into up to ``stages`` casts, by
default one (with ``rank_invariant=True``, ``stages=0`` is the default). Step 0 uses own keys, and step i the keys of
cast i - 1. ``stages=0`` means one cast and one step:

    stages=0    compute                             own keys and cast 0          no overlap
                in flight    cast 0

    stages=2    compute      own keys               keys of cast 0               keys of cast 1
                in flight    cast 0                 cast 1

A buffer holds own keys first (if the step has them), then received keys by source rank. `CastPlan.local_mask` is its mask.
`merge` (formula in `local.py`) joins the steps in float32, starting from out = 0 and lse = -inf. out is rounded once.

Backward: the same steps, from the saved q, k, v, out and lse. The keys travel again, or were kept with ``keep_kv``.
A step gives this rank's part of dk and dv for the keys in its buffer, and a part of dq. This rank sums the parts of
dq; dk and dv of received keys travel back:

    stages=2    compute      own keys               keys of cast 0               keys of cast 1      -
                in flight    cast 0                 cast 1                       reduce of cast 0    reduce of cast 1

A rank receives a key in exactly one cast, so it rounds its dk and dv of this key to reduce_dtype once. The owner adds
in float32: first its own part, then cast by cast, and within a cast in the order of the sending ranks. The plan
fixes this order, so equal calls give the same bits. Another ``stages`` may give other bits. With
``rank_invariant=True``, dk and dv do not travel: q, dout, lse and delta travel to the owners of the keys, and any
number of ranks gives the same bits (costs: `owner_computes.py`).

Cost: a rank receives R and sends S tokens in all casts; a token sent to two ranks counts twice. K and V of a token have
N = b g (d + dv) elements of e bytes: batch b, g key heads, widths d and dv. An element in reduce_dtype has E bytes:

                         messages                       bytes received
    forward   K, V       one all-to-all for each cast   R N e
    backward  K, V       the same; with keep_kv none    R N e; with keep_kv 0
              dk, dv     one all-to-all for each cast   S N E: gradients of the tokens sent

Not counted: to compare the calls, in each pass every rank gets a digest of 8 bytes from each other rank
(`agreement.py`). `plan_report` gives R, S and `volume`. In an all-gather or a ring over n tokens, all ranks
together receive (W - 1) n tokens; here they receive the fraction `volume` of that. FLOPs are those of `local.py` and
`backward.py` for the visible cells of the rank's queries. Peak memory beyond inputs, outputs, tiles and row
statistics, at most:

    K, V       own tokens; three buffers (previous, current and next step); the rows sent in two casts
    keep_kv    until the backward pass: all received keys
    out        three float32 tensors of its size in a step, five inside `merge`
    dq         three float32 tensors of its size
    dk, dv     float32, own tokens and four buffers: (1) the joined rows of the previous step, (2) dk and dv of this step,
               (3) their concatenation, (4) its copy with the tokens first. In reduce_dtype, the rows sent and received
               in this reduce and the previous one, and the copies that one addition makes (`group_collectives.py`)

``stages=1`` hides a cast that takes at most as long as step 0. More stages hide more of a longer cast, and shorten the
last reduce, which no step hides. Each further stage adds an all-to-all and a merge forward, and two all-to-alls
backward (one with keep_kv). ``stages=0`` overlaps nothing, but has one step less than ``stages=1``.

Limits: every rank takes part in every cast. A cast that no rank needs is left out of the plan. Whether messages
overlap with computation depends on the backend; gloo needs free CPU cores for it.

This file exceeds 200 lines, so that the example, the costs and the code stay on one page.

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025).
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from canon.masks.cast_plan import CastPlan
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.group_collectives import GroupCast, GroupReduce, cast_plan, group_cast, group_reduce, plan_report
from canon.reference.local import merge, tiled_forward
from canon.reference.planner import dispatch
from canon.reference.sequence_exchanges import cast_passes
from canon.reference.sinks import under_sink
from canon.runtime.autograd import differentiable
from canon.runtime.call import Call, agreed_call
from canon.runtime.checks import accumulate_dtype, check_sink, kind_of_sink, under_autocast
from canon.runtime.group import Group
from canon.runtime.operators import call_operator, is_traced
from canon.runtime.passes import Passes, makes_passes

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


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
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of this rank's queries over the keys of all ranks. A collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or without b.
        mask: over the whole sequence; None is causal.
        layout: the tokens of each rank, from `dispatch` or any other; None is contiguous.
        stages: the largest number of casts. Step i uses cast i - 1, which is in flight during step i - 1. 0 is
            special: one cast, awaited before the only step. None is 1, or 0 with rank_invariant.
        keep_kv: keep the received keys for the backward pass instead of receiving them again.
        scale: factor of the scores; None is 1 / sqrt(d).
        sink: a logit (h,) of each query head, as in `attention`, equal on all ranks. A rank's gradient of it is the sum
            over its own tokens: add the gradients of all ranks, as for every replicated parameter.
        group: a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this process
            is the only rank.
        reduce_dtype: dtype in which dk and dv are sent; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for every step: see `backward.py`.
        rank_invariant: return, on any number of ranks, the bits that one rank would return (`owner_computes.py`). Then
            the pieces of the layout must begin at multiples of 128 tokens, in the sequence and in the shard: pass
            ``dispatch(mask, ranks, rank_invariant=True)``.
        return_lse: also return lse (b, h, t), the natural logarithm of the softmax's denominator without the sink, in
            float32 (float64 for float64). It is differentiable.

    All ranks must pass equal masks, layouts, dtypes, batches, heads, widths, scales, options and requires_grad of q,
    k, v. t may differ, according to the layout. The sequence is as long as the mask; without a mask, as the layout;
    without both, W t tokens.

    Raises:
        ValueError or TypeError: on every rank, if the arguments of one rank do not fit together or differ from those
            of the others, or if an option or the layout contradicts rank_invariant.

    Source: Tao and Huang, MagiAttention (2025).
    """
    stages = (0 if rank_invariant is True else 1) if stages is None else stages
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    options |= dict(stages=stages, keep_kv=keep_kv, rank_invariant=rank_invariant)
    return _magi(q, k, v, mask, layout, sink, return_lse, **options)


@under_autocast("q", "k", "v")
def _magi(q, k, v, mask, layout, sink, return_lse, **options):
    if is_traced():
        check_sink(q, sink)
        out, lse = call_operator("reference", "magi_attention", q, k, v, mask, layout, **options)
    else:
        passes = _passes("magi_attention", q, k, v, mask, layout, sink=kind_of_sink(sink), **options)
        # `_passes` has compared its shape and dtype between ranks: a wrong sink raises on all of them.
        check_sink(q, sink)
        out, lse = differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=True)
    return under_sink(out, lse, sink, return_lse)


@makes_passes("reference", "magi_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None,
    *, stages: int, keep_kv: bool, rank_invariant: bool, sink=None, **options,
) -> Passes:  # fmt: skip
    options |= dict(rank_invariant=rank_invariant, stages=stages, keep_kv=keep_kv, sink=sink)
    call = agreed_call(function, q, k, v, mask, layout, **options)
    plan = cast_plan(call.mask, call.layout, stages=stages)  # raises on all ranks, as all agree on stages
    if rank_invariant:
        received = lambda: [sum(plan.receive_sizes(0, call.rank)) if plan.casts else 0]
        return Passes(*cast_passes(call, plan, keep_kv), call, received if keep_kv else None)

    def forward(q, k, v):
        kept: list[Tensor] = []
        out, lse = magi_forward(q, fetch(join_kv(k, v), plan, call, kept if keep_kv else None), v.shape[-1], call, plan)
        return out.to(q.dtype), lse, *kept

    def differentiate(needs_grad, dout, dlse, q, k, v, out, lse, *kept):
        own = join_kv(k, v)
        steps_of_kept = ((step, key_buffer(own, received, plan, step)) for step, received in enumerate(kept))
        steps = steps_of_kept if kept else fetch(own, plan, call)
        return magi_backward(needs_grad, dout, dlse, q, k, v, out, lse, steps, call, plan)

    def kept_rows():
        casts = map(plan.cast_of, range(plan.steps))
        return [0 if cast is None else sum(plan.receive_sizes(cast, call.rank)) for cast in casts]

    return Passes(forward, differentiate, call, kept_rows if keep_kv else None)


def magi_forward(
    q: Tensor, steps: Iterable[tuple[int, Tensor]], dv: int, call: Call, plan: CastPlan
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) and lse (b, h, t), both in float32. ``steps`` come from `fetch`."""
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, d = q.shape
    out = q.new_zeros(b, t, h, dv, dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    for step, keys in steps:
        mask = plan.local_mask(step, call.rank)
        part = tiled_forward(q, *split_kv(keys, d), mask, scale=call.scale, out_dtype=accumulate)
        out, lse = merge(out, lse, *part)
    return out, lse


def magi_backward(
    needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    steps: Iterable[tuple[int, Tensor]], call: Call, plan: CastPlan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens in the dtype of q.

    dq is None if q needs no gradient. dk and dv are None if neither k nor v needs one.
    """
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    t, d = q.shape[1], q.shape[-1]
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    own_grads = torch.zeros_like(join_kv(k, v), dtype=accumulate) if keys_need_grad else None
    reduction = None
    for step, keys in steps:
        dq_part, *parts = tiled_backward(
            dout, q, *split_kv(keys, d), lse, delta, plan.local_mask(step, call.rank),
            scale=call.scale, method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        if dq is not None:
            dq += dq_part
        if own_grads is None:
            continue
        grads = join_kv(*parts)
        if reduction:  # in flight during this step's computation
            reduction.wait()
        if plan.holds_own(step):
            own_grads += grads[:t]
            grads = grads[t:]
        cast = plan.cast_of(step)
        if cast is not None:
            reduction = GroupReduce(grads.to(call.reduce_dtype), plan, cast, call.group, own_grads)
    if reduction:
        reduction.wait()
    dk, dv = (None, None) if own_grads is None else split_kv(own_grads, d)
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, dk, dv))


def fetch(own: Tensor, plan: CastPlan, call: Call, kept: list[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (step, its buffer of keys). Start the next step's cast before each yield. Append received keys to ``kept``."""
    casts = [plan.cast_of(step) for step in range(plan.steps)]
    start = lambda cast: None if cast is None else GroupCast(own, plan, cast, call.group)
    in_flight = start(casts[0])
    for step in range(plan.steps):
        received = in_flight.wait() if in_flight else own.new_empty(0, *own.shape[1:])
        in_flight = start(casts[step + 1]) if step + 1 < plan.steps else None
        if kept is not None:
            kept.append(received)
        yield step, key_buffer(own, received, plan, step)


def key_buffer(own: Tensor, received: Tensor, plan: CastPlan, step: int) -> Tensor:
    """Return the keys of a step: this rank's own keys, if the step uses them, then the received keys."""
    return torch.cat([own, received]) if plan.holds_own(step) else received


def join_kv(k: Tensor, v: Tensor) -> Tensor:
    """Return K and V as one row for each token, (t, b, g, d + dv), so that one message moves both."""
    return torch.cat([k, v], -1).transpose(0, 1).contiguous()


def split_kv(packed: Tensor, d: int) -> Sequence[Tensor]:
    """Return K (b, t, g, d) and V (b, t, g, dv) of joined rows."""
    return packed.transpose(0, 1).split([d, packed.shape[-1] - d], -1)
