"""Make the plans of a call ahead of it: masks, cast plans, and the tables of every kernel.

Read `canon.reference.preparation` first. Here a call also needs the tables of its kernels: work tables, tile schedules
and tickets of dq. They depend on tile sizes, packing and the backward method. The launch functions derive all of this from
the mask and from the shapes, the dtype and the device of their tensors. So `prepare` calls the same functions on
tensors of the meta device, which have no memory, and notes the plans that they look up (`plan_cache.noted_plans`). Nothing
is launched or uploaded. A plan is therefore exactly the one that the call looks up, or it is not found and the call makes it.

Only the upload of the tables is left for the first call after ``load``. The host does not wait for it (`device_plans`).

Cost: as planning in the call. A pickle has 32 bytes for each work tile of a Gluon kernel, and 20 for each tile and 32 for
each span of a Triton kernel.

Source: as `canon.reference.preparation`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from canon.faces import public_plans
from canon.fast.active_queries import ActiveQueries, active_queries_of, query_indices, visible_keys
from canon.fast.backward import plan_gradients
from canon.fast.group_collectives import cast_plan, rows_returned, rows_sent
from canon.fast.kernels.device_plans import META
from canon.fast.kernels.launcher import Gpu, gpu_of, meta_stands_for
from canon.fast.latent import latent_attention
from canon.fast.local import attention, empty_result, forward_for
from canon.fast.magi import magi_attention
from canon.fast.messages import gathered_mask, padded_tokens
from canon.fast.ring import ring_attention, striped_attention, zigzag_attention
from canon.fast.strided import strided_attention
from canon.masks.head_groups import steps_of
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.route.checks import cached
from canon.route.latent_arguments import hidden_keys
from canon.route.prepared_plans import Preparation

__all__ = ["prepare"]


RINGS = ring_attention, zigzag_attention, striped_attention, latent_attention
FUNCTIONS = attention, *RINGS, strided_attention, magi_attention


def _gpu(device: Any) -> Gpu | None:
    """Return the GPU, or None for the CPU. Raises ValueError for other devices."""
    if isinstance(device, Gpu):
        return device
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare: device must be a CUDA device, the CPU or a Gpu, got {device}")
    return None if device.type == "cpu" else gpu_of(device)


class _Part(NamedTuple):
    """One kernel part of a call: the queries and keys of ``mask``, and ``key_heads`` of the key heads."""

    mask: Mask
    key_heads: int
    forward: bool = True
    backward: bool = True


def _launch(part: _Part, given: Preparation) -> None:
    """Call the launch functions of a part on meta tensors."""
    (h, g), (d, dv) = given.heads, given.widths
    mask, heads = part.mask, h // g * part.key_heads
    new = lambda tokens, heads, width: torch.empty(given.batch, tokens, heads, width, dtype=given.dtype, device=META)
    q, k, v = new(mask.queries, heads, d), new(mask.keys, part.key_heads, d), new(mask.keys, part.key_heads, dv)
    out, lse = empty_result(q, v, q.dtype)
    if part.forward:
        forward = forward_for(q, v, mask, given.layout is None, given.options["return_max_logits"])
        forward(q, k, v, mask, 1.0, out, lse)
    if part.backward and given.requires_grad:
        plan_gradients(q, k, v, out, lse, mask, given.backward)


def _make(given: Preparation, device: Any) -> None:
    """Look up the plans that the function looks up in its call."""
    with meta_stands_for(_gpu(device)):
        for part in _parts(given):
            _launch(part, given)


# ------------------------------------------------------------------ the parts of each function
def _parts(given: Preparation) -> Iterator[_Part]:
    """Yield the parts of the call, and look up the plans that lead to them."""
    mask, layout, g = given.mask, given.layout, given.heads[1]
    if layout is None:
        yield _Part(mask, g)
        return
    own_layout = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}.get(given.function)
    if own_layout:
        cached(own_layout, layout.tokens, layout.ranks)
    if given.function == "magi_attention":
        yield from _magi_parts(given, layout)
    elif layout.ranks == 1 and given.function != "latent_attention":
        yield _Part(layout.local_mask(mask, 0, 0), g)
    elif given.function == "strided_attention":
        yield from _strided_parts(given, layout)
    else:
        yield from _ring_parts(given, layout)


def _ring_parts(given: Preparation, layout: Layout, forward: bool = True) -> Iterator[_Part]:
    for owner in range(layout.ranks):
        mask = layout.local_mask(given.mask, given.rank, owner)
        if owner == given.rank:
            active = active_queries_of(mask, all_queries=True)
        else:
            active = active_queries_of(visible_keys(mask)[1])
        if given.function == "latent_attention":
            hidden_keys(active.mask)
        yield from _active_parts(active, given, forward, owner == given.rank)


def _strided_parts(given: Preparation, layout: Layout) -> Iterator[_Part]:
    steps = steps_of(given.heads[1], given.options)
    padded_tokens(layout)
    _, mask = visible_keys(gathered_mask(layout, given.mask, given.rank))
    active_queries_of(mask, all_queries=True)
    for heads in set(map(len, steps.forward)):
        yield _Part(mask, heads, backward=False)
    if given.requires_grad and steps.backward is None:
        yield from _ring_parts(given, layout, forward=False)
    for heads in set(map(len, steps.backward or ())):
        yield _Part(mask, heads, forward=False)


def _magi_parts(given: Preparation, layout: Layout) -> Iterator[_Part]:
    plan, rank = cast_plan(given.mask, layout, stages=given.stages), given.rank
    plan.casts_of(plan, rank)
    for cast in range(plan.casts):
        rows_sent(plan, cast, rank, META)
        if given.requires_grad:
            rows_returned(plan, cast, rank, META)
    for step in range(plan.steps):
        active = active_queries_of(plan.local_mask(step, rank), plan.holds_own(step))
        if plan.holds_own(step) and plan.casts and given.options["keep_kv"]:
            query_indices(active, META)  # its part of dq is added last
        yield from _active_parts(active, given, True, plan.holds_own(step))


def _active_parts(active: ActiveQueries, given: Preparation, forward: bool, initial: bool) -> Iterator[_Part]:
    """Yield the part of a step, unless no query sees a key and the step does not initialise the results (``initial``)."""
    if active.mask.bands or initial:
        if not initial:
            query_indices(active, META)
        yield _Part(active.mask, given.heads[1], forward)


NOTES = """
    ``device`` may also be the result of `canon.fast.kernels.launcher.gpu_of`: a data-loader worker does not start CUDA.

    If the worker is forked after a call of `canon.fast` or of `gpu_of`, "cuda" suffices. Else RuntimeError is raised, because
    the GPU is unknown. Inside `canon.fast.backend` the plans are those of that kernel backend.
    """
prepare = public_plans.prepare(_make, FUNCTIONS, NOTES)
