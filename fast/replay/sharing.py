"""Recorded passes that serve other masks.

A pass depends on its mask only through the mask's sizes and the plans that it looks up. If another
mask has plans of the same *structure*, only addresses differ. So the first call with a new mask
looks up the same plans, and compares structures.
"""

from typing import Any

from torch import Tensor

from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import Upload, observed
from canon.masks.mask import Mask
from canon.masks.plan_cache import seen_plans

NO_MASK = Mask([], 0, 0)  # in place of a mask that may be dropped


class LookUps:
    """The plans that a pass looks up for a mask: functions, arguments and structures, in order.
    ``serves_others``: another mask can take its place.
    """

    def __init__(self, mask: Mask, seen: dict[Any, Any], tensors: int):
        given = [x for _, arguments in seen for x in arguments if isinstance(x, (Cells, Mask))]
        self.serves_others = all(getattr(x, "mask", x) == mask for x in given)
        self.keys = [(function, _moved(arguments, NO_MASK)) for function, arguments in seen]
        self.structures, self.tensors = [structure(plan) for plan in seen.values()], tensors

    def of(self, mask: Mask) -> tuple[list[Tensor], list[Upload]] | None:
        """Return the tensors and uploads of another mask's plans; None if structures differ."""
        tensors: list[Tensor] = []
        with seen_plans() as seen, observed(tensors.extend):
            for (function, arguments), expected in zip(self.keys, self.structures, strict=True):
                function(*(given := _moved(arguments, mask)))
                if structure(seen[function, given]) != expected:
                    return None
        return (tensors, uploads_in(seen)) if len(tensors) == self.tensors else None


def structure(plan: Any) -> Any:
    """Return what launches depend on in a plan, besides the contents of its tensors."""
    if isinstance(plan, Tensor):
        return plan.shape, plan.dtype, plan.data_ptr() % 16
    if isinstance(plan, Upload):
        return None
    if (own := getattr(plan, "structure", None)) is not None:
        return own
    return tuple(map(structure, plan)) if isinstance(plan, tuple) else plan


def uploads_in(seen: dict[Any, Any]) -> list[Upload]:
    """Return the uploads of plans."""
    plans = [plan for plan in seen.values() if isinstance(plan, tuple)]
    return [x for plan in plans for x in plan if isinstance(x, Upload)]


def _moved(arguments: tuple, mask: Mask) -> tuple:
    return tuple(
        x._replace(mask=mask) if isinstance(x, Cells) else mask if isinstance(x, Mask) else x
        for x in arguments
    )
