"""Make the plans of a call ahead of it, for example in a worker of the data loader.

    in collate_fn:            plans = prepare("magi_attention", mask, layout, rank=rank, heads=(32, 8), widths=(128, 128))
    before the first layer:   plans.load()
    in every layer:           out = magi_attention(q, k, v, plans.mask, plans.layout)

A mask of packed documents is new in every step, so its plans cannot come from an earlier step. Workers of the data loader
have time for them. Threads of the training process share its cache: what `prepare` makes there is loaded at once.

The plans of the reference are local masks and, for `magi_attention`, the cast plan. Those of `canon.fast` also have the
tables of its kernels. This is why `prepare` takes shapes, dtype and device.

Cost for n bands and r ranks: as `layout.py`, for each rank's keys; for `magi_attention` also as `group_collectives.py`.

Source: the plans of MagiAttention (Tao and Huang, 2025) are also made once for each mask, ahead of the layers.
"""

from typing import Any

import torch

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import noted_plans
from canon.reference.local import attention
from canon.reference.magi import cast_plan, magi_attention
from canon.reference.ring import ring_attention, striped_attention, zigzag_attention
from canon.reference.strided import strided_attention
from canon.runtime.checks import cached
from canon.runtime.prepared_plans import Preparation, PreparedPlans

__all__ = ["prepare"]


def prepare(
    function: str,
    mask: Mask,
    layout: Layout | None = None,
    *,
    rank: int | None = None,
    batch: int = 1,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: Any = "cuda",
    backward: str = "auto",
    requires_grad: bool = True,
    **options: Any,
) -> PreparedPlans:
    """Return the plans of a call of ``function``. Its method ``load`` puts them into the cache of the training process.

    Args:
        function: "attention", "ring_attention", "zigzag_attention", "striped_attention", "strided_attention" or
            "magi_attention".
        mask, layout: those of the call; no layout for "attention", `Layout.zigzag` for "zigzag_attention".
        rank: the rank that will make the call; None is the rank of this process.
        batch, heads, widths, dtype: b, (h, g), (d, dv) and the dtype of q, k and v.
        device: the device of the call. `canon.fast.prepare` explains it; plans of the reference are the same on all devices.
        backward: the ``backward`` of the call.
        requires_grad: also make the plans of the backward pass.
        options: other options of the function that the call passes, such as ``stages``.

    Raises ValueError or TypeError if the arguments do not fit together. Source: the module's docstring.
    """
    given = Preparation(
        function, mask, layout, rank, batch, heads, widths, dtype, backward, requires_grad, options
    ).checked(FUNCTIONS)  # fmt: skip
    with noted_plans() as plans:
        _make(given)
    return given.prepared(plans)


FUNCTIONS = attention, ring_attention, zigzag_attention, striped_attention, strided_attention, magi_attention


def _make(given: Preparation) -> None:
    """Look up the plans that the function looks up in its call."""
    mask, layout, rank = given.mask, given.layout, given.rank
    if layout is None:
        return
    own_layout = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}.get(given.function)
    if own_layout:
        cached(own_layout, layout.tokens, layout.ranks)
    if given.function == "magi_attention":
        plan = cast_plan(mask, layout, stages=given.stages)
        for step in range(plan.steps):
            plan.local_mask(step, rank)
        return
    gathers = given.function == "strided_attention"
    if gathers:
        layout.local_mask(mask, rank, range(layout.ranks))
    if not gathers or given.options["backward_schedule"] == "ring":
        for owner in range(layout.ranks):
            layout.local_mask(mask, rank, owner)
