"""Tile sizes: for each kernel, head width and element size, the fastest configuration that the device has room for.

``rows`` are owned by a program, ``columns`` visited: queries x keys in "forward" and "dq", keys x queries in "dkdv" and
"fused". Shared memory, with e bytes an element and s stages (s - 1 tiles in flight on Ampere, s on Hopper, where
products read their operands from shared memory):

    forward    e (rows d + s columns (d + dv))
    dq         e (rows (d + dv) + s columns (d + dv))
    dkdv       e (rows (d + dv) + s columns (d + dv)) + 8 s columns
    fused      dkdv, and 4 rows columns + 4 columns d for ds and for the tile of dq on its way out

Widths count padded to a power of two. More than these tiles hold spills registers (255 a thread).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Config:
    """Rows and columns of a tile, warps of a program, and stages of the pipeline that loads columns."""

    rows: int
    columns: int
    warps: int = 8
    stages: int = 2
    partial_stages: int = 2  # of the loop over partial tiles; 1 saves registers
    tma: bool = False  # load columns by tensor descriptors where they can be had: Hopper, aligned, contiguous heads


SMALL = (Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(16, 16, 4, 1))
CONFIGS: dict[tuple[str, int, int], tuple[Config, ...]] = {  # (kernel, largest padded width, element bytes)
    ("forward", 64, 2): (Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("forward", 128, 2): (Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("forward", 256, 2): (Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
    ("dq", 64, 2): (Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("dq", 128, 2): (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
    ("dq", 256, 2): (Config(64, 64, 8, 1), Config(64, 32, 8, 1)),
    ("dkdv", 64, 2): (Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    ("dkdv", 128, 2): (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
    ("dkdv", 256, 2): (Config(64, 32, 8, 1),),
    ("fused", 64, 2): (Config(128, 64, 8, 2), Config(64, 64, 8, 2)),
    ("fused", 128, 2): (Config(64, 64, 8, 2), Config(64, 32, 8, 1)),
    ("fused", 256, 2): (Config(64, 32, 8, 1),),
}
INTERPRETED = Config(128, 128)  # large tiles are the fast ones there: NumPy does the work

_forced: dict[str, Config] = {}


def shared_bytes(kernel: str, config: Config, d: int, dv: int, itemsize: int) -> int:
    """Shared memory in bytes, by the formula above; d and dv padded."""
    loaded = itemsize * config.stages * config.columns * (d + dv)
    if kernel == "forward":
        return itemsize * config.rows * d + loaded
    need = itemsize * config.rows * (d + dv) + loaded
    if kernel == "dq":
        return need
    need += 8 * config.stages * config.columns
    return need + (4 * config.rows * config.columns + 4 * config.columns * d if kernel == "fused" else 0)


def choose(kernel: str, d: int, dv: int, itemsize: int, device: torch.device) -> Config:
    """The first configuration of the table that fits the device; d and dv padded.

    Raises ValueError if none does, naming what the smallest needs and what the device has.
    """
    if kernel in _forced:
        return _forced[kernel]
    if device.type == "cpu":
        return INTERPRETED
    limit = shared_limit(device)
    candidates = (*CONFIGS.get((kernel, max(64, d, dv), itemsize), ()), *SMALL)
    for config in candidates:
        if shared_bytes(kernel, config, d, dv, itemsize) <= limit:
            return config
    need = min(shared_bytes(kernel, config, d, dv, itemsize) for config in candidates)
    raise ValueError(
        f"the {kernel} kernel needs at least {need} bytes of shared memory for widths {d} and {dv} of {itemsize}-byte "
        f"elements, this device has {limit}: use a narrower dtype or canon.reference"
    )


@lru_cache
def shared_limit(device: torch.device) -> int:
    """Shared memory in bytes that one program may use: 163 KB on sm_80, 99 KB on sm_86 and sm_89, 227 KB on sm_90."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@contextmanager
def forced(**configs: Config) -> Iterator[None]:
    """Take these configurations, kernel=Config(...), whatever the device: for tests and for tuning. Not for threads.

    Raises ValueError for unknown kernels.
    """
    unknown = set(configs) - {kernel for kernel, *_ in CONFIGS}
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}: expected forward, dq, dkdv, fused")
    before = dict(_forced)
    _forced.update(configs)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
