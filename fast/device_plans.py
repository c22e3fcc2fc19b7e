"""Plans with tensors on a device: how long their memory lives.

Kernels read work tables and indices by address, so the memory must outlive every kernel that reads it:

    the same stream     the allocator gives the memory away in stream order: nothing to do
    another stream      the allocator is told (`Tensor.record_stream`), and waits for that stream
    a captured graph    reads the memory at every replay: the tensors stay for the life of the process

Raises RuntimeError for a plan that is made while a graph is captured: its upload would be replayed, or refused by CUDA.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from canon.reference.plan_cache import cached_plan

P = ParamSpec("P")
R = TypeVar("R")

NEW_WHILE_CAPTURING = (
    "a CUDA graph is being captured, and this mask, layout or shape is new: make the call once before the capture"
)

_observers = threading.local()
_captured: dict[int, Tensor] = {}  # by address: the tensors that captured graphs read


def device_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a pure function, objects with tensors ``held`` or tuples, and keep them valid for their readers.

    Kernels that are launched on the current stream after the call may read them.
    """

    @cached_plan
    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            plan = function(*args, **kwargs)
        except RuntimeError as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(NEW_WHILE_CAPTURING) from error
            raise
        if any(x.is_cuda for x in _tensors(plan)) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NEW_WHILE_CAPTURING)
        return plan

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        plan = made(*args, **kwargs)
        keep_for_stream(*_tensors(plan))
        if (note := getattr(_observers, "current", None)) is not None:
            note(_tensors(plan))
        return plan

    return held


@contextmanager
def observed(note: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Within the block, call ``note`` with the tensors of each plan that this thread looks up."""
    _observers.current = note
    try:
        yield
    finally:
        _observers.current = None


def keep_for_stream(*tensors: Tensor) -> None:
    """Keep tensors valid for later kernels of the current stream."""
    for x in tensors:
        if not x.is_cuda:
            continue
        if torch.cuda.is_current_stream_capturing():
            _captured[x.data_ptr()] = x
        else:
            x.record_stream(torch.cuda.current_stream(x.device))


def _tensors(plan: Any) -> list[Tensor]:
    parts = plan if isinstance(plan, tuple) else getattr(plan, "held", (plan,))
    return [x for x in parts if isinstance(x, Tensor)]
