"""Ring attention with overlap: the next block travels while the current one is computed.

Read `canon.reference.ring` first. The algorithm and the order of sums are the same here. The differences:

    messages          K and V travel in one message, dk and dv in another; the reference sends each tensor alone
    overlap           a hop starts before the kernel that overlaps with it (`pipeline.run_pipeline`)
    buffers           each ring has two: kernels read one while the other one receives (`exchange.BlockRing`)
    active queries    from step 1 on, only queries that see a key are computed (`active_queries.py`): in zigzag, half
                      of the queries or of the keys. A fully masked step only passes its blocks on (first sums: zeros)
    in place          a kernel merges each part into the running float32 result; the first part is that result
    dq last           dk and dv leave before the kernel of dq, so the last hop overlaps too (`backward.begin_backward`);
                      "fused" has one kernel for all three

Order of step i; the forward pass has the first two lines:

    start the hop of K, V for step i + 1
    launch the kernel (backward: dk, dv)       in flight: K, V of step i + 1; sums of dk, dv of step i - 1
    receive these sums, add dk, dv of step i
    start the hop of the new sums
    launch the kernel of dq                    in flight: K, V of step i + 1; sums of dk, dv of step i

With NCCL, hops run on a stream of the process group. `agreed_call` posts 8 bytes per rank to compare the arguments; for a
known call on GPUs it does not wait (`canon.reference.group_state`; its cost is in paper/measured.md). Autograd keeps q, k, v,
out and lse of the rank's own tokens.

Functions down to the launch. `prepared.replayed` calls the next ones only once for each kind of arguments, then replays them:

    forward     `_forward`, `local.forward_part`, `prepared.replayed`, `device.kernels_for`, `forward` of launch.py
    backward    `_Backward`, `backward.begin_backward`, `prepared.replayed`, `device.kernels_for`, `dkdv`, `dq` of launch.py
                (in kernels/triton or kernels/gluon)

Cost, with N = b t g (d + dv) elements of K and V per rank. Forward: W - 1 messages, (W - 1) N elements of the inputs' dtype.
Backward: the same again, and W - 1 messages, (W - 1) N elements of reduce_dtype.

    scratch     forward: 2 N elements of the inputs' dtype (K, V); float32 out and lse twice (running, newest part)
                backward: 2 N elements of the inputs' dtype; 2 N of reduce_dtype (dk, dv); N float32 (own dk, dv), and N more
                if W > 2 (newest part); float32 dq twice (running, newest part); delta; 2 b h t float32 (row statistics, Gluon)
                both: copies of the active queries' inputs if they form several ranges

Sources: as `canon.reference.ring`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.active_queries import ActiveQueries, active_queries_of, visible_keys
from canon.fast.backward import QueryInputs, begin_backward, gradients, make_delta
from canon.fast.differentiable import call_operator, differentiable, makes_passes
from canon.fast.exchange import BlockRing, Hop, zero_outside
from canon.fast.local import forward_part
from canon.fast.pipeline import run_pipeline
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.operators import is_traced
from canon.reference.passes import LAYOUTS, Passes
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
    """Return attention of this rank's queries over the keys of all ranks. A collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: the visible cells of the whole sequence; None is causal.
        layout: the tokens that each rank holds; None is contiguous.
        scale: factor of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: dtype in which dk and dv travel; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options. The mask gives the number of
    tokens; without a mask the layout does; without either it is W t.

    Raises:
        ValueError: on every rank, if the arguments of one rank do not fit or differ from the others'.

    Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
    """
    return _ring(
        "ring_attention", q, k, v, mask, layout, return_lse,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward,
    )  # fmt: skip


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
    return _ring(
        "zigzag_attention", q, k, v, mask, None, return_lse,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward,
    )  # fmt: skip


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
    return _ring(
        "striped_attention", q, k, v, mask, None, return_lse,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward,
    )  # fmt: skip


@under_autocast("q", "k", "v")
def _ring(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | None,
    return_lse: bool,
    **options: Any,
):
    if is_traced():
        return call_operator(function, q, k, v, mask, layout, return_lse, **options)
    passes = _passes(function, q, k, v, mask, layout, **options)
    return differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=return_lse)


@makes_passes("ring_attention", "zigzag_attention", "striped_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None, **options
) -> Passes:
    call = agreed_call(function, q, k, v, mask, LAYOUTS.get(function, layout), **options)
    return Passes(partial(_forward, call), partial(ring_backward, call), call)


@cached_plan
def _active_part(mask: Mask) -> tuple[ActiveQueries, slice]:
    """Return the queries that see a key, and the keys from the first to the last that a query sees."""
    keys, visible = visible_keys(mask)
    return active_queries_of(visible), keys


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q and lse (b, h, t) in the accumulation dtype."""
    if call.ranks == 1:
        return forward_part(q, k, v, call.local_mask(0), call.scale, q.dtype)
    ring, accumulate = _KeyRing(k, v, call), accumulate_dtype(q.dtype)
    running: list[Tensor] = []  # out and lse of all queries over the keys so far

    def compute(step: int, block: list[Tensor]) -> None:
        mask = call.local_mask(ring.owner(step))
        if step == 0:
            running.extend(forward_part(q, *block, mask, call.scale, accumulate))
            return
        active, keys = _active_part(mask)
        if active.mask.bands:
            k_part, v_part = (x[:, keys] for x in block)
            part = forward_part(active.take(q), k_part, v_part, active.mask, call.scale, accumulate)
            active.merge(running, part)

    run_pipeline(call.ranks, ring.fetch, compute)
    out, lse = running
    return out.to(q.dtype), lse


