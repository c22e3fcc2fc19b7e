"""Ring attention with overlap: the next block, K and V of one rank, travels while kernels read the
current one.

Algorithm, order of sums and cost are those of `canon.reference.ring`. The differences:

- K and V travel in one message, dk and dv in another, each through two buffers
  (`messages.BlockRing`).
- From step 1 on, a step computes only the queries that see a key, over the keys from the first to
  the last visible one. A fully masked step only forwards.
- A kernel merges each part into the running result. Step 0 writes it, and the last merge writes out
  in the dtype of the inputs.
- dk and dv leave before the kernel of dq, so the last hop overlaps too; "fused" has one kernel for
  all three.

Scratch, with N = b t g (d + dv):

    forward     2 N of the inputs' dtype (K, V); float32 out and lse twice (running, newest part)
    backward    2 N of the inputs' dtype; 2 N of reduce_dtype (dk, dv); N float32 (own dk, dv), and
                N more if W > 2 (newest part); float32 dq twice; delta; that of the backward method
    both        copies of the active queries' inputs, if they form several ranges

Sources: as `canon.reference.ring`.
"""

from collections.abc import Iterator
from itertools import chain, cycle, repeat

import torch
from torch import Tensor

from canon.faces import public_ring
from canon.fast.active_queries import active_queries_of, row_indices, visible_keys
from canon.fast.backward import QueryInputs, gradients, make_delta
from canon.fast.device import rows_for
from canon.fast.half import FAST, Part
from canon.fast.local import forward_part
from canon.fast.replay.recordings import replayed
from canon.fast.schedule import (
    Step,
    StepBackward,
    cached_parts,
    parts_of,
    receiving,
    run_backward,
    run_forward,
)
from canon.fast.tables.cells import Cells
from canon.fast.transport.messages import BlockRing, Blocks, Pending
from canon.masks.plan_cache import PLANS
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.checks import accumulate_dtype

__all__ = ["ring_attention", "striped_attention", "zigzag_attention"]


class Ring:
    """The blocks and steps of all calls of one kind."""

    def __init__(self, call: Call, step: "type[RingStep]"):
        self.call, (_, k, v, *_) = call, call.shapes  # k and v: what travels
        self.blocks = Blocks(call.layout, k[0], (k[2:], v[2:]))
        self.steps = [step(self, number) for number in range(call.ranks)]

    @property
    def nbytes(self) -> int:
        return 1000 + 500 * self.call.ranks + sum(step.active.nbytes for step in self.steps)


class RingStep(Step):
    """A step of one kind of call, over the ``visible`` keys of rank ``owner``; in step 0 all."""

    def __init__(self, ring: Ring, number: int):
        self.ring, self.number = ring, number
        self.owner = (ring.call.rank - number) % ring.call.ranks
        mask = ring.call.local_mask(self.owner)
        self.visible, cells = visible_keys(mask) if number else (slice(0, mask.keys), mask)
        super().__init__(
            ring.call, active_queries_of(cells, all_queries=number == 0), writes=number == 0
        )

    def keys(self, block: Tensor) -> list[Tensor]:
        return [x[:, self.visible] for x in self.ring.blocks.views(block, self.owner)]

    def gradients(self, grads: Tensor) -> list[Tensor]:
        return self.ring.blocks.zero_outside(grads, self.owner, self.visible)


def ring_of(call: Call, step: type[RingStep] = RingStep) -> Ring:
    """Return the ring of this kind of call."""
    return PLANS.find((Ring, call), lambda: Ring(call, step))


def ring_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if call.ranks == 1:
        mask = call.local_mask(0)
        return forward_part(
            q, k, v, mask, scale=call.scale, out_dtype=q.dtype, max_logits=max_logits
        )
    ring = ring_of(call)
    keys = receiving(call.ranks, KeyRing(ring, k, v).fetch)
    return run_forward(ring.steps, keys, q, v, max_logits)


def ring_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> Gradients:  # fmt: skip
    if call.ranks == 1:
        cells = Cells(call.local_mask(0))
        return gradients(
            dout, q, k, v, out, lse, dlse, cells, call.scale, call.backward, needs_grad
        )
    ring = ring_of(call)
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    keys = receiving(call.ranks, KeyRing(ring, k, v).fetch)
    state = RingBackward(ring, inputs, v, needs_grad)
    received = run_backward(state.parts, keys, inputs, state.dq, state.grads, state.send)
    return state.results(received, q.dtype)


