"""Checks of arguments: a wrong type raises TypeError, a value out of range ValueError. Booleans,
floats and tensors are no whole numbers.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

LIMIT = 2**62


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as an int. With ``least``, it is below 2^62, so that two add in 64 bits."""
    expected = f"{name} must be a whole number" + ("" if least is None else f" >= {least}")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{expected}, got {shown(value)}: pass an int")
    number = int(value)
    if least is not None and not least <= number < LIMIT:
        raise ValueError(
            f"{expected}, got {number}"
            if number < least
            else f"{name} must be below 2^62, got {number}"
        )
    return number


def whole_numbers(name: str, values: Any, *, booleans: bool = False) -> list[int]:
    """Return a sequence, or a tensor or array of one axis, as ints within +-2^62."""
    if getattr(values, "ndim", 1) != 1:
        raise ValueError(
            f"{name} must have one axis, got shape {tuple(values.shape)}: pass one "
            "sequence, flattened"
        )
    entries = nested(values)
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise TypeError(
            f"{name} must be a sequence or a tensor of whole numbers, got {shown(values)}"
        )
    kinds = set(map(type, entries))
    if not kinds <= ({int, bool} if booleans else {int}):
        entries = [
            int(entry) if booleans and isinstance(entry, bool) else whole(f"{name}[{place}]", entry)
            for place, entry in enumerate(entries)
        ]
    if entries and not -LIMIT < min(entries) <= max(entries) < LIMIT:
        raise ValueError(f"{name} must lie within +-2^62, got {min(entries)} to {max(entries)}")
    return list(map(int, entries))


def flag(name: str, value: Any) -> bool:
    """Return ``value``, True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def nested(values: Any) -> Any:
    """Return tensors and arrays as nested lists."""
    return values.tolist() if hasattr(values, "tolist") else values


def list_of(name: str, values: Any, kind: type) -> list[Any]:
    """Return an iterable of ``kind`` as a list."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of {kind.__name__}s, got {shown(values)}")
    values = list(values)
    for place, value in enumerate(values):
        if not isinstance(value, kind):
            raise TypeError(f"{name}[{place}] must be a {kind.__name__}, got {shown(value)}")
    return values


def plain_tensor(name: str, x: Any, dim: Any) -> int:
    """Return ``dim`` as an int. ``x`` must be a tensor with this axis, and no DTensor."""
    if not isinstance(x, Tensor) or hasattr(x, "to_local"):  # a DTensor
        remedy = "pass x.to_local()" if isinstance(x, Tensor) else "pass torch.as_tensor(x)"
        raise TypeError(f"{name}: x must be a plain tensor, got {type(x).__name__}: {remedy}")
    dim = whole(f"{name}: dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: x of shape {tuple(x.shape)} has no dim {dim}: pass the dim of its tokens, 0 "
            "if packed"
        )
    return dim


def shown(value: Any) -> str:
    """Return a value and its type for an error, cut after 60 characters."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
