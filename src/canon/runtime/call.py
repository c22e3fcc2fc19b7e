"""The checks before a distributed call: the arguments fit together, and all ranks make the same call.

`agreed_call` fills in the defaults, checks the arguments, and compares a digest of the call between all ranks
(`group_state`). A repeated call finds its checked arguments and its digest by one key, but it is compared all the same. A
bad argument on one rank raises on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.arguments import plain_tensor
from canon.masks.cast_plan import CastPlan
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS
from canon.runtime.agreement import GroupState, group_state, refused_together
from canon.runtime.call_arguments import kind_of_call, kinds_of, mask_and_layout, reduce_dtype_of, tensor_fields
from canon.runtime.checks import check_method, check_tensors, default_scale
from canon.runtime.digests import Fields, digest_of
from canon.runtime.group import Group, place_in
from canon.runtime.plan_arguments import Sizes, check_into, check_rows
from canon.runtime.rank_invariance import check_rank_invariant, check_tiled, contiguous_tiles


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a distributed function with all defaults filled in. Only ``rank`` differs between ranks.

    Calls of one kind share one object: the same arguments, and q, k, v of the same shapes, strides, dtypes and alignment.
    So the object can be the key of everything that depends on the kind of a call.

    ``fields``: (name, value) of everything that must be equal on all ranks. ``group_reference`` is None for all ranks.
    """

    function: str
    rank: int
    ranks: int
    group_reference: Any  # weak: the cache of calls must not keep a group alive
    mask: Mask
    layout: Layout
    scale: float
    reduce_dtype: torch.dtype
    backward: str
    fields: Fields = ()

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return 1000 + self.mask.nbytes + self.layout.nbytes

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the call; None is all ranks. Raises RuntimeError if the group has ended."""
        if self.group_reference is None:
            return None
        if (group := self.group_reference()) is None:
            raise RuntimeError(
                f"{self.function}: the process group of this call has ended: keep it until the backward pass"
            )
        return group

    def local_mask(self, owner: int) -> Mask:
        """Return the mask between this rank's queries and the keys of ``owner``, in local coordinates."""
        return self.layout.local_mask(self.mask, self.rank, owner)

    @property
    def state(self) -> GroupState:
        """The state of the group. Valid for calls of more than one rank only."""
        return group_state(self.group)

    @cached_property
    def _passes(self) -> dict[str, tuple[str, Fields, int]]:
        """The name, the fields and the digest of each pass."""
        fields = {name: (("pass", name), *self.fields) for name in ("forward", "backward")}
        return {name: (f"{self.function} ({name})", some, digest_of(some)) for name, some in fields.items()}

    def agree(self, name: str, device: torch.device) -> None:
        """Compare this call between all ranks at the start of its pass ``name``. Raises like `GroupState.agree`."""
        title, fields, digest = self._passes[name]
        self.state.agree(title, fields, wait=device.type == "cpu", digest=digest)


def agreed_call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    *,
    scale: float | None,
    group: Group,
    reduce_dtype: torch.dtype | None,
    backward: str,
    pass_name: str = "forward",
    **options: Any,
) -> Call:
    """Return the call with its defaults filled in, after a comparison between all ranks. A collective.

    Args: ``layout``, a Layout, a function (tokens, ranks) -> Layout, or None for contiguous; ``pass_name``, the pass that
        starts; ``options``, other arguments that must be equal on all ranks.
    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those
    of the others.
    """
    group, rank, ranks = place_in(function, group)
    given = function, mask, layout, scale, reduce_dtype, backward
    key = kind_of_call(q, k, v, group, *given, options)
    call = None if key is None else PLANS.get((Call, key, rank, ranks))
    if call is None:
        with refused_together(function, group, ranks):
            call = _checked_call(q, k, v, group, *given, options, rank, ranks)
        if key is not None:
            PLANS.put((Call, key, rank, ranks), call)
    if ranks > 1:
        call.agree(pass_name, q.device)
    return call


def _checked_call(
    q: Tensor, k: Tensor, v: Tensor, group: Any, function: str, mask: Any, layout: Any, scale: Any,
    reduce_dtype: Any, backward: Any, options: dict[str, Any], rank: int, ranks: int,
) -> Call:  # fmt: skip
    """Check the arguments of `agreed_call` and fill in their defaults. Equal calls return one object."""
    check_tensors(q, k, v)
    check_method("backward", backward)
    if "rank_invariant" in options:
        check_rank_invariant(function, backward=backward, reduce_dtype=reduce_dtype, **options)
    rank_invariant = options.get("rank_invariant", False)
    layout = contiguous_tiles if rank_invariant and layout is None else layout
    mask, layout = mask_and_layout(q, k, mask, layout, rank, ranks)
    if rank_invariant:
        check_tiled(function, layout)
    reduce_dtype = reduce_dtype_of(q, reduce_dtype)
    scale = default_scale(q, scale)
    fields = (
        ("function", function),
        ("mask", mask),
        ("layout", layout),
        *tensor_fields(q, k, v),
        ("scale", scale),
        ("reduce_dtype", reduce_dtype),
        ("backward", backward),
        ("options", tuple((name, type(value).__name__, value) for name, value in options.items())),
    )
    hash(fields)  # raises TypeError for an option that is a list
    group = None if group is None else ref(group)
    call = Call(function, rank, ranks, group, mask, layout, scale, reduce_dtype, backward, fields)
    return PLANS.put((Call, rank, ranks, group, kinds_of(q, k, v), fields), call)


def agreed_cast(
    function: str, x: Tensor, plan: CastPlan, stage: int, group: Group, into: Tensor | None = None
) -> tuple[dist.ProcessGroup | None, int, Sizes]:
    """Return the process group, this rank and the sizes of its cast, after a comparison between all ranks. A collective.

    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those
    of the others.
    """
    group, rank, ranks = place_in(function, group)
    with refused_together(function, group, ranks):
        plain_tensor(function, x, 0)
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
            ("stages, stage", (plan.stages, stage)),
            ("dtype", x.dtype),
            ("shape of a row", tuple(x.shape[1:])),
        )
        group_state(group).agree(function, fields, wait=x.device.type == "cpu")
    return group, rank, sizes
