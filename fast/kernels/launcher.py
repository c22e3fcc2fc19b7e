"""Launches, and what is asked of a device before each of them: answered once.

Triton classifies all arguments of every launch anew to find the kernel that it has compiled for such ones, which is a good
part of what a launch costs the host. Here Triton is asked once for each *kind* of call; what it compiled serves the others.
A kind tells all that can matter, and more: the dtypes of tensors and whether they are aligned to 16 bytes, whole numbers as
they are, the boxes of descriptors, and every constant.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.compiler import CompiledKernel

KINDS = 4096  # at most; whoever has calls of more of them asks Triton again

_compiled: dict[tuple, CompiledKernel] = {}
_recorders = threading.local()


def launch(kernel: Any, programs: int, device: torch.device, arguments: tuple, **constants: Any) -> None:
    """Run ``programs`` of a kernel: its ``arguments`` in order, and then its ``constants`` and compiler options by name."""
    recorder = getattr(_recorders, "current", None)
    if recorder is not None:
        with _disable_current_modes():  # the recorder sees the pass, not how Triton launches
            compiled = _launched(kernel, programs, device, arguments, constants)
        recorder.launched(kernel, compiled, programs, arguments, constants)
    else:
        _launched(kernel, programs, device, arguments, constants)


def _launched(
    kernel: Any, programs: int, device: torch.device, arguments: tuple, constants: dict[str, Any]
) -> CompiledKernel | None:
    """Launch a kernel and return what was compiled for it, None on a CPU."""
    if device.type == "cpu":  # interpreted, or simulated
        kernel[(programs,)](*arguments, **constants)
        return None
    kind = kernel, device.index, *map(kind_of, arguments), *constants.items()
    with torch.cuda.device(device.index):
        if (compiled := _compiled.get(kind)) is not None:
            compiled[programs, 1, 1](*arguments, *map(constants.get, kernel.arg_names[len(arguments) :]))
            return compiled
        compiled = kernel[(programs,)](*arguments, **constants)
    if len(_compiled) >= KINDS:
        _compiled.clear()
    _compiled[kind] = compiled
    return compiled


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Within the block, call ``recorder.launched`` after each launch of this thread."""
    before = getattr(_recorders, "current", None)
    _recorders.current = recorder
    try:
        yield
    finally:
        _recorders.current = before


def kind_of(argument: Any) -> Any:
    """What of an argument decides which kernel is compiled for it."""
    kind = type(argument)
    if kind is int or kind is tuple:
        return argument
    if kind is float:
        return kind  # of any value
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@lru_cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