class RingBackward:
    """The state of one backward pass: running dq, ``own`` dk and dv of this rank's keys from its
    own queries, and the ring of the ``sums``.

    In step i > 1, buffer i % 2 of ``sums`` receives the sum of ranks owner + 1, ..., rank - 1. Then
    this rank's part is added.
    """

    def __init__(self, ring: Ring, inputs: QueryInputs, v: Tensor, needs_grad: NeedsGrad):
        self.ring, call, accumulate = ring, ring.call, accumulate_dtype(v.dtype)
        self.dq, self.own, self.sums, self.grads = None, None, None, repeat(None)
        if needs_grad[0]:
            # without parts to add, the kernel of step 0 writes the result
            adds_dq = any(step.has_work for step in ring.steps[1:])
            dtype = accumulate if adds_dq else v.dtype
            self.dq = torch.empty(inputs.q.shape, dtype=dtype, device=v.device)
        if any(needs_grad[1:]):
            elements = ring.blocks.elements[call.rank]
            self.own = torch.empty(elements, dtype=accumulate, device=v.device)
            if call.ranks > 1:
                self.sums = BlockRing(call, ring.blocks, call.reduce_dtype, v.device)
            self.grads = self.written()
        key = type(self), ring, needs_grad[0], self.own is None
        self.parts = cached_parts(key, inputs, lambda step: self.part(step, inputs, v), ring.steps)

    def written(self) -> Iterator[Tensor]:
        return chain([self.own], cycle(reversed(self.sums.buffers)))

    def part(self, step: RingStep, inputs: QueryInputs, v: Tensor) -> StepBackward:
        return _StepBackward(step, inputs, v, self.dq, self.own)

    def send(self, number: int, written: Tensor | None, room: Tensor | None) -> Pending | None:
        if self.own is None:
            return None
        self.add(number, written, room)
        if number == 0:
            return None
        following = self.parts[number + 1 - len(self.parts)]
        return self.sums.hop(number % 2, self.parts[number].step.owner, following.step.owner)

    def add(self, number: int, written: Tensor, room: Tensor | None) -> None:
        """Add this rank's part of a step to the sums. In steps 0 and 1 kernels have done so."""
        part = self.parts[number]
        if number > 1 and part.step.has_work:
            replayed(_add_part, (written, room), part, kind=part)
        elif number == 1 and not part.step.has_work:
            written.zero_()

    def results(self, received: list[Tensor] | None, dtype: torch.dtype) -> Gradients:
        dq = None if self.dq is None else self.dq.to(dtype)
        if self.own is None:
            return dq, None, None
        own = self.own if self.own.dtype is dtype else torch.empty_like(self.own, dtype=dtype)
        if received is None:
            own.copy_(self.own)
        else:
            torch.add(self.own, received[0][: own.numel()], out=own)
        return dq, *self.ring.blocks.views(own, self.ring.call.rank)


class _StepBackward(StepBackward):
    """Kernels write dk and dv into the own block in step 0, and in step 1 into the buffer that is
    sent, which has no received sum yet. Later they write into scratch, for `_add_part`.
    """

    def __init__(
        self, step: RingStep, inputs: QueryInputs, v: Tensor, dq: Tensor | None, own: Tensor | None
    ):
        super().__init__(step, inputs, v, dq, adds_dq=step.number > 0)
        self.has_part = own is not None and step.number > 1
        if self.has_part:
            for name, ((b, _, *width), _, _) in zip(
                ("dk", "dv"), step.ring.blocks.places[step.owner], strict=True
            ):
                self.scratch.add(
                    name, (b, step.visible.stop - step.visible.start, *width), own.dtype
                )

    def gradients(self, grads: Tensor, room: Tensor | None) -> list[Tensor]:
        return self.parts(room) if self.has_part else self.step.gradients(grads)

    def parts(self, room: Tensor | None) -> list[Tensor]:
        return [self.scratch.view(room, name) for name in ("dk", "dv")]


def _add_part(sums: Tensor, room: Tensor, part: _StepBackward) -> None:
    step = part.step
    rows = row_indices(step.visible.start, step.visible.stop, sums.device)
    for total, mine in zip(step.ring.blocks.views(sums, step.owner), part.parts(room), strict=True):
        rows_for(total).add_to_rows(total, rows, mine)


class KeyRing:
    """K and V of all ranks, one block in each step, from the own block on."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.steps, self.blocks = ring.steps, BlockRing(ring.call, ring.blocks, k.dtype, k.device)
        own = ring.blocks.views(self.blocks.buffers[0], ring.call.rank)
        torch._foreach_copy_(own, (k, v))  # one kernel

    def fetch(self, step: int) -> Pending:
        if step == 0:
            return Pending([], [self.blocks.buffers[0]])
        return self.blocks.hop((step - 1) % 2, self.steps[step - 1].owner, self.steps[step].owner)


def ring_parts(call: Call, backward: bool) -> Iterator[Part]:
    if call.ranks == 1:
        yield Part(call.local_mask(0), call.shapes[1][2])
    else:
        yield from parts_of(Ring(call, RingStep).steps, call.shapes[1][2])


VARIANTS = (
    "whole_forward",
    "whole_backward",
    "forward_parts",
    "backward_parts",
    "masked_rows",
    "merges",
    "active_rows",
    "sinks",
)
RING, ZIGZAG, STRIPED = (
    Algorithm(FAST, declared, ring_forward, ring_backward, parts=ring_parts, variants=VARIANTS)
    for declared in (public_ring.RING, public_ring.ZIGZAG, public_ring.STRIPED)
)

ring_attention = public_ring.ring_attention(RING)
zigzag_attention = public_ring.zigzag_attention(ZIGZAG)
striped_attention = public_ring.striped_attention(STRIPED)
