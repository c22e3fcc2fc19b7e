"""Construct aggregates of Gluon on the CPU."""

import inspect
from collections.abc import Callable
from functools import cache, partialmethod
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import ConstexprFunction

from canon.simulator.memory import Shared
from canon.simulator.values import Tensor


class Aggregate:
    """A value with named fields. ``real`` is Triton's class, ``constructor`` its ``__init__``."""

    real: type
    constructor: Callable
    annotations: dict[str, type]

    def __init__(self, *arguments: Any, **named: Any):
        type(self).constructor(self, *arguments, **named)
        if missing := self.annotations.keys() - vars(self).keys():
            raise AttributeError(
                f"the constructor of {type(self).__name__} did not initialise {sorted(missing)}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.annotations:
            raise AttributeError(f"{type(self).__name__} has no field {name}")
        if isinstance(value, gl.constexpr):
            if self.annotations[name] is not gl.constexpr:
                raise TypeError(
                    f"field {name} of {type(self).__name__} is no constant, got {value}"
                )
            value = value.value
        if not _fits(value, self.annotations[name]):
            raise TypeError(
                f"field {name} of {type(self).__name__} is a {self.annotations[name].__name__}, "
                f"got {value!r}"
            )
        super().__setattr__(name, value)

    def fields(self) -> tuple:
        return tuple(getattr(self, name) for name in self.annotations)


def _fits(value: Any, kind: type) -> bool:
    if kind is gl.constexpr:
        return not isinstance(value, Tensor | Shared | Aggregate)
    if kind is gl.tensor:
        return isinstance(value, Tensor)
    if kind is gl.shared_memory_descriptor:
        return isinstance(value, Shared)
    return isinstance(value, Aggregate) and value.real is kind


def is_aggregate(value: Any) -> bool:
    """Return whether ``value`` is an aggregate of Triton."""
    return getattr(value, "__triton_aggregate__", False)


@cache
def python_class(
    real: type, as_function: Callable[[GluonJITFunction], Callable]
) -> type[Aggregate]:
    """Return a class with the constructor, fields and methods of an aggregate."""
    declared = inspect.getclosurevars(real.__new__).nonlocals["cls"]
    constructor = declared.__init__
    members: dict[str, Any] = {
        "real": real,
        "annotations": dict(declared.__annotations__),
        "constructor": staticmethod(
            constructor.fn if isinstance(constructor, ConstexprFunction) else constructor
        ),
    }
    for name, member in vars(declared).items():
        if isinstance(member, GluonJITFunction):
            members[name] = partialmethod(as_function(member))
    return type(declared.__name__, (Aggregate,), members)
