"""Run the CUDA kernels on a CPU: g++ compiles the .cu files with cuda_emulation.h, and each CTA runs as fibers."""

import ctypes
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from canon.fast.kernels.cuda.config import Config
from canon.fast.tiles import work_table
from canon.reference import Mask

KERNELS = Path(__file__).parents[1] / "fast" / "kernels" / "cuda"
HEADER = Path(__file__).with_suffix(".h")
LOG2_E = 1.4426950408889634
PARAMS = {"forward": "ForwardParams", "dq": "DqParams", "dkdv": "DkdvParams"}
LAUNCH = """
extern "C" void run(const {params}* p, int ctas, int shared_bytes, int backwards) {{
    launch([&] {{ canon_{kernel}(*p); }}, ctas, THREADS, shared_bytes, backwards);
}}
extern "C" int params_bytes() {{ return sizeof({params}); }}
"""


@cache
def compiled(kernel: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Return the library of one variant of a kernel."""
    folder = Path(mkdtemp())
    source = folder / f"{kernel}.cpp"
    source.write_text(f'#include "{KERNELS / kernel}.cu"\n' + LAUNCH.format(kernel=kernel, params=PARAMS[kernel]))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused"]
    defined = [f"-D{name}={value}" for name, value in macros]
    library = folder / f"{kernel}.so"
    command = ["g++", *flags, *defined, "-include", str(HEADER), str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def run(kernel: str, config: Config, tensors, macros: dict, numbers: tuple, ctas: int, backwards: bool) -> None:
    """Pack the arguments as the contract of params.cuh says, and run the grid. ``numbers``: the 4-byte fields."""
    library = compiled(kernel, tuple(sorted((config.macros() | macros).items())))
    words = [x.data_ptr() for x in tensors]
    strides = [stride for x in tensors if x.ndim == 4 for stride in x.stride()[:3]]
    statistic = next(x for x in tensors if x.ndim == 3)
    strides += statistic.stride()[:2]
    code = "".join("f" if isinstance(number, float) else "i" for number in numbers)
    packed = struct.pack(f"{len(words) + len(strides)}q{code}0q", *words, *strides, *numbers)
    assert len(packed) == library.params_bytes()
    library.run(packed, ctas, config.shared_bytes, backwards)


def constants(q: Tensor, v: Tensor, result: Tensor) -> dict:
    """Return the macros that depend on the tensors."""
    return {
        "CANON_D": q.shape[-1],
        "CANON_DV": v.shape[-1],
        "CANON_BF16": int(q.dtype == torch.bfloat16),
        "CANON_OUT_FLOAT": int(result.dtype == torch.float32),
    }


def table_of(mask: Mask, config: Config, transposed: bool = False):
    """Return the work table of a mask for a configuration."""
    return work_table(mask, config.rows, config.columns, config.partial_columns, transposed)


def forward(q, k, v, mask, scale, config, out, lse, l2_heads=1, backwards=False) -> None:
    """Write out (b, t, h, dv) and lse (b, h, t)."""
    table, heads = table_of(mask, config), q.shape[2]
    sign = (scale > 0) - (scale < 0)
    numbers = (float(abs(scale) * LOG2_E), sign, len(table), heads, heads // k.shape[2], l2_heads)
    tensors = (q, k, v, out, lse, table.tiles, table.spans)
    run("forward", config, tensors, constants(q, v, out), numbers, len(table) * q.shape[0] * heads, backwards)


def dq(q, k, v, dout, lse, delta, mask, scale, config, result, l2_heads=1, backwards=False) -> None:
    """Write dq (b, t, h, d)."""
    table, heads = table_of(mask, config), q.shape[2]
    numbers = (float(scale), len(table), heads, heads // k.shape[2], l2_heads)
    tensors = (q, k, v, dout, lse, delta, result, table.tiles, table.spans)
    run("dq", config, tensors, constants(q, v, result), numbers, len(table) * q.shape[0] * heads, backwards)


def dkdv(q, k, v, dout, lse, delta, mask, scale, config, dk, dv, l2_heads=1, backwards=False) -> None:
    """Write dk (b, s, o, d) and dv (b, s, o, dv) of o owners."""
    table, owners = table_of(mask, config, transposed=True), dk.shape[2]
    heads = q.shape[2]
    numbers = (float(scale), len(table), owners, heads // owners, heads // k.shape[2], l2_heads)
    tensors = (q, k, v, dout, lse, delta, dk, dv, table.tiles, table.spans)
    run("dkdv", config, tensors, constants(q, v, dk), numbers, len(table) * q.shape[0] * owners, backwards)
