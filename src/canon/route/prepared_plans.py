"""Plans that are made ahead of a call, perhaps in another process.

data-loader worker        plans = prepare("magi_attention", mask, layout, ...)
queue                     the plans are pickled: NumPy arrays, tuples, and functions by name
thread of the loader      plans.pin_memory(), with DataLoader(pin_memory=True)
training process          plans.load(), then a call with plans.mask and plans.layout
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from canon.masks import plan_cache
from canon.masks.arguments import shown, whole
from canon.masks.layout import Layout, check_size
from canon.masks.mask import Mask
from canon.masks.plan_cache import sizes
from canon.route.algorithm import ALGORITHMS, APART, DECLARATIONS, Declaration, Side
from canon.route.call import Arguments, Call, Place, made_call
from canon.route.checks import DTYPES, cached, check_mask_type


@dataclass(frozen=True, eq=False)
class PreparedPlans:
    """The plans of one call on one rank, as pairs of a key and a plan, to be pickled."""

    mask: Mask
    layout: Layout | None
    plans: tuple[tuple[Any, Any], ...]

    def load(self) -> None:
        """Put the plans into the cache of this process, shortly before a call with ``mask`` and
        ``layout`` of this object: others take longer to compare.
        """
        for key, plan in self.plans:
            plan_cache.PLANS.put(key, plan)

    def pin_memory(self) -> "PreparedPlans":
        """Return the plans with their arrays in pinned memory: the call uploads them without a copy
        on the host. `torch.utils.data.DataLoader(pin_memory=True)` calls it in its own thread.
        """
        return replace(self, plans=tuple((key, _pinned(plan)) for key, plan in self.plans))

    @property
    def nbytes(self) -> int:
        """About how many bytes the plans take on the host."""
        return sizes([plan for _, plan in self.plans])["cpu"]


def _pinned(plan: Any) -> Any:
    if isinstance(plan, np.ndarray):
        return torch.from_numpy(plan).pin_memory().numpy()
    if not isinstance(plan, tuple):
        return plan
    make = getattr(plan, "_make", tuple)  # of a named tuple
    return make(map(_pinned, plan))


def prepared_call(
    side: Side,
    function: str,
    mask: Mask,
    layout: Layout | None,
    rank: int | None,
    mesh_heads: int,
    batch: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> Call:
    """Return the call of `prepare`, of tensors without memory. Raise unless the arguments fit."""
    if function not in DECLARATIONS:
        expected = ", ".join(map(repr, DECLARATIONS))
        raise ValueError(f"prepare: function={shown(function)}: expected one of {expected}")
    declaration = DECLARATIONS[function]
    check_mask_type(mask)
    if dtype not in DTYPES:
        raise ValueError(
            f"prepare: dtype must be float64, float32, float16 or bfloat16, got {shown(dtype)}"
        )
    batch = whole("batch", batch, 1)
    heads, widths = _pair("heads", heads), _pair("widths", widths)
    if heads[0] % heads[1]:
        raise ValueError(
            f"prepare: {heads[0]} query heads are not a multiple of {heads[1]} key heads"
        )
    if options.get("group") is not None:
        raise TypeError(
            "prepare: plans do not depend on a group: pass rank=, and mesh_heads= for a mesh"
        )
    place = _place(declaration, mask, layout, rank, mesh_heads)
    # no plan depends on a sink
    options = {name: x for name, x in options.items() if name not in APART}
    options = declaration.with_defaults(options, "prepare: ")
    sizes = mask.queries, mask.keys
    if layout is not None:
        sizes = (layout.size(place.rank),) * 2
        own = declaration.layout
        if own is not None and layout != cached(own, layout.tokens, layout.ranks):
            raise ValueError(
                f"prepare: {function} has a layout of its own, got {layout}: pass "
                f"Layout.{own.__name__}(tokens, ranks)"
            )
    tensors = tuple(
        torch.empty(shape if len(shape) == 2 else (batch, *shape), dtype=dtype, device="meta")
        for shape in declaration.shapes(*sizes, heads, widths)
    )
    given = Arguments(tensors, mask, layout, None, options)
    return made_call(ALGORITHMS[side.name, function], given, place, side.settings(None))


def _place(
    declaration: Declaration, mask: Mask, layout: Layout | None, rank: int | None, mesh_heads: int
) -> Place:
    if declaration.is_local:
        if layout is not None or rank not in (None, 0) or mesh_heads != 1:
            raise ValueError(
                f"prepare: {declaration.name} runs on one rank: leave out layout, rank and "
                "mesh_heads"
            )
        return Place()
    if not isinstance(layout, Layout):
        raise TypeError(
            f"prepare: layout must be a canon.Layout, got {shown(layout)}: {declaration.name} "
            "has several ranks"
        )
    check_size(mask, layout)
    if rank is None and layout.ranks > 1:
        if not dist.is_initialized() or dist.get_world_size() != layout.ranks:
            raise ValueError(
                f"prepare: rank=None needs a process group of {layout.ranks} ranks in this "
                "process: pass rank, which a data-loader worker cannot find out"
            )
        rank = dist.get_rank()
    if (rank := whole("rank", rank or 0, 0)) >= layout.ranks:
        raise ValueError(
            f"rank {rank} is not one of the layout's {layout.ranks}: they count from 0"
        )
    if layout.ranks % (columns := whole("mesh_heads", mesh_heads, 1)):
        raise ValueError(
            f"prepare: mesh_heads={columns} does not divide the {layout.ranks} ranks of the layout"
        )
    return Place(None, rank, layout.ranks, columns)


def _pair(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"prepare: {name} must be two whole numbers, got {shown(value)}")
    return whole(f"{name}[0]", value[0], 1), whole(f"{name}[1]", value[1], 1)
