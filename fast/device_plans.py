"""Cache plans with tensors on a device, and keep their memory valid for every kernel that reads it.

    reader on            rule
    the same stream      nothing to do: the allocator reuses memory in stream order
    another stream       `Tensor.record_stream`: the allocator waits for that stream
    a captured graph     replays read the memory, so the tensors are kept for the life of the process

A new plan during the capture of a graph raises RuntimeError: the graph would replay its upload, or CUDA refuses it.
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
_captured: dict[int, Tensor] = {}  # tensors that captured graphs read, by address


def device_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a pure function to cache its results and keep them valid for later kernels of the current stream.

    A result is a tensor, a tuple of tensors, or an object with its tensors in ``held``.
    """

    @cached_plan
    @wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> R:
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
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        plan = cached(*args, **kwargs)
        keep_for_stream(*_tensors(plan))
        if (note := getattr(_observers, "current", None)) is not None:
            note(_tensors(plan))
        return plan

    return kept


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
