"""Tile sizes: for each kernel, head width and element size, the fastest configuration that the device has room for.

``rows`` are owned by a program, ``columns`` visited: queries x keys in "forward" and "dq", keys x queries in "dkdv" and
"fused". Shared memory, at most, with e bytes an element and s stages of the pipeline:

    forward    e (rows d + s columns (d + dv))
    dq         e (rows (d + dv) + s columns (d + dv))
    dkdv       e (rows (d + dv) + s columns (d + dv)) + 8 s columns
    fused      dkdv, and e rows columns + 4 columns (d + 32) for ds and for the tile of dq on its way out

and 1 KB for barriers, and for elements of more than two bytes e rows columns for each of p and ds. Widths count padded
to a power of two. Every entry of the tables compiles without spilling registers, but for at most 32 bytes in float32 and
float64, and 20 in dq 256 wide (`canon.testing.compile` shows it, tests/test_compile.py asserts it).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from canon.fast.kernels.launcher import capability


@dataclass(frozen=True)
class Config:
    """How a kernel cuts its work: see the module's docstring."""

    rows: int
    columns: int
    warps: int = 8
    stages: int = 2
    partial_stages: int = 2  # stages of the loop over partial tiles
    tma: bool = False  # load full tiles by tensor descriptors: Hopper, and tensors that allow it
    apart: bool = False  # dk and dv one after the other, with half the accumulators: 5 products in place of 4
    partial_columns: int = 0  # of partial tiles, a divisor of columns: fewer waste less at the edges; 0 is columns


KERNELS = ("forward", "dq", "dkdv", "fused")
Table = dict[tuple[str, int], tuple[Config, ...]]  # (kernel, larger padded width, at least 64), best first

