"""The functions of Gluon's language that Canon's kernels call. Layouts are ignored."""

import builtins
import math
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from canon.simulator.program import Fault, Place, here
from canon.simulator.values import (
    HELD,
    Tensor,
    block,
    cast,
    fitted,
    held,
    number,
    promoted,
    tensor,
)

UNDEFINED = -1  # result of a masked integer load without `other`, where it is masked


def _addresses(address: Tensor, mask: Any, what: str) -> tuple[Any, Any]:
    at, keep = address.data, True if mask is None else tensor(mask).data
    if isinstance(keep, torch.Tensor):
        at = block(at, gl.int64)
        keep = keep.expand_as(at)
        at = at[keep]
        keep = keep if at.numel() else False
    if keep is not False:
        if taint := address.taint or (mask.taint if isinstance(mask, Tensor) else None):
            raise Fault(taint)
        low, high = map(int, at.aminmax()) if isinstance(at, torch.Tensor) else (at, at)
        if low < 0 or high >= address.memory.numel():
            end = low if low < 0 else high
            raise Fault(
                f"{what} of element {end} of {address.memory.numel()}: out of bounds, at {Place()}"
            )
    return at, keep


def _values(pointer: Tensor, value: Any, keep: Any) -> Any:
    value = tensor(value)
    if value.taint:
        raise Fault(value.taint)
    kind = pointer.dtype.element_ty
    data = (
        block(cast(value.data, value.dtype, kind), kind)
        .to(pointer.memory.dtype)
        .expand(pointer.shape)
    )
    return data[keep] if isinstance(keep, torch.Tensor) else data


def load(pointer, mask=None, other=None):
    """Masked elements are ``other``, or NaN."""
    at, keep = _addresses(pointer, mask, "load")
    kind = pointer.dtype.element_ty
    if keep is True:
        return Tensor(held(pointer.memory[at]), kind)
    rest = tensor((math.nan if kind.is_floating() else UNDEFINED) if other is None else other)
    result = block(cast(rest.data, rest.dtype, kind), kind).expand(pointer.shape).clone()
    if keep is not False:
        result[keep] = held(pointer.memory[at])
    return Tensor(result, kind, rest.taint)


def store(pointer, value, mask=None):
    """A store without unmasked elements ignores its value."""
    at, keep = _addresses(pointer, mask, "store")
    if keep is not False:
        pointer.memory[at] = _values(pointer, value, keep)


def atomic_add(pointer, val, sem=None):
    """Return the old value. Then other programs may run."""
    before = load(pointer)
    store(pointer, before + val)
    let_others()
    return before


def let_others() -> None:
    """Let other programs and partitions run."""
    here().program.let_others()
    here().program.step()


def where(condition, x, y):
    """`gl.where`."""
    c = tensor(condition)
    left, right, kind, taint = promoted(x, y)
    chosen = torch.where(block(c.data, gl.int1).bool(), block(left, kind), block(right, kind))
    return Tensor(chosen, kind, taint or c.taint)


def _extremum(floats: Callable, integers: Callable) -> Callable:
    def chosen(x, y):
        left, right, kind, taint = promoted(x, y)
        function = floats if kind.is_floating() else integers
        return Tensor(function(block(left, kind), block(right, kind)), kind, taint)

    return chosen


maximum = _extremum(torch.fmax, torch.maximum)
minimum = _extremum(torch.fmin, torch.minimum)


def _elementwise(function: Callable) -> Callable:
    def applied(x):
        x = tensor(x)
        here().program.note(function.__name__, x.numel)
        return Tensor(function(block(x.data, x.dtype)), x.dtype, x.taint)

    return applied


exp2, log2, tanh = map(_elementwise, (torch.exp2, torch.log2, torch.tanh))


def capped_weights(x, lse, limit):
    """`ptx.capped_weights`."""
    ratio = tanh(x)
    p = exp2(ratio * limit - lse)
    return p, p * (1.0 - ratio * ratio)


def abs(x):
    """`gl.abs`."""
    x = tensor(x)
    return Tensor(fitted(builtins.abs(x.data), x.dtype, "abs"), x.dtype, x.taint)


def sum(input, axis):
    """`gl.sum`."""
    total = input.data.sum(axis)
    return Tensor(fitted(total, input.dtype, "sum"), input.dtype, input.taint)


def max(input, axis):
    """`gl.max`. The hardware ignores NaN."""
    result = input.data.amax(axis)
    if input.dtype.is_floating() and bool(result.isnan().any()):
        known = input.data.nan_to_num(-math.inf, math.inf, -math.inf)
        unknown = input.data.isnan().all(axis)
        result = known.amax(axis).masked_fill(unknown, math.nan)
    return Tensor(result, input.dtype, input.taint)


def arange(start, end, layout=None):
    """`gl.arange`."""
    return Tensor(torch.arange(start, end), gl.int32)


def full(shape, value, dtype, layout=None):
    """`gl.full`."""
    value = tensor(value)
    data = cast(value.data, value.dtype, dtype)
    return Tensor(torch.full(list(shape), data, dtype=HELD[dtype.name]), dtype, value.taint)


def transpose_words(x):
    """Exchange the pairs at 8 i + 2 j and 8 j + 2 i in each 32 columns."""
    data = x.data.reshape(x.shape[0], -1, 4, 4, 2).transpose(2, 3)
    return Tensor(data.reshape(x.data.shape), x.dtype, x.taint)


def keep_between(x, left, right, hidden):
    """Return x with ``hidden`` except in columns ``left`` <= j < ``right``."""
    j = expand_dims(arange(0, x.shape[1]), 0)
    return where((j >= left) & (j < right), x, hidden)


def any_above(x, limit, warpgroup):
    """Return 1 if any x exceeds the limit."""
    above = x > limit
    return Tensor(int(above.data.any()), gl.int32, above.taint)


def dynamic_range(*bounds):
    """Yield values where Python's range yields constants."""
    for i in range(*map(number, bounds)):
        yield Tensor(i, gl.int32)


zeros = lambda shape, dtype, layout=None: full(shape, 0, dtype)
full_like = lambda input, value: full(input.shape, value, input.dtype)
zeros_like = lambda input: full_like(input, 0)
expand_dims = lambda input, axis: input.expand_dims(axis)
permute = lambda input, *dims: input.permute(*dims)
split = lambda a: tuple(Tensor(a.data[..., i], a.dtype, a.taint) for i in (0, 1))
convert_layout = lambda value, layout, assert_trivial=False: Tensor(
    value.data, value.dtype, value.taint
)
# one number per column
broadcast_rows = lambda x, like: Tensor(x.data.expand(like.shape).clone(), x.dtype, x.taint)
hint = lambda input, values=None: input
program_id = lambda axis: Tensor(here().program.indices[axis], gl.int32)
num_programs = lambda axis: Tensor(here().program.grid[axis], gl.int32)
num_warps = lambda: here().warps
