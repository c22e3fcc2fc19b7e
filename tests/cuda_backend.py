"""The CUDA backend for tests: with --gpu its kernels run on the GPU, else g++ compiles their source for the CPU."""

import struct
import threading
from contextlib import contextmanager
from unittest.mock import patch

import cuda_emulation
import torch
from sharded import DEVICE

from canon.fast import backend
from canon.fast.kernels.cuda import launch
from canon.fast.kernels.cuda.kernel import Kernel
from canon.fast.kernels.launcher import Gpu

EMULATED = Gpu((8, 0), 108, 166912)  # an A100
_emulating = threading.Lock()  # the emulation runs one grid at a time


@contextmanager
def cuda():
    """Compute with the CUDA kernels."""
    if DEVICE == "cuda":
        with backend("cuda"):
            yield
        return
    with (
        patch.object(Kernel, "_first_launch", _emulate),
        patch.object(launch, "is_cpu", lambda device: False),
        patch.object(launch, "capability", lambda device: EMULATED.capability),
        patch.object(launch, "gpu_of", lambda device: EMULATED),
        backend("cuda"),
    ):
        yield


def _emulate(kernel: Kernel, ctas: int, *arguments, variant) -> None:
    with _emulating:
        library = cuda_emulation.compiled(kernel.name, variant.macros, cuda_emulation.KERNELS)
    image = bytearray(kernel.image(arguments))
    struct.pack_into(f"<{kernel.pointers}Q", image, 0, *(x.data_ptr() for x in arguments[: kernel.pointers]))
    assert len(image) == library.params_bytes()
    with _emulating:
        fault = library.run(bytes(image), ctas, variant.shared_bytes, 0)
    assert not fault, fault.decode()


def inputs(mask, b=1, h=2, g=1, d=32, dv=32, dtype=torch.bfloat16, seed=0):
    """Return q, k, v, dout, dlse, with NaN in queries without visible keys and in keys that no query sees."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)]
    q, k, v, dout = (torch.randn(b, *shape, generator=draw).to(dtype).to(DEVICE) for shape in shapes)
    dlse = torch.randn(b, h, mask.queries, generator=draw).to(DEVICE)
    seen = mask.dense().to(DEVICE)
    for x, used in ((q, seen.any(1)), (k, seen.any(0)), (v, seen.any(0)), (dout, seen.any(1))):
        x[:, ~used] = torch.nan
    return q, k, v, dout, dlse
