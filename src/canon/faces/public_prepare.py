"""`prepare`: the plans of a call, ahead of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from canon.masks.arguments import flag
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import noted_plans
from canon.ranks.profiling import recorded
from canon.route.algorithm import Side
from canon.route.binding import bound
from canon.route.call import Call
from canon.route.prepared_plans import PreparedPlans, prepared_call


def prepare(
    side: Side,
    run: Callable[[Call, bool], None],
    on: Callable[[Any], AbstractContextManager],
    notes: str = "",
):
    """Return `prepare` of a half. ``run(call, backward)`` looks up the plans of a call, in the
    context of ``on(device)``.
    """

    def prepare(
        function: str,
        mask: Mask,
        layout: Layout | None = None,
        *,
        rank: int | None = None,
        mesh_heads: int = 1,
        batch: int = 1,
        heads: tuple[int, int],
        widths: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        device: Any = "cuda",
        backward: str = "auto",
        requires_grad: bool = True,
        **options: Any,
    ) -> PreparedPlans:
        """Return the plans of a call of ``function``, to be loaded in the training process.

        Args:
            function: "attention", "ring_attention", "zigzag_attention", "striped_attention",
                "latent_attention", "strided_attention" or "magi_attention".
            mask, layout: those of the call; no layout for "attention", `Layout.zigzag` for
                "zigzag_attention".
            rank: the rank that will make the call; None is that of this process.
            mesh_heads: the dimension "heads" of the mesh of the call.
            batch, heads, widths, dtype: b, (h, g), (d, dv) and the dtype of q, k and v.
                `latent_attention` projects K and V of (h, h) heads.
            device: the device of the call. Plans of the reference are the same on all devices.
            backward: that of the call. "auto" makes the plans of both states of
                `torch.use_deterministic_algorithms`; others those of this process's state.
            requires_grad: also make the plans of the backward pass.
            options: other options that the call passes, such as ``casts``.

        Raises ValueError or TypeError if the arguments do not fit together. Source: Tao and Huang,
        MagiAttention (2025), whose plans are also made once for each mask.
        """
        flag("prepare: requires_grad", requires_grad)
        sizes = rank, mesh_heads, batch, heads, widths, dtype
        with recorded("prepare"), noted_plans() as plans, on(device):
            call = prepared_call(
                side, function, mask, layout, *sizes, {"backward": backward, **options}
            )
            run(call, requires_grad)
        if layout is not None:
            _ = mask.digest, layout.digest  # by which the ranks compare a call
        return PreparedPlans(mask, layout, tuple(plans.items()))

    return bound(prepare, run, notes)
