"""The public functions of plans and of the collectives over a plan: signatures, docstrings, checks. Each half binds its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.arguments import plain_tensor
from canon.masks.cast_plan import CastPlan, PlanReport
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import noted_plans
from canon.runtime.agreement import group_state, named_failures, refused_together
from canon.runtime.binding import bound
from canon.runtime.checks import any_device
from canon.runtime.group import Group, place_in
from canon.runtime.plan_arguments import (
    Sizes,
    check_cast,
    check_into,
    check_rows,
    checked_chunk,
    checked_dispatch,
    one_mask,
    stages_of,
)
from canon.runtime.prepared_plans import Preparation, PreparedPlans
from canon.runtime.profiling import recorded


def dispatch(planned: Callable[..., Layout]):
    """Return `dispatch` of a half. ``planned`` takes the mask of `one_mask`, and checked numbers with the chunk filled in."""

    def dispatch(
        mask: Mask | Sequence[Mask],
        ranks: int,
        *,
        chunk: int | None = None,
        imbalance: float = 1.05,
        cells_per_us: int = 4400,
        tokens_per_us: int = 18,
        swaps_per_chunk: int = 1,
        rank_invariant: bool = False,
    ) -> Layout:
        """Return a layout in which ranks compute equally and move few keys. Deterministic, equal on all ranks; cached.

        The plan minimises the time of the slowest rank, max(computing, receiving, sending), down to ``imbalance`` times the
        lower bound of computing. Among plans below that, it minimises time x traffic. It is never worse than zigzag chunks.

        Args:
            mask: over the whole sequence, with as many queries as keys. A tuple or a list holds a mask for each sequence:
                the layout serves all, and balances the sum of their areas.
            ranks: the number of ranks.
            chunk: the tokens that stay together; the last chunk may be short. All ranks get equally many chunks, or one
                less, and token counts differ by at most one chunk. None is 1024, less for 8 chunks a rank, or more for at
                most 32 (`canon.runtime.plan_arguments.default_chunk`).
            imbalance: the accepted ratio of the largest area to its lower bound, max(mean over the ranks, largest chunk).
            cells_per_us, tokens_per_us: the assumed rates of a rank in cells (of all heads) and received tokens per
                microsecond, forward and backward together. Defaults: 64 heads of width 128 at 500 TFLOP/s, 14 * 64 * 128
                FLOPs per cell (7 matrix products); 8 key heads at 300 GB/s, 16 KB per token (bf16 K, V twice; float32 dk, dv).
            swaps_per_chunk: the largest number of swaps, divided by the number of non-empty chunks.
            rank_invariant: make the layout fit ``magi_attention(..., rank_invariant=True)``: the chunk is a multiple of 128
                tokens. None is then its default rounded up, and other chunks raise.

        Raises:
            ValueError: the mask is not square, or a number is out of range.
            TypeError: an argument has a wrong type.

        Warns:
            UserWarning: an explicit chunk is so long that ranks hold no token, although there are enough tokens.

        Source: Tao and Huang, MagiAttention (2025): the problem and the chunks.
        """
        one, sequences = one_mask(mask)
        checked = checked_dispatch(
            one, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk, rank_invariant
        )
        with recorded("dispatch"):
            return planned(one, sequences, *checked)

    return bound(dispatch, planned)


def cast_plan(planned: Callable[[Mask, Layout, int | None], CastPlan]):
    """Return `cast_plan` of a half."""

    def cast_plan(
        mask: Mask,
        layout: Layout,
        *,
        casts: int | None = None,
        own_keys_first: bool | None = None,
        stages: int | None = None,
    ) -> CastPlan:
        """Return the tokens that each rank receives from each other rank. Pure and cached; nothing is sent.

        Args: ``mask`` over the whole sequence; any ``layout``; the others as in `magi_attention`. There are fewer casts if
            every rank sends fewer than ``casts`` tokens to each other rank.
        Raises ValueError if mask and layout differ in their number of tokens, or the options do not fit together. Wrong
        types raise TypeError. Source: Tao and Huang, MagiAttention (2025).
        """
        check_cast(mask, layout)
        with recorded("cast_plan"):
            return planned(mask, layout, stages_of(casts, own_keys_first, stages))

    return bound(cast_plan, planned)


def plan_report(reported: Callable[[Mask, Layout, int], PlanReport]):
    """Return `plan_report` of a half."""

    def plan_report(mask: Mask, layout: Layout, *, chunk: int | None = None) -> PlanReport:
        """Return the balance and the traffic of a layout: each rank's visible cells, and the tokens that it receives and sends.

        Args: ``chunk``, the length of a chunk of `dispatch`, in tokens; None is its default. A chunk is not divided, so its
            area is a lower bound of the largest work.
        Raises ValueError if mask and layout differ in their number of tokens, or chunk < 1. Wrong types raise TypeError.
        Source: Tao and Huang, MagiAttention (2025).
        """
        check_cast(mask, layout)
        with recorded("plan_report"):
            return reported(mask, layout, checked_chunk(chunk, layout.tokens, layout.ranks))

    return bound(plan_report, reported)


def group_cast(cast: Callable[..., Tensor], check_device: Callable[[Tensor], None] = any_device):
    """Return `group_cast` of a half. ``cast(x, plan, stage, group, rank, sizes)`` takes checked arguments."""

    def group_cast(
        x: Float[Tensor, "t ..."], plan: CastPlan, stage: int, *, group: Group = None
    ) -> Float[Tensor, "received ..."]:
        """Return the tokens that this rank receives in cast ``stage``, by source rank and by row. A collective.

        Args: ``x`` (t, ...), this rank's tokens; ``plan``, equal on all ranks; ``stage``, the number of the cast, from 0;
            ``group``, a ProcessGroup or a DeviceMesh of one dimension, None for all ranks.
        The result is not differentiable; `group_reduce` sends gradients back. Raises ValueError if x, the group or the stage do
        not fit the plan. Source: Tao and Huang, MagiAttention (2025).
        """
        group, rank, sizes = _agreed("group_cast", check_device, x, plan, stage, group)
        with recorded("group_cast"), named_failures("group_cast", group, plan.layout.ranks):
            return cast(x, plan, stage, group, rank, sizes)

    return bound(group_cast, cast)


def group_reduce(reduce: Callable[..., Tensor], check_device: Callable[[Tensor], None] = any_device):
    """Return `group_reduce` of a half. ``reduce(y, plan, stage, into, group, rank)`` takes checked arguments."""

    def group_reduce(
        y: Float[Tensor, "received ..."],
        plan: CastPlan,
        stage: int,
        into: Float[Tensor, "t ..."],
        *,
        group: Group = None,
    ) -> Float[Tensor, "t ..."]:
        """Add the rows ``y`` of all ranks to the tokens that they were cast from, and return ``into``. A collective.

        Args: ``y`` (received, ...), one row for each token that this rank received in cast ``stage``, in that order;
            ``into`` (t, ...), this rank's tokens, changed in place. The others are those of `group_cast`.
        Rows are sent in the dtype of ``y`` and added in the dtype of ``into``, in rank order.
        Raises ValueError if y, into, the group or the stage do not fit the plan. Source: Tao and Huang, MagiAttention
        (2025).
        """
        group, rank, _ = _agreed("group_reduce", check_device, y, plan, stage, group, into)
        with recorded("group_reduce"), named_failures("group_reduce", group, plan.layout.ranks):
            return reduce(y, plan, stage, into, group, rank)

    return bound(group_reduce, reduce)


def _agreed(
    function: str,
    check_device: Callable[[Tensor], None],
    x: Tensor,
    plan: CastPlan,
    stage: int,
    group: Group,
    into: Tensor | None = None,
) -> tuple[dist.ProcessGroup | None, int, Sizes]:
    """Return the process group, this rank and the sizes of its cast, after a comparison between all ranks. A collective.

    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those
    of the others.
    """
    group, rank, ranks = place_in(function, group)
    with refused_together(function, group, ranks):
        plain_tensor(function, x, 0)
        check_device(x)
        if not isinstance(plan, CastPlan):
            raise TypeError(
                f"{function}: plan must be a CastPlan, got {type(plan).__name__}: pass the result of cast_plan"
            )
        rank, sizes = check_rows(f"{function}: x", x, plan, stage, group, received=into is not None)
        if into is not None:
            check_into(into, x, plan, rank)
    if ranks > 1:
        fields = (
            ("function", function),
            ("mask", plan.mask),
            ("layout", plan.layout),
            ("casts, own_keys_first, stage", (plan.casts, plan.own_keys_first, stage)),
            ("dtype", x.dtype),
            ("shape of a row", tuple(x.shape[1:])),
        )
        group_state(group).agree(function, fields, wait=x.device.type == "cpu")
    return group, rank, sizes


def prepare(make: Callable[[Preparation, Any], None], functions: Sequence[Callable], notes: str = ""):
    """Return `prepare` of a half. ``make`` looks up the plans of a call of one of the ``functions``."""

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
            function: "attention", "ring_attention", "zigzag_attention", "striped_attention", "latent_attention",
                "strided_attention" or "magi_attention".
            mask, layout: those of the call; no layout for "attention", `Layout.zigzag` for "zigzag_attention".
            rank: the rank that will make the call; None is the rank of this process.
            batch, heads, widths, dtype: b, (h, g), (d, dv) and the dtype of q, k and v. `latent_attention` projects K and V
                of (h, h) heads.
            device: the device of the call. the plans of the reference are the same on all devices.
            backward: the ``backward`` of the call.
            requires_grad: also make the plans of the backward pass.
            options: other options of the function that the call passes, such as ``casts``.

        Raises ValueError or TypeError if the arguments do not fit together. Source: Tao and Huang, MagiAttention
        (2025), whose plans are also made once for each mask.
        """
        given = Preparation(
            function, mask, layout, rank, batch, heads, widths, dtype, backward, requires_grad, options
        ).checked(functions)
        with recorded("prepare"), noted_plans() as plans:
            make(given, device)
        return given.prepared(plans)

    return bound(prepare, make, notes)