def ring_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q; None if not needed. dk and dv are computed together."""
    if call.ranks == 1:
        return gradients(dout, q, k, v, out, lse, dlse, call.local_mask(0), call.scale, call.backward, needs_grad)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    backward = _Backward(call, inputs, k, v, needs_grad)
    received = run_pipeline(call.ranks, backward.ring.fetch, backward.compute, backward.send)
    for own, others in zip((backward.dk, backward.dv), received or (), strict=False):
        own += others
    return tuple(None if x is None else x.to(q.dtype) for x in (backward.dq, backward.dk, backward.dv))


class _Backward:
    """One backward pass: the running dq, dk and dv of the own tokens, and the rings of K, V and of their gradients.

    ``dk`` and ``dv`` hold this rank's part alone. The last hop brings the sum of the other ranks' parts.
    In step i > 1, buffer i % 2 of ``sums`` receives the earlier ranks' sum for the step's block; this rank then adds its part.
    """

    def __init__(self, call: Call, inputs: QueryInputs, k: Tensor, v: Tensor, needs_grad: tuple[bool, bool, bool]):
        self.call, self.inputs, self.accumulate = call, inputs, accumulate_dtype(k.dtype)
        self.dq = self._empty(inputs.q) if needs_grad[0] else None
        self.dk, self.dv = (self._empty(x) if any(needs_grad[1:]) else None for x in (k, v))
        self.ring = _KeyRing(k, v, call)
        self.sums = None
        if self.dk is not None:
            self.sums = BlockRing(call, k.shape[0], (k.shape[2:], v.shape[2:]), k, call.reduce_dtype)

    def compute(self, step: int, block: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Launch dk and dv. Return the pairs (sum, part) to add once the sums are received, and the function for dq."""
        mask = self.call.local_mask(self.ring.owner(step))
        if step == 0:
            inputs = active_queries_of(mask, all_queries=True).take_inputs(self.inputs)
            return [], self._begin(inputs, block, mask, self.dq, self.dk, self.dv)
        active, keys = _active_part(mask)
        sums, parts = self._sums(step, keys), [None, None]
        if not active.mask.bands:
            return [], lambda: None
        if sums:  # in step 1 nothing is received: the kernel writes the part where it is sent from
            parts = sums if step == 1 else [self._empty(x) for x in sums]
        inputs, dq_part = active.take_inputs(self.inputs), None
        if self.dq is not None:
            dq_part = self._empty(inputs.q)
        compute_dq = self._begin(inputs, [x[:, keys] for x in block], active.mask, dq_part, *parts)

        def add_dq() -> None:
            compute_dq()
            if dq_part is not None:
                active.add(self.dq, dq_part)

        return [] if step == 1 else list(zip(sums, parts, strict=False)), add_dq

    def send(self, step: int, additions: list[tuple[Tensor, Tensor]], _: list[Tensor] | None) -> Hop | None:
        """Add this rank's part to the received sums, and start to send them to the next rank."""
        for total, part in additions:
            total += part
        if step == 0 or self.sums is None:
            return None
        return self.sums.hop(step % 2, self.ring.owner(step), self.ring.owner(step + 1))

    def _sums(self, step: int, keys: slice) -> list[Tensor]:
        """Return the views of dk and dv of these keys in the step's buffer. In step 1, set those of other keys to 0."""
        if self.sums is None:
            return []
        block = self.sums.block(step % 2, self.ring.owner(step))
        return [zero_outside(x, keys) if step == 1 else x[:, keys] for x in block]

    def _begin(self, inputs: QueryInputs, keys: list[Tensor], mask: Mask, *grads: Tensor | None) -> Callable[[], None]:
        return begin_backward(inputs, *keys, mask, self.call.scale, self.call.backward, *grads)

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=self.accumulate, device=like.device)


class _KeyRing:
    """K and V of all ranks, one block in each step: first the own block, then that of the previous rank, and so on."""

    def __init__(self, k: Tensor, v: Tensor, call: Call):
        self.call = call
        self.blocks = BlockRing(call, k.shape[0], (k.shape[2:], v.shape[2:]), k, k.dtype)
        for target, source in zip(self.blocks.block(0, call.rank), (k, v), strict=True):
            target.copy_(source)

    def owner(self, step: int) -> int:
        return (self.call.rank - step) % self.call.ranks

    def fetch(self, step: int) -> Hop:
        """Start to receive the block of this step, and to send that of the step before."""
        if step == 0:
            return Hop([], self.blocks.block(0, self.call.rank))
        return self.blocks.hop((step - 1) % 2, self.owner(step - 1), self.owner(step))
