"""The CUDA backend for tests: with --gpu its kernels run on the GPU, else g++ compiles their source for the CPU."""

import struct
import threading
from contextlib import contextmanager
from functools import partial, partialmethod
from unittest.mock import patch

import cuda_emulation
import hopper
from sharded import DEVICE

from canon.fast import backend
from canon.fast.kernels.cuda import launch
from canon.fast.kernels.cuda.kernel import Kernel
from canon.fast.kernels.launcher import Gpu

EMULATED = Gpu((8, 0), 108, 166912)  # an A100
inputs = partial(hopper.inputs, d=32, dv=32)  # the emulation is slow
_emulating = threading.Lock()  # the emulation runs one grid at a time


@contextmanager
def cuda():
    """Compute with the CUDA kernels."""
    with backend("cuda") if DEVICE == "cuda" else emulated():
        yield


@contextmanager
def emulated(gpu=EMULATED, choose=launch.choose, sources=cuda_emulation.KERNELS, backwards=False):
    """Compute with the CUDA kernels of a folder, on a CPU. ``backwards``: the last warps of a CTA run ahead of the first."""
    run = partialmethod(_emulate, sources=sources, backwards=backwards)
    with (
        patch.object(Kernel, "_first_launch", run),
        patch.object(launch, "is_cpu", lambda device: False),
        patch.object(launch, "capability", lambda device: gpu.capability),
        patch.object(launch, "gpu_of", lambda device: gpu),
        patch.object(launch, "choose", choose),
        backend("cuda"),
    ):
        yield


def _emulate(kernel: Kernel, ctas: int, *arguments, variant, sources, backwards) -> None:
    with _emulating:
        library = cuda_emulation.compiled(kernel.name, variant.macros, sources)
    image = bytearray(kernel.image(arguments))
    struct.pack_into(f"<{kernel.pointers}Q", image, 0, *(x.data_ptr() for x in arguments[: kernel.pointers]))
    assert len(image) == library.params_bytes()
    with _emulating:
        fault = library.run(bytes(image), ctas, variant.shared_bytes, int(backwards))
    if fault:
        raise RuntimeError(f"{kernel.name}: {fault.decode()}")
