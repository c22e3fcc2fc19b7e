"""Cache plans with tensors on a device, and keep their memory valid for every kernel that reads it.

    reader on            rule
    the same stream      nothing to do: the allocator reuses memory in stream order
    another stream       `Tensor.record_stream`: the allocator waits for that stream
    a captured graph     replays read the memory, so the tensors are kept as long as the graph

A new plan during a capture raises RuntimeError: the graph would replay its upload."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canon.masks import plan_cache
from canon.masks.plan_cache import are_noted, keep_for_stream

NEW_WHILE_CAPTURING = (
    "a CUDA graph is being captured, and this mask, layout or shape is new: make the call once "
    "before the capture"
)

META = torch.device("meta")

_observers = threading.local()
_pinned = threading.local()


def device_plan(host: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a pure function of positional arguments that makes a plan (an array, or a tuple with
    arrays). A call has one more argument, the device. It returns the plan with its arrays as
    tensors there, valid for later kernels of the current stream.

    Plans on the host are cached only if they are made ahead."""

    def on_host(args: tuple) -> Any:
        if are_noted():
            return plan_cache.PLANS.find((plan, args), lambda: host(*args))
        return host(*args) if (known := plan_cache.PLANS.get((plan, args))) is None else known

    def on_device(*args: Any) -> tuple[Any, "Upload | None"]:
        try:
            with pinned_arrays(torch.device(args[-1]).type == "cuda"):
                made = uploaded(on_host(args[:-1]), args[-1])
        except RuntimeError as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(NEW_WHILE_CAPTURING) from error
            raise
        devices = {x.device for x in tensors_in(made) if x.is_cuda}
        if devices and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NEW_WHILE_CAPTURING)
        return made, Upload(devices.pop()) if devices else None

    @wraps(host)
    def plan(*args: Any) -> Any:
        if args[-1] == META:
            return uploaded(on_host(args[:-1]), META)
        made, upload = plan_cache.PLANS.find((plan, args), lambda: on_device(*args))
        if upload is not None and upload.is_elsewhere():
            upload.wait()
            keep_for_stream(*tensors_in(made))
        if (note := getattr(_observers, "current", None)) is not None:
            note(tensors_in(made))
        return made

    return plan


@contextmanager
def observed(note: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Within the block, call ``note`` with the tensors of each plan that this thread looks up."""
    _observers.current = note
    try:
        yield
    finally:
        _observers.current = None


def host_array(numbers: int) -> np.ndarray:
    """Return an uninitialised int32 array for a plan, in pinned memory if it is uploaded."""
    pinned = getattr(_pinned, "on", False)
    return torch.empty(numbers, dtype=torch.int32, device="cpu", pin_memory=pinned).numpy()


@contextmanager
def pinned_arrays(on: bool) -> Iterator[None]:
    """Within the block, let `host_array` pin memory, which spares a copy."""
    _pinned.on = on
    try:
        yield
    finally:
        _pinned.on = False


def uploaded(plan: Any, device: torch.device | str) -> Any:
    """Return the plan with its arrays on the device. The host does not wait: PyTorch keeps the
    pinned source until it is copied.
    """
    if isinstance(plan, np.ndarray):
        source = torch.from_numpy(plan)
        if torch.device(device).type == "cuda" and not source.is_pinned():
            source = source.pin_memory()
        return source.to(device, non_blocking=True)
    if not isinstance(plan, tuple):
        return plan
    make = getattr(plan, "_make", tuple)  # of a named tuple
    return make(uploaded(part, device) for part in plan)


class Upload:
    """The end of a plan's uploads: an event on the stream that was current then."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.current_stream(device)
        self.handle = self.stream.cuda_stream
        self.event: torch.cuda.Event | None = torch.cuda.Event()
        self.event.record(self.stream)

    def is_elsewhere(self) -> bool:
        """Return whether kernels of the current stream must wait for the uploads, and the memory
        for them: it is another stream, or a captured one. Stream 0 is never captured.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        return stream != self.handle or bool(stream and torch._C._cuda_isCurrentStreamCapturing())

    def wait(self) -> bool:
        """Make the current stream wait for the uploads. Return False once they are complete.

        During a capture CUDA allows neither query nor wait; `torch.cuda.graph` synchronises before.
        """
        event = self.event
        if event is None or torch.cuda.is_current_stream_capturing():
            return event is not None
        if event.query():
            self.event = None
        elif (stream := torch.cuda.current_stream(self.device)) != self.stream:
            stream.wait_event(event)
        return self.event is not None


def tensors_in(plan: Any) -> list[Tensor]:
    """Return the tensors of a plan."""
    return [x for x in (plan if isinstance(plan, tuple) else (plan,)) if isinstance(x, Tensor)]
