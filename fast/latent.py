"""Latent attention with overlap: cuBLAS projects the latents of a step while the next ones travel.

Read `canon.reference.latent` first, and `ring.py` for the steps. latent and k_rope travel in one
message, their gradients in another. From step 1 on a step projects the tokens from the first to the
last visible one. dK and dV are float32, and rounded to the inputs' dtype as operands of both
products, which run before the kernel of dq and stay in float32 (float64 for float64).

A step of t tokens needs this memory beyond that of the ring:

    both passes   K and V                b t h (2 d - rope + dv)     of the inputs' dtype
    backward      dK and dV              b t h (d + dv)              of float32
                  operand                b t h (d - rope + dv)       of the inputs' dtype
                  up_weight's gradient   h (d - rope + dv) rank      of float32, for all steps

Source: as `canon.reference.latent`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from canon.faces import public_latent
from canon.faces.latent_arguments import hidden_keys, sizes_of, visible_only
from canon.fast.backward import QueryInputs, make_delta
from canon.fast.half import FAST, Part
from canon.fast.ring import VARIANTS, KeyRing, Ring, RingBackward, RingStep, ring_of
from canon.fast.schedule import StepBackward, parts_of, receiving, run_backward, run_forward
from canon.route.algorithm import Algorithm, Gradients
from canon.route.call import Call
from canon.route.checks import accumulate_dtype

__all__ = ["latent_attention"]


class _Step(RingStep):
    """A step whose keys are projected outside of its recorded launches."""

    def keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return [k, v]

    def gradients(self, grads: Tensor) -> list[Tensor]:
        return list(
            grads.split([self.call.shapes[0][-1], grads.shape[-1] - self.call.shapes[0][-1]], -1)
        )


def latent_forward(
    call: Call,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    up_weight: Tensor,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ring, projection = ring_of(call, _Step), _Projection(call, up_weight)
    return run_forward(
        ring.steps, projection.keys(ring, latent, k_rope), q, projection.no_values(q), max_logits
    )


def latent_backward(
    call: Call,
    needs_grad: tuple[bool, ...],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    up_weight: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Gradients:
    """With dup_weight, the others are sent, too."""
    ring = ring_of(call, _Step)
    projection = _Projection(call, up_weight, needs_grad[3])
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    keys = projection.keys(ring, latent, k_rope)
    state = _Backward(ring, inputs, projection, needs_grad)
    received = run_backward(state.parts, keys, inputs, state.dq, state.grads, state.send)
    dweight = projection.dup_weight
    return *state.results(received, q.dtype), None if dweight is None else dweight.to(q.dtype)


class _Projection:
    def __init__(self, call: Call, up_weight: Tensor, needs_grad: bool = False):
        q, _, k_rope, weight = call.shapes
        self.sizes, self.up_weight, self.dup_weight = sizes_of(q, k_rope, weight), up_weight, None
        if needs_grad:
            self.dup_weight = torch.zeros_like(up_weight, dtype=accumulate_dtype(up_weight.dtype))

    def no_values(self, q: Tensor) -> Tensor:
        return q.new_empty(q.shape[0], 0, q.shape[2], self.sizes.value)

    def keys(self, ring: Ring, latent: Tensor, k_rope: Tensor) -> Iterator[tuple[int, Any]]:
        """Start a pass's messages. Return an iterator over (step, K and V), None without work."""
        if ring.call.ranks == 1:
            return iter([(0, self._read(ring.steps[0], latent, k_rope))])
        received = receiving(ring.call.ranks, KeyRing(ring, latent, k_rope).fetch)
        views = lambda number, block: ring.blocks.views(block, ring.steps[number].owner)
        return (
            (number, self._read(ring.steps[number], *views(number, *block)))
            for number, block in received
        )

    def _read(
        self, step: _Step, latent: Tensor, k_rope: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if not step.has_work:
            return None, None
        latent, k_rope = (
            visible_only(x[:, step.visible], step.active.mask) for x in (latent, k_rope)
        )
        self.latent = latent.flatten(0, 2)  # for `gradients` of this step
        b, tokens, _, _ = latent.shape
        heads, nope, rope, value, _ = self.sizes
        by_head = (self.latent @ self.up_weight.mT).view(b, tokens, heads, nope + value)
        k = by_head.new_empty(b, tokens, heads, nope + rope)
        k[..., :nope] = by_head[..., :nope]
        k[..., nope:] = k_rope
        return k, by_head[..., nope:]

    def gradients(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of latent and k_rope of the last step; add to ``dup_weight``."""
        b, tokens, heads, _ = dk.shape
        _, nope, _, value, _ = self.sizes
        by_head = self.up_weight.new_empty(b, tokens, heads, nope + value)
        by_head[..., :nope] = dk[..., :nope]
        by_head[..., nope:] = dv
        rows = by_head.view(b * tokens, heads * (nope + value))
        if self.dup_weight is not None:
            self.dup_weight += _product(rows.mT, self.latent)
        return _product(rows, self.up_weight).view(b, tokens, 1, self.sizes.rank), dk[
            ..., nope:
        ].sum(2, keepdim=True)


def _product(x: Tensor, y: Tensor) -> Tensor:
    wide = accumulate_dtype(x.dtype)
    if x.dtype is wide:
        return x @ y
    return torch.mm(x, y, out_dtype=wide) if x.device.type == "cuda" else x.to(wide) @ y.to(wide)


class _Backward(RingBackward):
    def __init__(
        self, ring: Ring, inputs: QueryInputs, projection: _Projection, needs_grad: tuple[bool, ...]
    ):
        self.projection, self.inputs = projection, inputs
        super().__init__(ring, inputs, projection.no_values(inputs.q), needs_grad)

    def part(self, step: _Step, inputs: QueryInputs, v: Tensor) -> StepBackward:
        return StepBackward(step, inputs, v, self.dq, adds_dq=step.number > 0)

    def written(self) -> Iterator[Tensor]:
        (b, _, h, d), dtype = self.inputs.q.shape, accumulate_dtype(self.inputs.q.dtype)
        for step in self.ring.steps:
            tokens = step.visible.stop - step.visible.start if step.has_work else 0
            yield self.inputs.q.new_empty(
                b, tokens, h, d + self.projection.sizes.value, dtype=dtype
            )

    def add(self, number: int, written: Tensor, room: Tensor | None) -> None:
        step, blocks = self.parts[number].step, self.ring.blocks
        sums = self.sums.buffers[number % 2] if number else self.own
        if not step.has_work:
            if number == 1:
                sums.zero_()
            return
        mine = self.projection.gradients(*step.gradients(written))
        if number > 1:
            for total, part in zip(blocks.views(sums, step.owner), mine, strict=True):
                total[:, step.visible] += part
        else:
            for target, part in zip(
                blocks.zero_outside(sums, step.owner, step.visible), mine, strict=True
            ):
                target.copy_(part)


def latent_parts(call: Call, backward: bool) -> Iterator[Part]:
    for part in parts_of(Ring(call, _Step).steps, call.shapes[0][2]):
        hidden_keys(part.mask)
        yield part


LATENT = Algorithm(
    FAST,
    public_latent.LATENT,
    latent_forward,
    latent_backward,
    parts=latent_parts,
    variants=VARIANTS,
)
latent_attention = public_latent.latent_attention(LATENT)
