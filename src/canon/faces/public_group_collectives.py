"""`group_cast` and `group_reduce`: the messages of a cast plan."""

from collections.abc import Callable

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.arguments import plain_tensor, whole
from canon.masks.cast_plan import CastPlan
from canon.ranks.agreement import agree, named_failures, refused_together
from canon.ranks.group import Group, place_in
from canon.ranks.profiling import recorded
from canon.route.binding import bound, half_of
from canon.route.checks import any_device, resolved
from canon.route.plan_arguments import (
    Sizes,
    check_into,
    check_rows,
)


def group_cast(cast: Callable[..., Tensor], check_device: Callable[[Tensor], None] = any_device):
    """Return `group_cast` of a half: ``cast(x, plan, stage, group, rank, sizes)``, checked."""

    def group_cast(
        x: Float[Tensor, "t ..."], plan: CastPlan, stage: int, *, group: Group = None
    ) -> Float[Tensor, "received ..."]:
        """Return the tokens that this rank receives in cast ``stage``, by source rank and by row. A
        collective. Not differentiable.

        Args: ``x`` (t, ...), this rank's tokens; ``plan``, equal on all ranks; ``stage``, the
            number of the cast, from 0; ``group``, as in `canon.faces`.
        Raises ValueError if x, the group or the stage do not fit the plan. Source: Tao and Huang,
        MagiAttention (2025).
        """
        group, rank, sizes = _agreed(
            "group_cast", half_of(cast), check_device, x, plan, stage, group
        )
        with recorded("group_cast"), named_failures("group_cast", group, plan.layout.ranks):
            return cast(resolved(x), plan, stage, group, rank, sizes)

    return bound(group_cast, cast)


def group_reduce(
    reduce: Callable[..., Tensor], check_device: Callable[[Tensor], None] = any_device
):
    """Return `group_reduce` of a half: ``reduce(y, plan, stage, into, group, rank)``, checked."""

    def group_reduce(
        y: Float[Tensor, "received ..."],
        plan: CastPlan,
        stage: int,
        into: Float[Tensor, "t ..."],
        *,
        group: Group = None,
    ) -> Float[Tensor, "t ..."]:
        """Add the rows ``y`` of all ranks to the tokens that they were cast from, and return
        ``into``. A collective.

        Args: ``y`` (received, ...), a row for each token that this rank received in cast ``stage``,
            in that order; ``into`` (t, ...), this rank's tokens, changed in place.
        Rows are sent in the dtype of ``y``, added in rank order in float32 (float64 if ``into`` is
        float64), and rounded once. Errors and Source: those of `group_cast`.
        """
        group, rank, _ = _agreed(
            "group_reduce", half_of(reduce), check_device, y, plan, stage, group, into
        )
        with recorded("group_reduce"), named_failures("group_reduce", group, plan.layout.ranks):
            return reduce(resolved(y), plan, stage, into, group, rank)

    return bound(group_reduce, reduce)


def _agreed(
    function: str,
    half: str,
    check_device: Callable[[Tensor], None],
    x: Tensor,
    plan: CastPlan,
    stage: int,
    group: Group,
    into: Tensor | None = None,
) -> tuple[dist.ProcessGroup | None, int, Sizes]:
    group, rank, ranks = place_in(function, group)
    with refused_together(function, group, ranks):
        plain_tensor(function, x, 0)
        check_device(x)
        if not isinstance(plan, CastPlan):
            raise TypeError(
                f"{function}: plan must be a CastPlan, got {type(plan).__name__}: pass the result "
                "of cast_plan"
            )
        stage = whole(f"{function}: stage", stage)
        rank, sizes = check_rows(f"{function}: x", x, plan, stage, group, received=into is not None)
        if into is not None:
            check_into(into, x, plan, rank)
    fields = (
        ("half", half),
        ("mask", plan.mask),
        ("layout", plan.layout),
        ("casts, own_keys_first, stage", (plan.casts, plan.own_keys_first, stage)),
        ("shape of a row", tuple(x.shape[1:])),
    )
    agree(function, group, ranks, x, *fields)
    return group, rank, sizes
