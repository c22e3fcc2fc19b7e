"""Compile every CUDA kernel without a GPU, and report registers, spills, shared memory and CTAs of
an SM.

python notebooks/cuda_resources.py --arch 80 86 89 90 [--json]
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from canon.fast.kernels.cuda import config, launch
from canon.fast.kernels.cuda.program import Program
from canon.fast.kernels.launcher import Gpu
from canon.testing.compile import SHARED_LIMIT

WIDTHS = (64, 64), (128, 128), (256, 256), (192, 128)
REGISTERS = 65536  # of an SM; a warp takes them in units of 256
SHARED_MEMORY = {
    80: 167936,
    86: 102400,
    89: 102400,
    90: 233472,
}  # bytes of an SM; each CTA takes 1024 more than it uses
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048}


class Resources(NamedTuple):
    """Registers and spilled bytes (stores and loads) of a thread, and bytes of static shared
    memory.
    """

    registers: int
    spilled: int
    shared: int


def resources(messages: str) -> Resources:
    """Return the resources of a program's one kernel, from the messages of `Program.compile`."""
    numbers: Callable[[str], list[int]] = lambda pattern: [
        int(found) for found in re.findall(pattern, messages)
    ]
    registers = numbers(r"Used (\d+) registers")
    spilled = numbers(
        r"(\d+) bytes spill "
        r"(?:stores|loads)"
    )
    if len(registers) != 1:
        raise ValueError(f"expected the messages of one kernel, got {len(registers)}: {messages}")
    return Resources(registers[0], sum(spilled), sum(numbers(r"(\d+) bytes smem")))


@dataclass(frozen=True)
class Compiled:
    """A kernel of one architecture, dtype and pair of widths."""

    kernel: str
    arch: int
    dtype: str
    d: int
    dv: int
    rows: int
    columns: int
    warps: int
    registers: int
    spilled: int  # bytes, stores and loads
    shared: int  # bytes
    ctas: int  # that an SM holds

    def __str__(self) -> str:
        text = (
            f"sm_{self.arch} {self.kernel:8s} {self.dtype:9s} {self.d:3d}/{self.dv:<3d} "
            f"{self.rows:3d}x{self.columns:<3d} "
        )
        text += (
            f"{self.warps} warps {self.registers:3d} registers {self.spilled:4d} B spilled "
            f"{self.shared / 1024:6.1f} KB "
        )
        return text + f"shared {self.ctas} CTAs of an SM"


def main_cases(arch: int) -> Iterator[tuple[str, int, torch.dtype, int, int]]:
    """Yield (kernel, arch, dtype, d, dv) of the main configurations."""
    for kernel in config.TABLE:
        for d, dv in WIDTHS:
            yield kernel, arch, torch.bfloat16, d, dv
        yield kernel, arch, torch.float16, 128, 128


def compile_case(kernel: str, arch: int, dtype: torch.dtype, d: int, dv: int) -> Compiled:
    """Compile a kernel with its configuration for the architecture. Raises RuntimeError if it does
    not compile.
    """
    chosen = config.choose(kernel, d, dv, gpu(arch))
    q, v = (torch.empty(1, 1, 1, width, dtype=dtype) for width in (d, dv))
    variant = launch.variant_of(chosen, q, v, dtype)
    found = resources(Program(kernel, variant.macros, arch).compile()[1])
    shared = chosen.shared_bytes + found.shared
    held = ctas(arch, chosen.warps, found.registers, shared)
    sizes = chosen.rows, chosen.columns, chosen.warps
    return Compiled(
        kernel, arch, str(dtype)[6:], d, dv, *sizes, found.registers, found.spilled, shared, held
    )


def ctas(arch: int, warps: int, registers: int, shared: int) -> int:
    """Return how many CTAs an SM holds, by registers, shared memory and threads."""
    of_warp = -(-32 * registers // 256) * 256
    return min(
        REGISTERS // (warps * of_warp),
        SHARED_MEMORY[arch] // (shared + 1024),
        THREADS[arch] // (32 * warps),
    )


def compile_all(arch: int, threads: int = 2) -> list[Compiled]:
    """Compile the main cases of an architecture. Raises ValueError if it has too little shared
    memory for one of them.
    """
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda case: compile_case(*case), main_cases(arch)))


def gpu(arch: int) -> Gpu:
    """Return a GPU of the architecture, for the choice of configurations."""
    return Gpu(divmod(arch, 10), 1, SHARED_LIMIT[arch])


def main() -> None:
    """Compile the main cases and print a line for each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[80, 86, 89, 90], choices=SHARED_LIMIT
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each kernel")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        for compiled in compile_all(arch):
            print(json.dumps(asdict(compiled)) if arguments.json else compiled, flush=True)


if __name__ == "__main__":
    main()
