"""Make the plans of a call ahead of it, for example in a worker of the data loader.

    in collate_fn:            plans = prepare("magi_attention", mask, layout, rank=rank, heads=(32, 8), widths=(128, 128))
    before the first layer:   plans.load()
    in every layer:           out = magi_attention(q, k, v, plans.mask, plans.layout)

A mask of packed documents is new in every step, so its plans cannot come from an earlier step. Workers of the data loader have
time for them. Threads of the training process share its cache: plans that `prepare` makes there are loaded at once.

    function                 plans of `canon.reference`
    the ring functions       the local masks of this rank and each owner of keys
    `latent_attention`       the same, and the keys that no query sees
    `strided_attention`      the local mask of this rank and all keys; those of each owner with backward_schedule="ring"
    `magi_attention`         the cast plan, and the local mask of each of its steps
    `attention`              none

`canon.fast.prepare` also makes the tables of its kernels. This is why `prepare` takes shapes, dtype and device.

Cost: that of the local masks for each rank's keys; for `magi_attention` also that of `cast_plan`. Nothing is sent.

Source: the plans of MagiAttention (Tao and Huang, 2025) are also made once for each mask, ahead of the layers.
"""

from typing import Any

from canon.faces import public_plans
from canon.masks.layout import Layout
from canon.reference.latent import latent_attention
from canon.reference.local import attention
from canon.reference.magi import cast_plan, magi_attention
from canon.reference.ring import ring_attention, striped_attention, zigzag_attention
from canon.reference.strided import strided_attention
from canon.route.checks import cached
from canon.route.latent_arguments import hidden_keys
from canon.route.prepared_plans import Preparation

__all__ = ["prepare"]


RINGS = ring_attention, zigzag_attention, striped_attention, latent_attention
FUNCTIONS = attention, *RINGS, strided_attention, magi_attention


def _make(given: Preparation, _: Any) -> None:
    """Look up the plans that the function looks up in its call."""
    mask, layout, rank = given.mask, given.layout, given.rank
    if layout is None:
        return
    own_layout = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}.get(given.function)
    if own_layout:
        cached(own_layout, layout.tokens, layout.ranks)
    if given.function == "magi_attention":
        plan = cast_plan(mask, layout, stages=given.stages)
        plan.casts_of(plan, rank)
        for step in range(plan.steps):
            plan.local_mask(step, rank)
        return
    gathers = given.function == "strided_attention"
    if gathers:
        layout.local_mask(mask, rank, range(layout.ranks))
    if not gathers or given.options["backward_schedule"] == "ring":
        for owner in range(layout.ranks):
            local = layout.local_mask(mask, rank, owner)
            if given.function == "latent_attention":
                hidden_keys(local)


prepare = public_plans.prepare(_make, FUNCTIONS)
