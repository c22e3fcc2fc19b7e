"""Launch kernels through a cache of compiled kernels, and cache device properties.

At each launch, Triton inspects all arguments to find the compiled kernel, a large part of the host time of a launch. `launch`
lets Triton do this once for each specialization key and then calls the compiled kernel directly. The key distinguishes at
least as much as Triton does: dtypes and 16-byte alignment of tensors, values of integers, block shapes of descriptors, and all
constants.
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

CACHE_LIMIT = 4096  # compiled kernels; a full cache is cleared

_compiled: dict[tuple, CompiledKernel] = {}
_compiling = threading.Lock()
_recorders = threading.local()


def launch(kernel: Any, ctas: int, device: torch.device, arguments: tuple, **constants: Any) -> None:
    """Launch ``ctas`` CTAs of a kernel with its ``arguments`` in order, and its ``constants`` and compiler options by name."""
    recorder = getattr(_recorders, "current", None)
    if recorder is None:
        _launch(kernel, ctas, device, arguments, constants)
        return
    with _disable_current_modes():  # the recorder records the launch, not the operators inside Triton's launcher
        compiled = _launch(kernel, ctas, device, arguments, constants)
    recorder.launched(kernel, compiled, ctas, arguments, constants)


def _launch(kernel: Any, ctas: int, device: torch.device, arguments: tuple, constants: dict) -> CompiledKernel | None:
    """Launch a kernel. Return the compiled kernel, or None on a CPU."""
    if device.type == "cpu":  # interpreted or simulated
        kernel[(ctas,)](*arguments, **constants)
        return None
    key = kernel, device.index, *map(specialization, arguments), *constants.items()
    with torch.cuda.device(device.index):
        if (compiled := _compiled.get(key)) is not None:
            compiled[ctas, 1, 1](*arguments, *map(constants.get, kernel.arg_names[len(arguments) :]))
            return compiled
        with _compiling:  # another thread may compile the same variant at this moment
            compiled = kernel[(ctas,)](*arguments, **constants)
    if len(_compiled) >= CACHE_LIMIT:
        _compiled.clear()
    _compiled[key] = compiled
    return compiled


def is_recording() -> bool:
    """Return whether this thread's launches are being recorded."""
    return getattr(_recorders, "current", None) is not None


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Call ``recorder.launched`` after each launch of this thread inside the block."""
    before = getattr(_recorders, "current", None)
    _recorders.current = recorder
    try:
        yield
    finally:
        _recorders.current = before


def specialization(argument: Any) -> Any:
    """Return the properties of an argument that decide which compiled kernel fits it."""
    kind = type(argument)
    if kind is int or kind is tuple:
        return argument
    if kind is float:
        return kind  # Triton does not specialize on the value
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@lru_cache
def multiprocessor_count(device: torch.device) -> int:
    """Return the number of multiprocessors (SMs) of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
