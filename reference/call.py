"""The checks before a distributed call: the arguments fit together, and all ranks make the same call.

`agreed_call` fills in the defaults, checks the arguments, and compares a digest of the call between all ranks
(`group_state`). It does so in every call. A bad argument on one rank raises on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.arguments import place_in, plain_tensor
from canon.reference.checks import (
    DTYPES,
    accumulate_dtype,
    cached,
    check_mask_type,
    check_method,
    check_tensors,
    default_scale,
)
from canon.reference.group_state import GroupState, group_state, refused_together
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan
from canon.reference.plan_arguments import Sizes, check_into, check_rows
from canon.reference.rank_invariance import check_rank_invariant, check_tiled, contiguous_tiles


@dataclass(frozen=True)
class Call:
    """One call of a distributed function with all defaults filled in. Only ``rank`` differs between ranks.

    ``fields``: (name, value) of everything that must be equal on all ranks.
    """

    function: str
    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    mask: Mask
    layout: Layout
    scale: float
    reduce_dtype: torch.dtype
    backward: str
    fields: tuple[tuple[str, Any], ...] = ()

    def local_mask(self, owner: int) -> Mask:
        """Return the mask between this rank's queries and the keys of ``owner``, in local coordinates."""
        return self.layout.local_mask(self.mask, self.rank, owner)

    @property
    def state(self) -> GroupState:
        """The state of the group. Valid for calls of more than one rank only."""
        return group_state(self.group)

    def agree(self, name: str, device: torch.device) -> None:
        """Compare this call between all ranks at the start of its pass ``name``. Raises like `GroupState.agree`."""
        self.state.agree(f"{self.function} ({name})", (("pass", name), *self.fields), wait=device.type == "cpu")


def agreed_call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    *,
    scale: float | None,
    group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype | None,
    backward: str,
    **options: Any,
) -> Call:
    """Return the call with its defaults filled in, after a comparison between all ranks. A collective.

    Args: ``layout``, a Layout, a function (tokens, ranks) -> Layout, or None for contiguous; ``options``, other
        arguments that must be equal on all ranks.
    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those
    of the others.
    """
    rank, ranks = place_in(function, group)
    with refused_together(function, group, ranks):
        check_tensors(q, k, v)
        check_method("backward", backward)
        if "rank_invariant" in options:
            check_rank_invariant(function, backward=backward, reduce_dtype=reduce_dtype, **options)
        if rank_invariant := options.get("rank_invariant", False):
            layout = contiguous_tiles if layout is None else layout
        mask, layout = _mask_and_layout(q, k, mask, layout, rank, ranks)
        if rank_invariant:
            check_tiled(function, layout)
        reduce_dtype = _reduce_dtype(q, reduce_dtype)
        scale = default_scale(q, scale)
        fields = (
            ("function", function),
            ("mask", mask),
            ("layout", layout),
            *_tensor_fields(q, k, v),
            ("scale", scale),
            ("reduce_dtype", reduce_dtype),
            ("backward", backward),
            ("options", tuple((name, type(value).__name__, value) for name, value in options.items())),
        )
        hash(fields)  # raises TypeError for an option that is a list
        call = Call(function, rank, ranks, group, mask, layout, scale, reduce_dtype, backward, fields)
    if ranks > 1:
        call.agree("forward", q.device)
    return call


def agreed_cast(
    function: str, x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, into: Tensor | None = None
) -> tuple[int, Sizes]:
    """Return this rank and the sizes of its cast, after a comparison between all ranks. A collective.

    Raises ValueError or TypeError on every rank, if the arguments of one rank do not fit together or differ from those
    of the others.
    """
    rank, ranks = place_in(function, group)
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
    return rank, sizes


def _mask_and_layout(
    q: Tensor,
    k: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    rank: int,
    ranks: int,
) -> tuple[Mask, Layout]:
    """Return the mask and the layout with their defaults. Raise unless they fit q and k on this rank."""
    if q.shape[-3] != k.shape[-3]:
        raise ValueError(f"q and k of a rank must hold the same tokens, got {q.shape[-3]} and {k.shape[-3]}")
    if mask is not None:
        check_mask_type(mask)
    if layout is not None and not isinstance(layout, Layout) and not callable(layout):
        raise TypeError(
            f"layout must be a canon.Layout or None, got {type(layout).__name__}: build one with Layout.zigzag, ..."
        )
    tokens = mask.queries if mask is not None else layout.tokens if isinstance(layout, Layout) else ranks * q.shape[-3]
    layout = layout if isinstance(layout, Layout) else cached(layout or Layout.contiguous, tokens, ranks)
    mask = cached(Mask.causal, tokens) if mask is None else mask
    if (mask.queries, mask.keys) != (layout.tokens, layout.tokens):
        raise ValueError(f"the mask is {mask.queries} x {mask.keys}, the layout has {layout.tokens} tokens")
    if layout.ranks != ranks:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {ranks}")
    if q.shape[-3] != layout.size(rank):
        raise ValueError(f"the layout gives rank {rank} {layout.size(rank)} tokens, q holds {q.shape[-3]}")
    return mask, layout


def _reduce_dtype(q: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return ``reduce_dtype``, or the accumulation dtype of q. Raise ValueError unless it is a floating dtype."""
    if reduce_dtype is None:
        return accumulate_dtype(q.dtype)
    if not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype in DTYPES):
        raise ValueError(f"reduce_dtype must be float64, float32, float16 or bfloat16, got {reduce_dtype}")
    return reduce_dtype


def _tensor_fields(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, Any], ...]:
    """Return the properties of the tensors that must be equal on all ranks."""
    return (
        ("dtype", q.dtype),
        ("device", q.device.type),
        ("batch, heads and width of q", (*q.shape[:-3], *q.shape[-2:])),
        ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
        ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
        ("requires_grad of q, k, v", tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v))),
    )
