"""Plans that are made ahead of a call, perhaps in another process, and the checks of the arguments
of `prepare`.

    data-loader worker        plans = prepare("magi_attention", mask, layout, ...)
    queue                     the plans are pickled: NumPy arrays, tuples, and functions by name
    thread of the loader      plans.pin_memory(), with DataLoader(pin_memory=True)
    training process          plans.load(), then a call with plans.mask and plans.layout
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from canon.masks import plan_cache
from canon.masks.arguments import flag, shown, whole
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
        """Put the plans into the cache of this process, shortly before the call. Pass ``mask`` and
        ``layout`` of this object to it: other objects take longer to compare.
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


@dataclass(frozen=True)
class Preparation:
    """The arguments of `prepare`."""

    function: str
    mask: Mask
    layout: Layout | None
    rank: int | None
    mesh_heads: int
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    requires_grad: bool
    options: dict[str, Any]

    def call(self, side: Side) -> Call:
        """Return the call, of tensors without memory. Raise unless the arguments fit."""
        if self.function not in DECLARATIONS:
            expected = ", ".join(map(repr, DECLARATIONS))
            raise ValueError(
                f"prepare: function={shown(self.function)}: expected one of {expected}"
            )
        declaration, algorithm = DECLARATIONS[self.function], ALGORITHMS[side.name, self.function]
        check_mask_type(self.mask)
        if self.dtype not in DTYPES:
            raise ValueError(
                "prepare: dtype must be float64, float32, float16 or bfloat16, got "
                f"{shown(self.dtype)}"
            )
        flag("prepare: requires_grad", self.requires_grad)
        batch = whole("batch", self.batch, 1)
        heads, widths = _pair("heads", self.heads), _pair("widths", self.widths)
        if heads[0] % heads[1]:
            raise ValueError(
                f"prepare: {heads[0]} query heads are not a multiple of {heads[1]} key heads"
            )
        if self.options.get("group") is not None:
            raise TypeError(
                "prepare: plans do not depend on a group: pass rank=, and mesh_heads= for a mesh"
            )
        place = self._place(declaration)
        # no plan depends on a sink
        options = {name: x for name, x in self.options.items() if name not in APART}
        options = declaration.with_defaults(options, "prepare: ")
        sizes = self.mask.queries, self.mask.keys
        if self.layout is not None:
            sizes = (self.layout.size(place.rank),) * 2
            if declaration.layout is not None:
                own = cached(declaration.layout, self.layout.tokens, self.layout.ranks)
                if self.layout != own:
                    raise ValueError(
                        f"prepare: {self.function} has a layout of its own, got {self.layout}: "
                        f"pass Layout.{declaration.layout.__name__}(tokens, ranks)"
                    )
        new = lambda shape: torch.empty(
            shape if len(shape) == 2 else (batch, *shape), dtype=self.dtype, device="meta"
        )
        tensors = tuple(map(new, declaration.shapes(*sizes, heads, widths)))
        given = Arguments(tensors, self.mask, self.layout, None, options)
        return made_call(algorithm, given, place, side.settings(None))

    def prepared(self, plans: dict[Hashable, Any]) -> PreparedPlans:
        """Return these plans, and the digests by which the ranks compare a call."""
        if self.layout is not None:
            _ = self.mask.digest, self.layout.digest
        return PreparedPlans(self.mask, self.layout, tuple(plans.items()))

    def _place(self, declaration: Declaration) -> Place:
        """Return the rank: by default this process's, if its group fits the layout."""
        layout, rank = self.layout, self.rank
        if declaration.is_local:
            if layout is not None or rank not in (None, 0) or self.mesh_heads != 1:
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
        check_size(self.mask, layout)
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
        if layout.ranks % (columns := whole("mesh_heads", self.mesh_heads, 1)):
            raise ValueError(
                f"prepare: mesh_heads={columns} does not divide the {layout.ranks} ranks of the "
                "layout"
            )
        return Place(None, rank, layout.ranks, columns)


def _pair(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"prepare: {name} must be two whole numbers, got {shown(value)}")
    return whole(f"{name}[0]", value[0], 1), whole(f"{name}[1]", value[1], 1)
