"""Cache plans with tensors on a device, and keep their memory valid for every kernel that reads it.

    reader on            rule
    the same stream      nothing to do: the allocator reuses memory in stream order
    another stream       `Tensor.record_stream`: the allocator waits for that stream
    a captured graph     replays read the memory, so the tensors are kept as long as the graph

A new plan during a capture raises RuntimeError: the graph would replay its upload, or CUDA refuses it. Another process can
make a `host_part` ahead (`canon.fast.preparation`), with tensors on the meta device.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from canon.masks import plan_cache
from canon.masks.plan_cache import are_noted, cached_plan, keep_for_stream

P = ParamSpec("P")
R = TypeVar("R")

NEW_WHILE_CAPTURING = (
    "a CUDA graph is being captured, and this mask, layout or shape is new: make the call once before the capture"
)

META = torch.device("meta")

_observers = threading.local()


def device_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a pure function, and keep them valid for later kernels of the current stream.

    A result is a tensor, a tuple of tensors, or an object with its tensors in ``held``.
    """

    @cached_plan
    @wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> tuple[R, "Upload | None"]:
        try:
            plan = function(*args, **kwargs)
        except RuntimeError as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(NEW_WHILE_CAPTURING) from error
            raise
        devices = {x.device for x in _tensors(plan) if x.is_cuda}
        if devices and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NEW_WHILE_CAPTURING)
        return plan, Upload(devices.pop()) if devices else None

    @wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        if META in args:
            return function(*args, **kwargs)
        plan, uploaded = cached(*args, **kwargs)
        if uploaded is not None:
            uploaded.wait()
            keep_for_stream(*_tensors(plan))
        if (note := getattr(_observers, "current", None)) is not None:
            note(_tensors(plan), uploaded)
        return plan

    return kept


def host_part(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a pure function of positional arguments that makes the host part of device plans.

    Results are cached only if made ahead: otherwise the uploaded plan is.
    """

    @wraps(function)
    def part(*args: P.args, **kwargs: P.kwargs) -> R:
        key = part, args
        if are_noted():
            return plan_cache.PLANS.find(key, lambda: function(*args))
        return function(*args) if (known := plan_cache.PLANS.get(key)) is None else known

    return part


@contextmanager
def observed(note: Callable[[list[Tensor], "Upload | None"], None]) -> Iterator[None]:
    """Within the block, call ``note`` with tensors and upload of each plan that this thread looks up."""
    _observers.current = note
    try:
        yield
    finally:
        _observers.current = None


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Return the array as a tensor on the device, for a `device_plan`: the host does not wait for the copy.

    A copy from pageable memory would block the host until all queued kernels have run. PyTorch keeps the pinned source until
    the copy is complete.
    """
    source = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return source.pin_memory().to(device, non_blocking=True)
    return source.to(device)


class Upload:
    """The end of a plan's uploads: an event on the stream that was current then."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.event: torch.cuda.Event | None = torch.cuda.Event()
        self.event.record(self.stream)

    def wait(self) -> bool:
        """Make the current stream wait for the uploads. Return False once they are known to be complete.

        During a capture CUDA allows neither query nor wait; `torch.cuda.graph` synchronises the device before it captures.
        """
        event = self.event
        if event is None or torch.cuda.is_current_stream_capturing():
            return event is not None
        if event.query():
            self.event = None
        elif (stream := torch.cuda.current_stream(self.device)) != self.stream:
            stream.wait_event(event)
        return self.event is not None


def _tensors(plan: Any) -> list[Tensor]:
    parts = plan if isinstance(plan, tuple) else getattr(plan, "held", (plan,))
    return [x for x in parts if isinstance(x, Tensor)]
