"""The arguments of a distributed call: a key for calls that need the same checks, the checks, and the compared fields.

kinds_of           returns a key of the kinds of some tensors
kind_of_call       returns a key of all arguments
mask_and_layout    fills in the mask and the layout, and checks that they fit q and k
reduce_dtype_of    fills in the dtype in which gradients travel
tensor_fields      lists the properties of q, k, v that must be equal on all ranks
"""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.runtime.checks import DTYPES, accumulate_dtype, cached, check_mask_type


def kinds_of(*tensors: Tensor) -> Hashable:
    """Return a key of the tensors' kinds: classes, shapes, strides, dtypes, devices, alignment, need of a gradient.

    Return None for tensors without strides or without memory.
    """
    grads = torch.is_grad_enabled()
    try:
        return tuple(
            [
                (type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, grads and x.requires_grad)
                for x in tensors
            ]
        )
    except RuntimeError:  # a sparse tensor, or one inside torch.func
        return None


def kind_of_call(
    q: Tensor, k: Tensor, v: Tensor, group: Any, function: str, mask: Any, layout: Any, scale: Any,
    reduce_dtype: Any, backward: Any, options: dict[str, Any],
) -> Hashable:  # fmt: skip
    """Return a key for calls of `agreed_call` that need the same checks. Nothing is checked.

    Return None for arguments of unusual types. The group is a weak reference, so that the key does not keep it.
    """
    if (
        not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and type(backward) is str)
        or not (mask is None or type(mask) is Mask)
        or not (layout is None or type(layout) is Layout or getattr(layout, "__self__", None) is Layout)
        or type(scale) not in (type(None), float, int)
        or type(reduce_dtype) not in (type(None), torch.dtype)
        or not all(type(x) in (int, bool, str, type(None)) for x in options.values())
        or (kinds := kinds_of(q, k, v)) is None
    ):
        return None
    names = tuple([(name, type(x), x) for name, x in options.items()])
    group = None if group is None else ref(group)
    return function, group, mask, layout, scale, reduce_dtype, backward, names, kinds


def mask_and_layout(
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


def reduce_dtype_of(q: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return ``reduce_dtype``, or the accumulation dtype of q. Raise ValueError unless it is a floating dtype."""
    if reduce_dtype is None:
        return accumulate_dtype(q.dtype)
    if not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype in DTYPES):
        raise ValueError(f"reduce_dtype must be float64, float32, float16 or bfloat16, got {reduce_dtype}")
    return reduce_dtype


def tensor_fields(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, Any], ...]:
    """Return the properties of the tensors that must be equal on all ranks."""
    return (
        ("dtype", q.dtype),
        ("device", q.device.type),
        ("batch, heads and width of q", (*q.shape[:-3], *q.shape[-2:])),
        ("batch, heads and width of k", (*k.shape[:-3], *k.shape[-2:])),
        ("batch, heads and width of v", (*v.shape[:-3], *v.shape[-2:])),
        ("requires_grad of q, k, v", tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v))),
    )
