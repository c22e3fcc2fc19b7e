"""Load compiled CUDA kernels and launch them. A kernel has one parameter, a structure: addresses,
strides (int64), then numbers of four bytes."""

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import runtime

from canon.fast.kernels.cuda.program import Macros, Program
from canon.fast.kernels.launcher import capability

_loaded: dict[tuple, "LoadedKernel"] = {}
_collected: list[dict[Any, Callable[[], Any]]] = []  # of `collecting`


class Variant(NamedTuple):
    """A compiled kernel and its launch."""

    macros: Macros
    warps: int
    shared_bytes: int


@dataclass(frozen=True)
class Kernel:
    """The entry point canon_NAME of NAME.cu. ``numbers``: "i" or "f" for each, as in struct."""

    name: str
    pointers: int
    strides: int
    numbers: str
    arg_names: tuple[str, ...] = ()  # of constants: none

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "LoadedKernel | None"]:
        return partial(self._first_launch, grid[0])

    def _first_launch(self, ctas: int, *arguments: Any, variant: Variant) -> "LoadedKernel | None":
        device = arguments[0].device
        key = self, device, variant
        if (loaded := _loaded.get(key)) is None:
            program = Program(self.name, variant.macros, architecture(device))
            if _collected:
                _collected[-1].setdefault(program, program.compiled)
                return None
            loaded = _loaded[key] = LoadedKernel(self, variant, program.compiled(), device.index)
        loaded.launch(ctas, *arguments)
        return loaded

    def image(self, arguments: tuple) -> bytes:
        """Return the structure's bytes, with addresses 0."""
        fields = f"<{self.pointers}Q{self.strides}q{self.numbers}"
        size = struct.calcsize(fields)
        # or inf
        numbers = (
            ctypes.c_float(x).value if isinstance(x, float) else x
            for x in arguments[self.pointers :]
        )
        return struct.pack(f"{fields}{-size % 8}x", *[0] * self.pointers, *numbers)


class LoadedKernel:
    """A variant of a kernel, on the device of this index."""

    def __init__(self, kernel: Kernel, variant: Variant, cubin: bytes, device: int):
        self.kernel, self.variant, self.device = kernel, variant, device
        name = f"canon_{kernel.name}"
        loaded = runtime.driver.active.utils.load_binary(name, cubin, variant.shared_bytes, device)
        # Triton never unloads a module
        self._module, self.function, self.registers, self.spills, _ = loaded

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid[0])

    def launch(self, ctas: int, *arguments: Any) -> None:
        image = bytearray(self.kernel.image(arguments))
        struct.pack_into(
            f"<{self.kernel.pointers}Q",
            image,
            0,
            *map(Tensor.data_ptr, arguments[: self.kernel.pointers]),
        )
        parameter = (ctypes.c_char * len(image)).from_buffer(image)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        threads, shared = 32 * self.variant.warps, self.variant.shared_bytes
        failed = _cuda().cuLaunchKernel(
            self.function, ctas, 1, 1, threads, 1, 1, shared, stream, parameters, None
        )
        if failed:
            raise RuntimeError(
                f"CUDA driver error {failed} in the launch of canon_{self.kernel.name}"
            )

    def packed(self, blocks: int, arguments: tuple, places: list[tuple[int, int]]) -> tuple:
        """Return a launch for `replay.c`. ``places``: slot and offset of each tensor."""
        pointers = (("i", 8 * index, *place) for index, place in enumerate(places))
        parameters = (("s", self.kernel.image(arguments)), *pointers)
        return self.function, blocks, 32 * self.variant.warps, self.variant.shared_bytes, parameters


@lru_cache(maxsize=1)
def _cuda() -> ctypes.CDLL:
    library, word, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[word] * 7, pointer, pointer, pointer]
    return library


def architecture(device: torch.device) -> int:
    """Return 80 for sm_80."""
    major, minor = capability(device)
    return 10 * major + minor


@contextmanager
def collecting(jobs: dict[Any, Callable[[], Any]]) -> Iterator[None]:
    """Inside the block, add compilations to ``jobs``; launch nothing."""
    _collected.append(jobs)
    try:
        yield
    finally:
        _collected.pop()
