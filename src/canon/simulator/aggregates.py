"""Construct aggregates of Gluon on the CPU."""

import inspect
from collections.abc import Callable
from functools import cache, partialmethod
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import ConstexprFunction


class _Aggregate:
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.value if isinstance(value, gl.constexpr) else value)


def is_aggregate(value: Any) -> bool:
    """Return whether a value is an aggregate of Triton."""
    return getattr(value, "__triton_aggregate__", False)


@cache
def python_class(
    real: type, as_function: Callable[[GluonJITFunction], Callable]
) -> type[_Aggregate]:
    """Return a class with the constructor and methods of an aggregate."""
    declared = inspect.getclosurevars(real.__new__).nonlocals["cls"]
    constructor = declared.__init__
    if isinstance(constructor, ConstexprFunction):
        constructor = constructor.fn
    members: dict[str, Any] = {"__init__": constructor}
    for name, member in vars(declared).items():
        if isinstance(member, GluonJITFunction):
            members[name] = partialmethod(as_function(member))
    return type(declared.__name__, (_Aggregate,), members)
