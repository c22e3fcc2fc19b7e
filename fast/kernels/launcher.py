"""Launch kernels through a cache of compiled kernels, and cache device properties.

Triton inspects all arguments at each launch; `launch` does so once for each `specialization`.
Launches on the meta device, for plans made ahead (`meta_stands_for`), do nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import data
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:  # without Triton, plans are made and "torch" computes
    from triton.compiler import CompiledKernel

CACHE_LIMIT = 4096  # compiled kernels; a full cache is cleared

_compiled: dict[tuple, "CompiledKernel"] = {}
_compiling = threading.Lock()
_recorders = threading.local()


def launch(
    kernel: Any, ctas: int, device: torch.device, arguments: tuple, **constants: Any
) -> None:
    """Launch ``ctas`` CTAs."""
    recorder = getattr(_recorders, "current", None)
    if recorder is None:
        _launch(kernel, ctas, device, arguments, constants)
        return
    # record the launch, not the operators inside Triton's launcher
    with _disable_current_modes():
        compiled = _launch(kernel, ctas, device, arguments, constants)
    recorder.launched(kernel, compiled, ctas, arguments, constants)


def _repair(kernel: Any) -> None:
    from canon.fast.kernels.interpreter import repair  # only with Triton

    repair(kernel)


@lru_cache(maxsize=1)
def _hash_helpers_first() -> None:
    """Let Triton hash each function before the kernels that call it.

    A kernel's key in the disk cache holds the global constants of its helpers, but Triton (3.6,
    3.7) copies those of a helper before it hashes the helper and finds them. So the key would
    depend on what a process has hashed before, and other processes would compile again.
    """
    from triton.runtime.jit import DependenciesFinder

    if update := getattr(DependenciesFinder, "_update_hash", None):

        def hash_and_update(finder: Any, helper: Any) -> None:
            _ = helper.cache_key  # finds its constants
            update(finder, helper)

        DependenciesFinder._update_hash = hash_and_update


def _launch(
    kernel: Any, ctas: int, device: torch.device, arguments: tuple, constants: dict
) -> "CompiledKernel | None":
    if device.type == "meta":
        return None
    _hash_helpers_first()  # before a look-up hashes a kernel
    if device.type == "cpu":  # interpreted or simulated
        _repair(kernel)
        kernel[(ctas,)](*arguments, **constants)
        return None
    key = kernel, device.index, *map(specialization, arguments), *constants.items()
    with torch.cuda.device(device.index):
        if (compiled := _compiled.get(key)) is not None:
            compiled[ctas, 1, 1](
                *arguments, *map(constants.get, kernel.arg_names[len(arguments) :])
            )
            return compiled
        with _compiling:  # another thread may compile the same variant
            _repair(kernel)
            compiled = kernel[(ctas,)](*arguments, **constants)
    if len(_compiled) >= CACHE_LIMIT:
        _compiled.clear()
    _compiled[key] = compiled
    return compiled


def copy_back(x: Tensor, written: Tensor) -> None:
    """Copy a result that no kernel wrote in place."""
    if written is not x:
        x.copy_(written)


def tma_loadable(x: Tensor, every_axis: bool = False) -> bool:
    """Return whether TMA can load x (b, t, h, d) in place. ``every_axis``: even of length 1."""
    return x.data_ptr() % 16 == 0 and _tma_strides(
        x.shape, x.stride(), x.element_size(), every_axis
    )


@lru_cache(maxsize=4096)
def _tma_strides(
    shape: torch.Size, strides: tuple[int, ...], itemsize: int, every_axis: bool
) -> bool:
    steps = [
        stride * itemsize
        for n, stride in zip(shape[:3], strides[:3], strict=True)
        if n > 1 or every_axis
    ]
    return strides[3] == 1 and all(step % 16 == 0 and 0 < step < 2**40 for step in steps)


def is_recording() -> bool:
    """Return whether this thread's launches are recorded."""
    return getattr(_recorders, "current", None) is not None


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Within the block, call ``recorder.launched`` after each launch of this thread."""
    before = getattr(_recorders, "current", None)
    _recorders.current = recorder
    try:
        yield
    finally:
        _recorders.current = before


def specialization(argument: Any) -> Any:
    """Return what decides which compiled kernel fits an argument."""
    kind = type(argument)
    if kind is int or kind is tuple:
        return argument
    if kind is float:
        return kind  # not specialized on the value
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


class Gpu(NamedTuple):
    """The properties of a GPU that plans depend on. ``shared_memory``: bytes that a CTA may use.
    ``capability`` is (0, 0) for a GPU of AMD, which takes no kernels of Hopper.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


_gpus: dict[torch.device, Gpu] = {}
_meta_stands_for: ContextVar[Gpu | None] = ContextVar("canon_meta_stands_for", default=None)


@contextmanager
def meta_stands_for(gpu: Gpu | None) -> Iterator[None]:
    """Within the block, tensors on the meta device stand for tensors of this GPU; None is a CPU."""
    token = _meta_stands_for.set(gpu)
    try:
        yield
    finally:
        _meta_stands_for.reset(token)


def is_cpu(device: torch.device) -> bool:
    """Return whether kernels here are interpreted or simulated."""
    return device.type == "cpu" or (device.type == "meta" and _meta_stands_for.get() is None)


def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a CUDA device, or of the one that the meta device stands for. Raises
    RuntimeError in a data loader's worker.
    """
    if device.type == "meta" and (gpu := _meta_stands_for.get()) is not None:
        return gpu
    if (known := _gpus.get(device)) is not None:
        return known
    if data.get_worker_info() is not None:
        if device.index is None and len(found := set(_gpus.values())) == 1:
            return found.pop()
        raise RuntimeError(
            f"the properties of {device} are unknown in this worker: call "
            "canon.fast.kernels.launcher.gpu_of in the training process and pass its result as "
            "device, or device='cpu' without a GPU"
        )
    properties = torch.cuda.get_device_properties(device)
    # ROCm numbers its architectures alike: gfx90a has 9.0
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    gpu = Gpu(
        capability, properties.multi_processor_count, properties.shared_memory_per_block_optin
    )
    return _gpus.setdefault(device, gpu)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability."""
    return gpu_of(device).capability


def multiprocessor_count(device: torch.device) -> int:
    """Return the number of SMs."""
    return gpu_of(device).multiprocessors
