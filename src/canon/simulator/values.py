"""Values of simulated kernels: blocks are torch tensors, scalars Python numbers, with Triton types.

Integers are stored in 64 bits. A signed overflow is a fault, except in 64-bit blocks. `//` and `%`
truncate, as in C.
"""

import ctypes
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

from canon.simulator.program import Fault, Place

INTEGERS = [f"int{bits}" for bits in (8, 16, 32, 64)]
FLOATS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MEMORY = {
    **FLOATS,
    "int1": torch.bool,
    **{name: getattr(torch, name) for name in INTEGERS},
}  # types in memory
HELD = {**FLOATS, "int1": torch.bool, **dict.fromkeys(INTEGERS, torch.int64)}  # of values

COMPARISONS = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
BITWISE = {operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift}
DIVISIONS = {operator.truediv, operator.floordiv, operator.mod}

_promotions: dict[tuple, Any] = {}


class Tensor:
    """A value. ``taint``: why it is garbage. A pointer points into ``memory``."""

    def __init__(
        self, data: Any, dtype: Any, taint: str | None = None, memory: torch.Tensor | None = None
    ):
        self.data: Any = data.item() if isinstance(data, torch.Tensor) and data.dim() == 0 else data
        self.dtype, self.taint, self.memory = dtype, taint, memory

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape) if isinstance(self.data, torch.Tensor) else []

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __bool__(self) -> bool:
        return bool(number(self))

    def __add__(self, other):
        return binary(operator.add, self, other) if self.memory is None else moved(self, other, 1)

    def __radd__(self, other):
        return binary(operator.add, other, self) if self.memory is None else moved(self, other, 1)

    def __sub__(self, other):
        return binary(operator.sub, self, other) if self.memory is None else moved(self, other, -1)

    def __neg__(self):
        return binary(operator.sub, 0, self)

    def __invert__(self):
        return binary(operator.xor, self, Tensor(True if self.dtype.is_int1() else -1, self.dtype))

    def __getitem__(self, keys):
        return Tensor(self.data[keys], self.dtype, self.taint, self.memory)

    def to(self, dtype, bitcast=False):
        if bitcast:  # a block, to a type of the same size
            stored = self.data.to(MEMORY[self.dtype.name]).contiguous()
            data = held(stored.view(MEMORY[dtype.name]))
        else:
            data = cast(self.data, self.dtype, dtype)
        return Tensor(data, dtype, self.taint)

    def expand_dims(self, axis):
        return Tensor(self.data.unsqueeze(axis), self.dtype, self.taint, self.memory)

    def reshape(self, *shape):
        return Tensor(self.data.reshape(*shape), self.dtype, self.taint, self.memory)

    def permute(self, *order):
        return Tensor(self.data.permute(*order), self.dtype, self.taint, self.memory)


def _operator(function: Callable) -> tuple[Callable, Callable]:
    return (lambda a, b: binary(function, a, b)), (lambda a, b: binary(function, b, a))


for _function in (operator.mul, *DIVISIONS, *BITWISE):
    _name = _function.__name__.rstrip("_")
    _straight, _reflected = _operator(_function)
    setattr(Tensor, f"__{_name}__", _straight)
    setattr(Tensor, f"__r{_name}__", _reflected)
for _function in COMPARISONS:
    setattr(Tensor, f"__{_function.__name__}__", _operator(_function)[0])
Tensor.__rsub__ = _operator(operator.sub)[1]


def number(x: Any) -> Any:
    """Return the Python number of a scalar. Raise Fault if it is tainted."""
    if not isinstance(x, Tensor):
        return x
    if x.taint:
        raise Fault(x.taint)
    return x.data


