"""Plans that are made ahead of a call, perhaps in another process, and the checks of the arguments of `prepare`.

data-loader worker        plans = prepare("magi_attention", mask, layout, ...)
queue                     the plans are pickled: NumPy arrays, tuples, and functions by name
training process          plans.load(), then magi_attention(q, k, v, plans.mask, plans.layout, ...)
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from canon.masks import plan_cache
from canon.masks.arguments import shown, whole
from canon.masks.head_groups import default_stride, gathered_bytes
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.pickles import FORMAT, check_format
from canon.masks.plan_cache import sizes
from canon.route.checks import DTYPES, check_mask_type, check_method
from canon.route.plan_arguments import check_size, stages_of

GIVEN_APART = ("mask", "layout", "group", "backward")  # arguments of a function that are not options of `prepare`


@dataclass(frozen=True, eq=False)
class PreparedPlans:
    """The plans of one call on one rank, as pairs of a key in the cache and a plan. They can be pickled."""

    mask: Mask
    layout: Layout | None
    plans: tuple[tuple[Any, Any], ...]

    def __reduce__(self):  # the format is checked before the plans are read
        return self._of_format, (FORMAT,), self.__dict__

    @classmethod
    def _of_format(cls, version: int) -> "PreparedPlans":
        check_format("PreparedPlans", version)
        return object.__new__(cls)

    def load(self) -> None:
        """Put the plans into the cache of this process, shortly before the call: the cache keeps its limit of bytes.

        Pass ``mask`` and ``layout`` of this object to the call: other objects take longer to compare.
        """
        for key, plan in self.plans:
            plan_cache.PLANS.put(key, plan)

    @property
    def nbytes(self) -> int:
        """About how many bytes the plans take on the host."""
        return sizes([plan for _, plan in self.plans])["cpu"]


@dataclass(frozen=True)
class Preparation:
    """The arguments of `prepare`. ``heads``: of queries and of keys. ``widths``: of keys and of values."""

    function: str
    mask: Mask
    layout: Layout | None
    rank: int | None
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype
    backward: str
    requires_grad: bool
    options: dict[str, Any]

    @property
    def stages(self) -> int | None:
        """The casts of a call of `magi_attention`, see `stages_of`."""
        return stages_of(*(self.options[name] for name in ("casts", "own_keys_first", "stages", "rank_invariant")))

    def checked(self, functions: Sequence[Callable]) -> "Preparation":
        """Return the arguments with the defaults of ``rank`` and ``options``. Raise unless they fit together."""
        by_name = {x.__name__: x for x in functions}
        if self.function not in by_name:
            expected = ", ".join(map(repr, by_name))
            raise ValueError(f"prepare: function={shown(self.function)}: expected one of {expected}")
        check_mask_type(self.mask)
        check_method("backward", self.backward)
        if self.dtype not in DTYPES:
            raise ValueError(f"prepare: dtype must be float64, float32, float16 or bfloat16, got {shown(self.dtype)}")
        if not isinstance(self.requires_grad, bool):
            raise TypeError(f"prepare: requires_grad must be True or False, got {shown(self.requires_grad)}")
        whole("batch", self.batch, 1)
        heads, widths = _pair("heads", self.heads), _pair("widths", self.widths)
        if heads[0] % heads[1]:
            raise ValueError(f"prepare: {heads[0]} query heads are not a multiple of {heads[1]} key heads")
        if self.function == "latent_attention" and heads[0] != heads[1]:
            raise ValueError(
                f"prepare: latent_attention projects a key head for each query head: heads must be {heads[:1] * 2}"
            )
        rank = _checked_rank(self.function, self.mask, self.layout, self.rank)
        options = _with_defaults(self.function, by_name[self.function], self.options)
        if self.layout is not None and options.get("head_stride", 1) is None:
            row = self.batch * sum(widths) * self.dtype.itemsize
            options["head_stride"] = default_stride(heads[1], gathered_bytes(self.layout, row))
        return replace(self, rank=rank, heads=heads, widths=widths, options=options)

    def prepared(self, plans: dict[Hashable, Any]) -> PreparedPlans:
        """Return these plans. Make the digests, by which the ranks compare a call, ahead too."""
        if self.layout is not None:
            _ = self.mask.digest, self.layout.digest
        return PreparedPlans(self.mask, self.layout, tuple(plans.items()))


def _pair(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"prepare: {name} must be two whole numbers, got {shown(value)}")
    return whole(f"{name}[0]", value[0], 1), whole(f"{name}[1]", value[1], 1)


def _checked_rank(function: str, mask: Mask, layout: Any, rank: Any) -> int:
    """Return the rank: by default this process's rank, if its process group has as many ranks as the layout."""
    if function == "attention":
        if layout is not None or rank not in (None, 0):
            raise ValueError("prepare: attention runs on one rank: leave out layout and rank")
        return 0
    if not isinstance(layout, Layout):
        raise TypeError(f"prepare: layout must be a canon.Layout, got {shown(layout)}: {function} has several ranks")
    check_size(mask, layout)
    if rank is None:
        if layout.ranks == 1:
            return 0
        if not dist.is_initialized() or dist.get_world_size() != layout.ranks:
            raise ValueError(
                f"prepare: rank=None needs a process group of {layout.ranks} ranks in this process: pass rank, which a "
                "data-loader worker cannot find out"
            )
        return dist.get_rank()
    if whole("rank", rank, 0) >= layout.ranks:
        raise ValueError(f"rank {rank} is not one of the layout's {layout.ranks}: they count from 0")
    return rank


def _with_defaults(name: str, function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    known = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY and x.name not in GIVEN_APART}
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"prepare: {name} has no option {', '.join(unknown)}: expected {', '.join(known)}")
    return known | options
