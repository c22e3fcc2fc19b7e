"""Run the CUDA kernels on a CPU: g++ compiles the .cu files with cuda_emulation.h, and each CTA runs as fibers."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

KERNELS = Path(__file__).parents[1] / "fast" / "kernels" / "cuda"
HEADER = Path(__file__).with_suffix(".h")
PARAMS = {"forward": "ForwardParams", "dq": "DqParams", "dkdv": "DkdvParams"}
LAUNCH = """
extern "C" const char* run(const {params}* p, int ctas, int shared_bytes, int backwards) {{
    return launch([](const void* p) {{ canon_{kernel}(*(const {params}*)p); }}, p, ctas, THREADS, shared_bytes, backwards);
}}
extern "C" int params_bytes() {{ return sizeof({params}); }}
"""
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused"]


def build(source: Path, *flags: str) -> Path:
    """Compile a C++ file to a library in a new folder."""
    library = Path(mkdtemp()) / f"{source.stem}.so"
    done = subprocess.run(["g++", *FLAGS, *flags, str(source), "-o", str(library)], capture_output=True, text=True)
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
    source.write_text(f'#include "{sources / kernel}.cu"\n' + LAUNCH.format(kernel=kernel, params=PARAMS[kernel]))
    defined = [f"-D{name}={value}" for name, value in macros]
    linked = ["-Wl,--no-as-needed", str(runtime())]
    library = ctypes.CDLL(str(build(source, *defined, "-include", str(HEADER), *linked)))
    library.run.restype = ctypes.c_char_p
    return library
