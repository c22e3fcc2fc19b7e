"""Plans with tensors on a device: how long their memory lives.

Kernels read work tables and indices by address, so the memory must outlive every kernel that reads it:

    the same stream     the allocator gives the memory away in stream order: nothing to do
    another stream      the allocator is told (`Tensor.record_stream`), and waits for that stream
    a captured graph    reads the memory at every replay: the tensors stay for the life of the process

`upload` copies a plan without blocking the host. Streams other than the one of the copy wait for it (`_Uploaded`).

Raises RuntimeError for a plan that is made while a graph is captured: its upload would be replayed, or refused by CUDA.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from canon.reference.plan_cache import cached_plan

P = ParamSpec("P")
R = TypeVar("R")

NEW_WHILE_CAPTURING = (
    "a CUDA graph is being captured, and this mask, layout or shape is new: make the call once before the capture"
)

_captured: dict[int, Tensor] = {}  # by address: the tensors that captured graphs read


def device_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a pure function, objects with tensors ``held`` or tuples, and keep them valid for their readers.

    Kernels that are launched on the current stream after the call may read them.
    """

    @cached_plan
    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> tuple[R, "_Uploaded | None"]:
        try:
            plan = function(*args, **kwargs)
        except RuntimeError as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(NEW_WHILE_CAPTURING) from error
            raise
        devices = {x.device for x in _tensors(plan) if x.is_cuda}
        if devices and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NEW_WHILE_CAPTURING)
        return plan, _Uploaded(devices.pop()) if devices else None

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        plan, uploaded = made(*args, **kwargs)
        if uploaded is not None:
            uploaded.wait()
            keep_for_stream(*_tensors(plan))
        return plan

    return held


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Return the array as a tensor on the device. The host does not wait for the copy, so a `device_plan` must return it.

    The source is pinned: a copy from pageable memory blocks the host until all queued kernels have run. PyTorch's allocator
    of pinned memory keeps the source until the copy is complete.
    """
    source = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return source.pin_memory().to(device, non_blocking=True)
    return source.to(device)


class _Uploaded:
    """The end of the uploads of one plan: an event on the stream that was current when the plan was made."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.event: torch.cuda.Event | None = torch.cuda.Event()
        self.event.record(self.stream)

    def wait(self) -> None:
        """Make the current stream wait for the uploads, unless they are known to be complete.

        CUDA allows neither a query nor a wait for this event during a capture. `torch.cuda.graph` synchronises the device
        before it captures, so the uploads of earlier plans are complete then.
        """
        event = self.event
        if event is None or torch.cuda.is_current_stream_capturing():
            return
        if event.query():
            self.event = None
        elif (stream := torch.cuda.current_stream(self.device)) != self.stream:
            stream.wait_event(event)


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
