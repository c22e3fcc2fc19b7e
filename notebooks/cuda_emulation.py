"""Run the CUDA kernels on a CPU: g++ compiles the .cu files with cuda_emulation.h, and each CTA
runs as fibers.

with cuda_emulation.emulated():
    fast.attention(q, k, v)
"""

import ctypes
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from canon.fast import backend
from canon.fast.kernels.cuda import launch
from canon.fast.kernels.cuda.kernel import Kernel
from canon.fast.kernels.cuda.program import FOLDER as KERNELS
from canon.fast.kernels.launcher import Gpu

A100 = Gpu((8, 0), 108, 166912)
HEADER = Path(__file__).with_suffix(".h")
PARAMS = {"forward": "ForwardParams", "dq": "DqParams", "dkdv": "DkdvParams"}
LAUNCH = """
extern "C" const char* run(const {params}* p, int ctas, int shared_bytes, int backwards) {{
    return launch([](const void* p) {{ canon_{kernel}(*(const {params}*)p); }}, p, ctas, THREADS,
    shared_bytes, backwards);
}}
extern "C" int params_bytes() {{ return sizeof({params}); }}
"""
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused"]


def build(source: Path, *flags: str) -> Path:
    """Compile a C++ file to a library in a new folder."""
    library = Path(mkdtemp()) / f"{source.stem}.so"
    done = subprocess.run(
        ["g++", *FLAGS, *flags, str(source), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return library


@cache
def runtime() -> Path:
    """Return the library that runs threads as fibers."""
    return build(HEADER.with_suffix(".cpp"))


@cache
def compiled(kernel: str, macros: tuple[tuple[str, int], ...], sources: Path) -> ctypes.CDLL:
    """Return the library of one variant of a kernel, compiled from the folder ``sources``."""
    source = Path(mkdtemp()) / f"{kernel}.cpp"
    source.write_text(
        (f'#include "{sources / kernel}.cu"\n')
        + LAUNCH.format(kernel=kernel, params=PARAMS[kernel])
    )
    defined = [f"-D{name}={value}" for name, value in macros]
    linked = ["-Wl,--no-as-needed", str(runtime())]
    library = ctypes.CDLL(str(build(source, *defined, "-include", str(HEADER), *linked)))
    library.run.restype = ctypes.c_char_p
    return library


_emulating = threading.Lock()  # the emulation runs one grid at a time


@contextmanager
def emulated(
    gpu: Gpu = A100,
    choose: Callable[..., Any] = launch.choose,
    sources: Path = KERNELS,
    backwards: bool = False,
) -> Iterator[None]:
    """Compute with the CUDA kernels of a folder. ``backwards``: the last warps of a CTA run ahead
    of the first.
    """
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


def _emulate(
    kernel: Kernel, ctas: int, *arguments: Any, variant: Any, sources: Path, backwards: bool
) -> None:
    with _emulating:
        library = compiled(kernel.name, variant.macros, sources)
    image = bytearray(kernel.image(arguments))
    struct.pack_into(
        f"<{kernel.pointers}Q", image, 0, *(x.data_ptr() for x in arguments[: kernel.pointers])
    )
    assert len(image) == library.params_bytes()
    with _emulating:
        fault = library.run(bytes(image), ctas, variant.shared_bytes, int(backwards))
    if fault:
        raise RuntimeError(f"{kernel.name}: {fault.decode()}")
