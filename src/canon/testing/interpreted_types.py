"""Make the types of interpreted tensors once, and let NumPy combine tensors of equal types."""

import operator
from collections.abc import Callable

import numpy as np
from triton.language import core
from triton.runtime import interpreter

PLAIN = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
OPERATORS = COMPARISONS | {"add", "sub", "mul", "and", "or"}
OFFSETS = {int, "int32", "int64"}
# dtypes kept beside an operand
KEPT = {int: {"int32", "int64", "fp32", "fp64"}, float: {"fp32"}, "int32": {"int64"}}


def share_types() -> None:
    """Let tensors of one shape share Triton's results for it."""
    if core.block_type.__init__.__module__ == __name__:
        return
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    patch = interpreter._patch_lang_tensor
    types, shapes = {}, {}

    def init_type(self, element_ty, shape):
        key = element_ty.name, tuple([core._unwrap_if_constexpr(size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)  # raises if the shape is invalid
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def init_tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def plain(slow: Callable, operate: Callable) -> Callable:
        compares, adds = operate.__name__ in COMPARISONS, operate is operator.add

        def operated(self, other):
            other, dtype = core._unwrap_if_constexpr(other), self.dtype
            of, y, is_block = other.__class__, other, self.type is not dtype
            if of is core.tensor:
                of, y = other.dtype.name, other.handle.data
                is_block |= other.type is not other.dtype
            if dtype.__class__ is core.pointer_type:
                if not adds or of not in OFFSETS:
                    return slow(self, other)
                size = max(1, dtype.element_ty.primitive_bitwidth // 8)
                y = size * np.asarray(y, np.int64).astype(np.uint64)
            elif of != dtype.name and dtype.name not in KEPT.get(of, ()):
                return slow(self, other)
            dtype, x = core.int1 if compares else dtype, operate(self.handle.data, y)
            kind = core.block_type(dtype, [*x.shape]) if is_block else dtype
            return core.tensor(interpreter.TensorHandle(x, dtype), kind)

        return operated

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        for name in OPERATORS:
            name = f"__{name}__"
            operate = plain(getattr(tensor, name), getattr(operator, name))
            scope.set_attr(tensor, name, operate)

    core._unwrap_if_constexpr = lambda x: x if x.__class__ in PLAIN else unwrap(x)
    core.dtype.__eq__ = lambda self, other: (
        self.name == other.name if other.__class__ is core.dtype else equal(self, other)
    )
    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._patch_lang_tensor = patch_tensor
