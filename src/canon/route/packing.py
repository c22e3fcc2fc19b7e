"""Attend with a mask for each sequence of a batch, as one packed sequence under a block-diagonal
mask: q (b, t, h, d) is read as (1, b t, h, d). On several ranks the layout of one sequence is
repeated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canon.masks.layout import TILE, Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.algorithm import Gradients
from canon.route.checks import check_gradients, check_mask, check_tensors, refuse_numbers


def attend_each(
    attend: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Sequence[Mask],
    on_tiles: bool = False,
) -> Any:
    """Return the result of ``attend(q, k, v, mask)`` with a mask for each sequence.
    ``on_tiles``: sequences that would not begin on tiles are computed one after another.
    """
    refuse_compilation()
    check_masks(q, k, v, masks)
    if not (on_tiles and masks and differ(masks) and (q.shape[1] % TILE or k.shape[1] % TILE)):
        return attend_packed(attend, q, k, v, masks)
    results = [attend(*(x[i : i + 1] for x in (q, k, v)), mask) for i, mask in enumerate(masks)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    # the largest scores
    joined = lambda parts: torch.cat(parts) if parts[0].ndim > 1 else torch.stack(parts).amax(0)
    return tuple(joined(parts) for parts in zip(*results, strict=True))


def attend_packed(attend: Callable, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask]) -> Any:
    """Return the result of `attend_each` without checks."""
    if not differ(masks):
        return attend(q, k, v, masks[0])
    b, t = q.shape[:2]
    result = attend(*map(_packed, (q, k, v)), block_diagonal(tuple(masks)))
    if isinstance(result, Tensor):
        return _unpacked(result, b, t)
    statistic = lambda x: x.squeeze(0).unflatten(1, (b, t)).transpose(0, 1)
    # by axes: out, lse, the largest scores
    unpacked = {4: lambda x: _unpacked(x, b, t), 3: statistic, 1: lambda x: x}
    return tuple(unpacked[x.ndim](x) for x in result)


def differentiate_each(
    differentiate: Callable,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Sequence[Mask],
    *,
    dlse: Tensor | None,
    delta: Tensor | None,
    **options: Any,
) -> Gradients:
    """As `attention_backward`, here ``differentiate``, with a mask for each sequence."""
    check_masks(q, k, v, masks)
    if not differ(masks):
        return differentiate(dout, q, k, v, out, lse, masks[0], dlse=dlse, delta=delta, **options)
    check_gradients(dout, q, v, out, lse, dlse, delta)
    tokens_first = map(_packed, (dout, q, k, v, out))
    dlse, delta = (None if x is None else _packed_statistic(x) for x in (dlse, delta))
    mask = block_diagonal(tuple(masks))
    grads = differentiate(
        *tokens_first, _packed_statistic(lse), mask, dlse=dlse, delta=delta, **options
    )
    b, sizes = q.shape[0], (q.shape[1], k.shape[1], k.shape[1])
    return tuple(
        None if x is None else _unpacked(x, b, size) for x, size in zip(grads, sizes, strict=True)
    )


def check_masks(q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask]) -> None:
    """Raise unless q, k and v fit together and each sequence has a fitting mask."""
    check_tensors(q, k, v)
    check_each_mask(q, k, masks, check_mask)


def check_each_mask(
    q: Tensor, k: Tensor, masks: Sequence[Mask], check: Callable[..., None]
) -> None:
    """Raise unless each sequence has a mask that passes ``check(q, k, mask, name)``."""
    refuse_numbers(masks)
    if q.ndim == 3:
        raise ValueError(
            "mask is a sequence of Masks, but q, k, v are packed (t, heads, width): pass one "
            "Mask, as Mask.concat(masks)"
        )
    if len(masks) != q.shape[0]:
        raise ValueError(
            f"mask holds {len(masks)} Masks for a batch of {q.shape[0]}: pass one for each "
            "sequence, or one Mask for all"
        )
    for place, mask in enumerate(masks):
        check(q, k, mask, f"mask[{place}]")


def refuse_compilation() -> None:
    """Raise NotImplementedError in a compiled call."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "a compiled call of attention takes one Mask: build Mask.concat(masks), and "
            "Layout.concat of the layouts, outside, and flatten batch and tokens"
        )


def differ(masks: Sequence[Mask]) -> bool:
    """Return whether the masks are not all equal, or there is none."""
    return len(set(masks)) != 1


@cached_plan
def block_diagonal(masks: tuple[Mask, ...]) -> Mask:
    """Return `Mask.concat`."""
    return Mask.concat(masks)


@cached_plan
def repeated(layout: Layout, times: int) -> Layout:
    """Return the layout of equal sequences."""
    return Layout.concat([layout] * times)


def _packed(x: Tensor) -> Tensor:
    return x.flatten(0, 1).unsqueeze(0)


def _packed_statistic(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).unsqueeze(0)


def _unpacked(x: Tensor, b: int, t: int) -> Tensor:
    return x.squeeze(0).unflatten(0, (b, t))
