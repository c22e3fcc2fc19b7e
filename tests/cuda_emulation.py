"""Run the CUDA kernels on a CPU: g++ compiles the .cu files with cuda_emulation.h, and each CTA runs as fibers."""

import ctypes
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from canon.fast.kernels.cuda.config import Config, choose, shared_bytes
from canon.fast.kernels.launcher import Gpu
from canon.fast.kernels.work_tables import work_table
from canon.reference import Mask
from canon.testing.judge import Attended

KERNELS = Path(__file__).parents[1] / "fast" / "kernels" / "cuda"
HEADER = Path(__file__).with_suffix(".h")
LOG2_E = 1.4426950408889634
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


@dataclass
class Emulation:
    """Attention by the CUDA kernels on a CPU.

    Args:
        configs: by kernel. Their shared memory is computed.
        backwards: the last warps of a CTA run ahead of the first ones.
        empty: makes the tensors of results, from a shape and a dtype.
        owners: number of owners of dk and dv; 0 is one for each key head.
    """

    configs: Mapping[str, Config]
    backwards: bool = False
    l2_heads: int = 1
    result: torch.dtype | None = None
    empty: Callable[..., Tensor] = torch.empty
    owners: int = 0
    sources: Path = KERNELS

    def attend(self, q, k, v, dout, mask: Mask, scale: float, dlse: Tensor) -> Attended:
        """Return the results of the three kernels. delta is computed with PyTorch."""
        (b, t, h, d), (_, s, g, dv) = q.shape, v.shape
        owners, seen = self.owners or g, mask.dense()
        out, dq, dk, dv_ = map(self.new(q), ((b, t, h, dv), (b, t, h, d), (b, s, owners, d), (b, s, owners, dv)))
        lse = torch.full((b, h, t), torch.nan)
        sign = (scale > 0) - (scale < 0)
        heads = h, h // g, self.l2_heads
        self.run("forward", mask, (q, k, v, out, lse), (float(abs(scale or 1.0) * LOG2_E), sign), heads)
        delta = (out.float() * dout.float()).sum(-1).transpose(1, 2) - dlse
        delta = delta.masked_fill(~seen.any(1), 0.0).contiguous()
        self.run("dq", mask, (q, k, v, dout, lse, delta, dq), (float(scale),), heads)
        heads = owners, h // owners, h // g, gcd(b * owners, self.l2_heads)
        self.run("dkdv", mask, (q, k, v, dout, lse, delta, dk, dv_), (float(scale),), heads)
        if owners != g:
            dk, dv_ = (x.unflatten(2, (g, owners // g)).sum(3) for x in (dk, dv_))
        return Attended(out, lse, dq, dk, dv_)

    def new(self, q: Tensor) -> Callable[[tuple[int, ...]], Tensor]:
        """Return a function that makes a tensor of NaNs for a result."""
        return lambda shape: self.empty(shape, dtype=self.result or q.dtype).fill_(torch.nan)

    def run(self, kernel: str, mask: Mask, tensors: tuple[Tensor, ...], first: tuple, heads: tuple) -> None:
        """Pack the arguments in the order of params.cuh, and run the grid. ``first``: the numbers before the tile count."""
        q, v = tensors[0], tensors[2]
        config = self.configs[kernel]
        config = replace(config, shared_bytes=shared_bytes(kernel, config, q.shape[-1], v.shape[-1]))
        table = work_table(mask, config.rows, config.columns, config.columns, kernel == "dkdv", "cpu")
        macros = config.macros() | {
            "CANON_D": q.shape[-1],
            "CANON_DV": v.shape[-1],
            "CANON_BF16": int(q.dtype == torch.bfloat16),
            "CANON_OUT_FLOAT": int(tensors[-1 if kernel != "forward" else 3].dtype == torch.float32),
        }
        library = compiled(kernel, tuple(sorted(macros.items())), self.sources)
        numbers = (*first, len(table.tiles), *heads)
        strides = [stride for x in tensors if x.ndim == 4 for stride in x.stride()[:3]]
        strides += next(x for x in tensors if x.ndim == 3).stride()[:2]
        words = [*(x.data_ptr() for x in (*tensors, table.tiles, table.spans)), *strides]
        packed = struct.pack(f"{len(words)}qf{len(numbers) - 1}i0q", *words, *numbers)
        assert len(packed) == library.params_bytes()
        fault = library.run(packed, len(table.tiles) * q.shape[0] * heads[0], config.shared_bytes, int(self.backwards))
        if fault:
            raise RuntimeError(f"{kernel}: {fault.decode()}")


def chosen(d: int, dv: int, shared_memory: int) -> dict[str, Config]:
    """Return the configurations for these widths on a GPU with this shared memory."""
    gpu = Gpu((8, 0), 108, shared_memory)
    return {kernel: choose(kernel, d, dv, gpu) for kernel in PARAMS}