# Two bytes an element, sm_90 and later. Up to 128 wide, with descriptors, one warpgroup and small tiles are 10 to 75 % faster
# than two and large ones (paper/data/tune_triton_*_h200.json); 64 x 64 for dk and dv at 128 wide would be faster still, but
# spills 64 bytes. dq at 256 wide spills 20, and is 1.3 times as fast as what does not.
HOPPER: Table = {
    ("forward", 64): (Config(64, 128, 4, 2, tma=True, partial_columns=64), Config(128, 64, 8, 3, partial_columns=32)),
    ("forward", 128): (Config(64, 64, 4, 3, tma=True, partial_columns=32), Config(128, 64, 8, 3, partial_columns=32)),
    ("forward", 256): (Config(128, 64, 8, 2, tma=True, partial_columns=32), Config(128, 32, 8, 2)),
    ("dq", 64): (Config(64, 64, 4, 3, tma=True, partial_columns=32), Config(128, 64, 8, 3, partial_columns=32)),
    ("dq", 128): (Config(64, 64, 4, 2, tma=True, partial_columns=32), Config(128, 64, 8, 2, partial_columns=32)),
    ("dq", 256): (Config(128, 32, 8, 2, tma=True), Config(64, 32, 8, 2)),
    ("dkdv", 64): (Config(64, 64, 4, 3, tma=True, partial_columns=32), Config(128, 64, 8, 3, partial_columns=32)),
    ("dkdv", 128): (Config(64, 32, 4, 3, tma=True, partial_columns=16), Config(128, 32, 8, 3, partial_columns=16)),
    ("dkdv", 256): (Config(128, 32, 8, 2, apart=True, partial_columns=16), Config(64, 16, 8, 2, apart=True)),
    ("fused", 64): (Config(128, 64, 8, 3, tma=True, partial_columns=32), Config(128, 64, 8, 2, partial_columns=32)),
    ("fused", 128): (Config(64, 32, 8, 2, tma=True), Config(64, 32, 8, 2)),
    ("fused", 256): (Config(32, 16, 8, 2),),
}
AMPERE: Table = {  # two bytes an element, sm_80 to sm_89
    ("forward", 64): (Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("forward", 128): (Config(128, 64, 8, 3, partial_columns=32), Config(64, 64, 4, 2)),
    ("forward", 256): (Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
    ("dq", 64): (Config(128, 64, 8, 2),),
    ("dq", 128): (Config(128, 32, 8, 2), Config(64, 64, 8, 2)),
    ("dq", 256): (Config(64, 32, 8, 2), Config(32, 32, 8, 1)),
    ("dkdv", 64): (Config(128, 32, 8, 2),),
    ("dkdv", 128): (Config(64, 64, 8, 2, partial_columns=32), Config(64, 32, 8, 2)),
    ("dkdv", 256): (Config(64, 32, 8, 2, apart=True), Config(32, 16, 8, 2)),
    ("fused", 64): (Config(64, 32, 8, 2),),
    ("fused", 128): (Config(64, 32, 8, 2),),
    ("fused", 256): (Config(32, 16, 8, 2),),
}
WIDE: dict[int, dict[int, Config]] = {  # exact products of four and eight bytes: (bytes, then the larger width)
    4: {64: Config(32, 32, 8, 1, 1), 128: Config(32, 16, 8, 1, 1), 256: Config(16, 16, 8, 1, 1)},
    8: {64: Config(32, 16, 4, 1, 1), 128: Config(16, 16, 4, 1, 1), 256: Config(16, 16, 8, 1, 1)},
}
SMALLEST = Config(16, 16, 8, 1)
INTERPRETED = Config(128, 128)  # large tiles are the fast ones there: NumPy does the work

FORCED: dict[str, Config] = {}


def shared_bytes(kernel: str, config: Config, d: int, dv: int, itemsize: int) -> int:
    """Shared memory in bytes, by the formula above; d and dv padded."""
    need = 1024 + itemsize * config.stages * config.columns * (d + dv)
    need += itemsize * config.rows * (d if kernel == "forward" else d + dv)
    if kernel in ("dkdv", "fused"):
        need += 8 * config.stages * config.columns
    if itemsize > 2:
        need += itemsize * config.rows * config.columns * (2 if kernel in ("dkdv", "fused") else 1)
    if kernel == "fused":
        need += itemsize * config.rows * config.columns + max(4, itemsize) * config.columns * (d + 32)
    return need


def choose(kernel: str, d: int, dv: int, itemsize: int, device: torch.device, describable: bool) -> Config:
    """The configuration for padded widths d and dv on this device; ``describable`` if descriptors can be made.

    Raises ValueError if none fits, naming what the smallest needs and what the device has.
    """
    if kernel in FORCED:
        return FORCED[kernel]
    if device.type == "cpu":
        return INTERPRETED
    return fitting(kernel, d, dv, itemsize, shared_limit(device), describable, is_hopper(device))


@lru_cache
def fitting(kernel: str, d: int, dv: int, itemsize: int, limit: int, describable: bool, hopper: bool) -> Config:
    """The first configuration of the tables that needs at most ``limit`` bytes of shared memory; ValueError if none."""
    width = max(64, d, dv)
    narrow = HOPPER if hopper else AMPERE
    table = narrow.get((kernel, width), ()) if itemsize == 2 else filter(None, [WIDE[itemsize].get(width)])
    candidates = [c for c in (*table, SMALLEST) if describable or not c.tma]
    for config in candidates:
        if shared_bytes(kernel, config, d, dv, itemsize) <= limit:
            return config
    need = min(shared_bytes(kernel, config, d, dv, itemsize) for config in candidates)
    raise ValueError(
        f"the {kernel} kernel needs at least {need} bytes of shared memory for widths {d} and {dv} of {itemsize}-byte "
        f"elements, this device has {limit}: use a narrower dtype or canon.reference"
    )


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has TMA and wgmma, or what came after."""
    return device.type == "cuda" and capability(device) >= (9, 0)


@lru_cache
def shared_limit(device: torch.device) -> int:
    """Shared memory in bytes that one program may use: 163 KB on sm_80, 99 KB on sm_86 and sm_89, 227 KB on sm_90."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@contextmanager
def forced(**configs: Config) -> Iterator[None]:
    """Take these configurations, kernel=Config(...), whatever the device: for tests and for tuning.

    Holds for all threads. Raises ValueError for unknown kernels.
    """
    with forcing(FORCED, KERNELS, configs):
        yield


@contextmanager
def forcing(forced: dict, kernels: tuple[str, ...], configs: dict) -> Iterator[None]:
    """``forced`` with ``configs`` in it, and then as it was. Raises ValueError for names that are not of ``kernels``."""
    if unknown := set(configs) - set(kernels):
        raise ValueError(f"unknown kernels {sorted(unknown)}: expected one of {', '.join(kernels)}")
    before = dict(forced)
    forced.update(configs)
    try:
        yield
    finally:
        forced.clear()
        forced.update(before)