def tensor(x: Any) -> Tensor:
    """Return a constant in Triton's type."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return Tensor(x, gl.int1)
    if isinstance(x, int):
        return Tensor(x, gl.int32 if -(2**31) <= x < 2**31 else gl.int64)
    if isinstance(x, float):
        narrow = x == 0 or not math.isfinite(x) or 2.0**-126 <= abs(x) <= (2 - 2.0**-23) * 2.0**127
        return Tensor(ctypes.c_float(x).value, gl.float32) if narrow else Tensor(x, gl.float64)
    raise TypeError(f"{x!r} of {type(x).__name__} is no value of a kernel")


def block(data: Any, kind: Any) -> torch.Tensor:
    """Return a torch tensor."""
    return data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=HELD[kind.name])


def type_of(memory: torch.Tensor) -> Any:
    """Return the Triton type of the elements."""
    return next(gl.dtype(name) for name, dtype in MEMORY.items() if memory.dtype is dtype)


def held(data: torch.Tensor) -> torch.Tensor:
    """Convert data from memory: integers become int64."""
    return data if data.dtype.is_floating_point or data.dtype is torch.bool else data.long()


def cast(data: Any, source: Any, target: Any) -> Any:
    """Convert data from one type to another."""
    if source.name == target.name:
        return data
    is_block = isinstance(data, torch.Tensor)
    if target.is_floating():
        return data.to(MEMORY[target.name]) if is_block else rounded(float(data), target)
    if target.is_int1():
        return data != 0
    if not is_block and not math.isfinite(data):
        raise Fault(f"{data} becomes an integer, at {Place()}")
    return wrapped(data.long() if is_block else int(data), target)


def rounded(x: float, kind: Any) -> float:
    """Round a float to a type."""
    return ctypes.c_float(x).value if kind.name == "fp32" else block(x, kind).item()


def wrapped(x: Any, kind: Any) -> Any:
    """Reduce an integer to the low bits of a type."""
    if kind.primitive_bitwidth == 64 and isinstance(x, torch.Tensor):
        return x
    half = 1 << (kind.primitive_bitwidth - 1)
    return ((x & (2 * half - 1)) ^ half) - half


def fitted(x: Any, kind: Any, what: str) -> Any:
    """Return a result in its type. Raise Fault on overflow of a signed integer."""
    is_block = isinstance(x, torch.Tensor)
    if kind.is_floating():
        return x if is_block else rounded(x, kind)
    if kind.is_int1():
        return x if isinstance(x, bool) or (is_block and x.dtype is torch.bool) else (x & 1) != 0
    bits = kind.primitive_bitwidth
    if is_block:
        ends = x.aminmax() if bits < 64 and x.numel() else ()
    else:
        ends = (x,)
    for end in map(int, ends):
        if not -(1 << (bits - 1)) <= end < 1 << (bits - 1):
            raise Fault(f"{kind} overflow: {what} gives {end}, at {Place()}")
    return x


def promoted(
    a: Any, b: Any, division: bool = False, weak: bool = True
) -> tuple[Any, Any, Any, str | None]:
    """Return both operands in their common type, the type and the taint. ``weak`` constants adopt
    one."""
    x, y = tensor(a), tensor(b)
    kind = x.dtype
    if kind is not y.dtype or division:
        key = (x.dtype.name, weak and x is not a, y.dtype.name, weak and y is not b, division)
        if key not in _promotions:
            rules = (x.dtype, key[1], y.dtype, key[3], division)
            _promotions[key] = TritonSemantic.computation_type_impl(TritonSemantic(None), *rules)
        kind = _promotions[key]
    left, right = cast(x.data, x.dtype, kind), cast(y.data, y.dtype, kind)
    return left, right, kind, x.taint or y.taint


def binary(function: Callable, a: Any, b: Any) -> Any:
    """Apply an operator with Triton's types."""
    if not isinstance(a, Tensor | int | float) or not isinstance(b, Tensor | int | float):
        return NotImplemented
    left, right, kind, taint = promoted(a, b, function in DIVISIONS, function not in BITWISE)
    if function in COMPARISONS:
        return Tensor(function(left, right), gl.int1, taint)
    if function is operator.truediv:
        if kind.is_int():
            left, right = (cast(x, kind, gl.float32) for x in (left, right))
            kind = gl.float32
        result = block(left, kind) / block(right, kind)
    elif function in DIVISIONS:
        result = truncated(function, block(left, kind), block(right, kind))
    else:
        result = function(left, right)
    return Tensor(fitted(result, kind, function.__name__), kind, taint)


def truncated(function: Callable, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return integer quotients or remainders as in C."""
    if not right.all():
        raise Fault(f"{function.__name__} by zero, at {Place()}")
    return (
        torch.fmod(left, right)
        if function is operator.mod
        else torch.div(left, right, rounding_mode="trunc")
    )


def pointer(memory: torch.Tensor) -> Tensor:
    """Return a pointer to a tensor."""
    whole = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage())
    return Tensor(memory.storage_offset(), gl.pointer_type(type_of(memory)), None, whole)


def moved(address: Tensor, offset: Any, sign: int) -> Tensor:
    """Return an address moved by ``sign * offset`` elements."""
    if not isinstance(offset, Tensor | int):
        return NotImplemented
    other = tensor(offset)
    return Tensor(
        address.data + sign * other.data,
        address.dtype,
        address.taint or other.taint,
        address.memory,
    )
