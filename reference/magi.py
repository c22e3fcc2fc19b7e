"""Magi attention: a layout places the tokens, and each rank receives only the keys that its queries
see.

In a pack of documents a query sees only its own document, so most keys need not travel:

    layout = dispatch(mask, ranks)                  once per pack: the chunks of tokens of each rank
    x = layout.shard(tokens, rank)                  once per pack: data and labels
    out = magi_attention(q, k, v, mask, layout)     in every layer: queries stay, needed keys travel
    full = layout.unshard(out)                      once, if at all

The received keys are divided into up to ``casts`` group casts. Each step waits for its cast, starts
the next one, computes attention over one buffer of keys, and merges. out is rounded once:

    own_keys_first=False   compute              own keys and cast 0             no overlap
    casts=1                in flight   cast 0

    own_keys_first=True    compute     own keys   keys of cast 0   keys of cast 1
    casts=2                in flight   cast 0     cast 1
    backward               in flight   cast 0     cast 1           reduce of 0      reduce of 1

A buffer holds own keys first, then received keys by source rank. `CastPlan.local_mask` is its mask.

Backward, keys travel again, or were kept with ``keep_kv``. dq stays, and a group reduce sends dk
and dv of received keys to their owners, rounded to reduce_dtype once. The owner adds in float32:
its own part, then cast by cast, each in rank order. So equal calls give the same bits, other
``casts`` perhaps others. With ``rank_invariant=True`` any number of ranks gives the same bits
(`owner_computes.py`).

Cost of a rank that receives R and sends S tokens in all casts (`plan_report` gives both). K and V
of a token have N = b g (d + dv) elements of e bytes, E in reduce_dtype:

                       messages            bytes received   peak memory, at most
    each pass   K, V   one for each cast   R N e            own tokens, three buffers, rows sent in
                                                            two casts
    backward  dk, dv   one for each cast   S N E            own tokens, four buffers in float32,
                                                            rows of two reduces
    with keep_kv       none for K and V    0 in backward    all received keys

All terms of the peak memory, and the number of casts: notebooks/04_magi.md.

Limits: every rank takes part in every cast. A cast that no rank needs is left out.

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from canon.faces import public_magi
from canon.masks.cast_plan import CastPlan
from canon.masks.mask import Mask
from canon.ranks.profiling import named_steps
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.group_collectives import (
    GroupCast,
    GroupReduce,
    cast_plan,
    group_cast,
    group_reduce,
    plan_report,
)
from canon.reference.local import REFERENCE, merged, tiled_forward
from canon.reference.owner_computes import owner_backward, owner_forward
from canon.reference.planner import dispatch
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.checks import accumulate_dtype
from canon.route.rank_invariance import transposed

__all__ = ["cast_plan", "dispatch", "group_cast", "group_reduce", "magi_attention", "plan_report"]


def magi_plan(call: Call) -> CastPlan:
    """Return the tokens of each cast."""
    options = {name: call.options[name] for name in ("casts", "own_keys_first")}
    return cast_plan(call.mask, call.layout, **options)


def magi_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return out (b, t, h, dv) in the dtype of q, lse (b, h, t), and with ``keep_kv`` the keys
    received in each step.
    """
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, d = q.shape
    out = q.new_zeros(b, t, h, v.shape[-1], dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    kept: list[Tensor] = []
    for step, keys, received in named_steps(key_steps(call, join_kv(k, v))):
        mask = call.plan.local_mask(step, call.rank)
        k, v = split_kv(keys, d)
        part = tiled_forward(
            q, k, v, mask, scale=call.scale, out_dtype=accumulate, max_logits=max_logits
        )
        out, lse = merged(out, lse, *part)
        kept += [received] if call.options["keep_kv"] else []
    return out.to(q.dtype), lse, *kept


def magi_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *kept: Tensor,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv as `ring_backward`."""
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    plan, t, d = call.plan, q.shape[1], q.shape[-1]
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    own = join_kv(k, v)
    own_grads = torch.zeros_like(own, dtype=accumulate) if keys_need_grad else None
    reduction = None
    for step, keys, _ in named_steps(key_steps(call, own, kept)):
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


def invariant_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the results of `magi_forward` with the bits of one rank (`owner_computes.py`)."""
    keys = SequenceCast(call, call.plan, k, v)
    out, lse = owner_forward(call, [range(k.shape[2])], lambda *_: keys, q, k, v, max_logits)
    return out, lse, *([keys.received] if call.options["keep_kv"] else [])


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
    """Return the gradients of `magi_backward` with the bits of one rank."""
    query_plan = cast_plan(transposed(call.mask), call.layout, own_keys_first=False)
    fetch_keys = lambda x, y, heads: SequenceCast(call, call.plan, x, y, *kept)
    fetch_queries = lambda x, y, heads: SequenceCast(call, query_plan, x, y)
    steps = [range(k.shape[2])]  # one step for all heads
    return owner_backward(
        call, steps, fetch_keys, fetch_queries, needs_grad, dout, dlse, q, k, v, out, lse
    )


def magi_parts(call: Call, backward: bool) -> Iterator[Mask]:
    """Yield the local mask of each step."""
    plan = magi_plan(call)
    plan.casts_of(plan, call.rank)
    for step in range(plan.steps):
        yield plan.local_mask(step, call.rank)


def key_steps(
    call: Call, own: Tensor, kept: Sequence[Tensor] = ()
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (step, its buffer of keys, the received keys). Start the next step's cast before each
    yield. ``kept``: received keys of an earlier pass.
    """
    plan = call.plan
    casts = [None if kept else plan.cast_of(step) for step in range(plan.steps)]
    start = lambda cast: None if cast is None else GroupCast(own, plan, cast, call.group)
    in_flight = start(casts[0])
    for step in range(plan.steps):
        received = in_flight.wait() if in_flight else kept[step] if kept else own[:0]
        in_flight = start(casts[step + 1]) if step + 1 < plan.steps else None
        yield step, torch.cat([own, received]) if plan.holds_own(step) else received, received


def join_kv(k: Tensor, v: Tensor) -> Tensor:
    """Return K and V as one row for each token, (t, b, g, d + dv): one message moves both."""
    return torch.cat([k, v], -1).transpose(0, 1).contiguous()


def split_kv(packed: Tensor, d: int) -> Sequence[Tensor]:
    """Return K (b, t, g, d) and V (b, t, g, dv) of joined rows."""
    return packed.transpose(0, 1).split([d, packed.shape[-1] - d], -1)


class SequenceCast:
    """A group cast in flight, of x and y (b, t, heads, width). ``received``: rows that an earlier
    cast has brought.
    """

    def __init__(
        self, call: Call, plan: CastPlan, x: Tensor, y: Tensor, received: Tensor | None = None
    ):
        self.own, self.width, self.tokens = join_kv(x, y), x.shape[-1], plan.layout.tokens
        pieces = [
            torch.arange(tokens.start, tokens.stop, device="cpu")
            for tokens in plan.keys(0, call.rank)
        ]
        self.positions = torch.cat([torch.arange(0, device="cpu"), *pieces]).to(x.device)
        self.received = self.own[:0] if received is None else received
        self.in_flight = (
            GroupCast(self.own, plan, 0, call.group) if plan.casts and received is None else None
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return own and received tokens at their positions in the sequence, 0 for all others."""
        if self.in_flight:
            self.received = self.in_flight.wait()
        full = self.own.new_zeros(self.tokens, *self.own.shape[1:])
        full[self.positions] = torch.cat([self.own, self.received])
        x, y = split_kv(full, self.width)
        return x, y


def kept_rows(call: Call) -> list[int]:
    """Return the numbers of keys that the forward pass keeps with ``keep_kv``, by step."""
    if not call.options["keep_kv"]:
        return []
    if call.options["rank_invariant"]:
        return [sum(call.plan.receive_sizes(0, call.rank)) if call.plan.casts else 0]
    casts = map(call.plan.cast_of, range(call.plan.steps))
    return [0 if cast is None else sum(call.plan.receive_sizes(cast, call.rank)) for cast in casts]


MAGI = Algorithm(
    REFERENCE,
    public_magi.MAGI,
    magi_forward,
    magi_backward,
    invariant=(invariant_forward, invariant_backward),
    plan=magi_plan,
    parts=magi_parts,
    kept_rows=kept_rows,
)
magi_attention = public_magi.magi_attention(MAGI)
