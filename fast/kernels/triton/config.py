"""Tile sizes of the Triton kernels: the fastest that fits. ``rows`` and ``columns`` are those of
`canon.fast.kernels.gluon.config`; in "parts", rows are pairs of a query and a head."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from canon.fast.kernels import backend
from canon.fast.kernels.launcher import capability, gpu_of, is_cpu


@dataclass(frozen=True)
class Config:
    """The tile sizes and launch options of a kernel."""

    rows: int
    columns: int
    warps: int = 8
    stages: int = 2
    partial_stages: int = 2  # of the loop over partial tiles
    tma: bool = False  # load full tiles by descriptors: needs Hopper and suitable tensors
    # dk and dv in two launches, with half the accumulators: 5 MMAs a tile, not 4
    apart: bool = False
    # of partial tiles, a divisor of columns: narrow ones waste less; 0 means columns
    partial_columns: int = 0


# kernel, then larger padded width, at least 64: best first
Table = dict[str, dict[int, tuple[Config, ...]]]

# Two-byte elements, sm_90 and later: paper/data/tune_triton_*_h200.json. dq at width 256 spills 20
# bytes. At width 512 the tiles are the largest that spill nothing; no GPU has timed them.
HOPPER: Table = {
    "forward": {
        64: (
            Config(64, 128, 4, 2, tma=True, partial_columns=64),
            Config(128, 64, 8, 3, partial_columns=32),
        ),
        128: (
            Config(64, 64, 4, 3, tma=True, partial_columns=32),
            Config(128, 64, 8, 3, partial_columns=32),
        ),
        256: (Config(128, 64, 8, 2, tma=True, partial_columns=32), Config(128, 32, 8, 2)),
        512: (Config(64, 16, 8, 2, tma=True), Config(32, 32, 8, 2)),
    },
    "dq": {
        64: (
            Config(64, 64, 4, 3, tma=True, partial_columns=32),
            Config(128, 64, 8, 3, partial_columns=32),
        ),
        128: (
            Config(64, 64, 4, 2, tma=True, partial_columns=32),
            Config(128, 64, 8, 2, partial_columns=32),
        ),
        256: (Config(128, 32, 8, 2, tma=True), Config(64, 32, 8, 2)),
        512: (Config(32, 16, 8, 2),),
    },
    "dkdv": {
        64: (
            Config(64, 64, 4, 3, tma=True, partial_columns=32),
            Config(128, 64, 8, 3, partial_columns=32),
        ),
        128: (
            Config(64, 32, 4, 3, tma=True, partial_columns=16),
            Config(128, 32, 8, 3, partial_columns=16),
        ),
        256: (
            Config(128, 32, 8, 2, apart=True, partial_columns=16),
            Config(64, 16, 8, 2, apart=True),
        ),
        512: (Config(32, 16, 8, 2, apart=True),),
    },
    "fused": {
        64: (
            Config(128, 64, 8, 3, tma=True, partial_columns=32),
            Config(128, 64, 8, 2, partial_columns=32),
        ),
        128: (Config(64, 32, 8, 2, tma=True), Config(64, 32, 8, 2)),
        256: (Config(32, 16, 8, 2),),
    },
    # without descriptors, the same tiles
    "parts": {
        64: (Config(64, 64, 4, 4, tma=True),),
        128: (Config(64, 64, 4, 3, tma=True),),
        256: (Config(64, 32, 4, 3, tma=True),),
        512: (Config(64, 32, 8, 2, tma=True),),
    },
}
AMPERE: Table = {  # two-byte elements, sm_80 to sm_89
    "forward": {
        64: (Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
        128: (Config(128, 64, 8, 3, partial_columns=32), Config(64, 64, 4, 2)),
        256: (Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
        512: (Config(32, 32, 8, 2), Config(32, 16, 8, 1)),
    },
    "dq": {
        64: (Config(128, 64, 8, 2),),
        128: (Config(128, 32, 8, 2), Config(64, 64, 8, 2)),
        256: (Config(64, 32, 8, 2), Config(32, 32, 8, 1)),
        512: (Config(32, 16, 8, 2),),
    },
    "dkdv": {
        64: (Config(128, 32, 8, 2),),
        128: (Config(64, 64, 8, 2, partial_columns=32), Config(64, 32, 8, 2)),
        256: (Config(64, 32, 8, 2, apart=True), Config(32, 16, 8, 2)),
        512: (Config(32, 16, 8, 2, apart=True),),
    },
    "fused": {
        64: (Config(64, 32, 8, 2),),
        128: (Config(64, 32, 8, 2),),
        256: (Config(32, 16, 8, 2),),
    },
    "parts": {
        64: (Config(64, 64, 4, 3),),
        128: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        256: (Config(64, 32, 8, 3), Config(64, 32, 8, 2)),
        512: (Config(64, 16, 8, 2),),
    },
}
LARGE_ELEMENTS: dict[int, dict[int, Config]] = {  # by bytes an element, then by the larger width
    4: {64: Config(32, 32, 8, 1, 1), 128: Config(32, 16, 8, 1, 1), 256: Config(16, 16, 8, 1, 1)},
    8: {64: Config(32, 16, 4, 1, 1), 128: Config(16, 16, 4, 1, 1), 256: Config(16, 16, 8, 1, 1)},
}
# Without tensor cores, more rows than a few queries have cost time.
FLOAT32_PARTS = {64: Config(16, 32, 4, 3), 128: Config(16, 32, 4, 3), 256: Config(16, 16, 4, 3)}
SMALLEST = Config(16, 16, 8, 1)
KERNELS, WIDEST = tuple(HOPPER), 512
INTERPRETED = Config(128, 128)  # NumPy likes large tiles
INTERPRETED_PARTS = Config(64, 64)

FORCED: dict[str, Config] = {}
backend.FORCED.append(FORCED)


def tile_bytes(
    kernel: str, rows: int, columns: int, stages: int, d: int, dv: int, itemsize: int = 2
) -> int:
    """Return the bytes of all tiles."""
    owned, statistics = (
        (d if kernel in ("forward", "parts") else d + dv),
        (0 if kernel in ("forward", "dq", "parts") else 8),
    )
    return itemsize * rows * owned + stages * columns * (itemsize * (d + dv) + statistics)


def shared_bytes(kernel: str, config: Config, d: int, dv: int, itemsize: int) -> int:
    """Return the most bytes of shared memory, with 1 KB for barriers."""
    need = 1024 + tile_bytes(kernel, config.rows, config.columns, config.stages, d, dv, itemsize)
    if itemsize > 2:
        need += itemsize * config.rows * config.columns * (2 if kernel in ("dkdv", "fused") else 1)
    if kernel == "fused":
        need += itemsize * config.rows * config.columns + max(4, itemsize) * config.columns * (
            d + 32
        )
    return need


def choose(kernel: str, q: Tensor, v: Tensor, describable: bool) -> Config:
    """Return the configuration for q and v, or raise ValueError. ``describable``: descriptors are
    possible.
    """
    # as `blocks.padded`: this module is imported without Triton, too
    d, dv = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (q, v))
    if max(d, dv) > WIDEST:
        raise ValueError(
            f"the Triton kernels support heads up to {WIDEST} wide, got widths that are padded to "
            f"{d} and {dv}: use canon.reference"
        )
    if kernel in FORCED:
        return FORCED[kernel]
    if is_cpu(q.device):
        return INTERPRETED_PARTS if kernel == "parts" else INTERPRETED
    limit, hopper = gpu_of(q.device).shared_memory, is_hopper(q.device)
    return fitting(kernel, d, dv, q.element_size(), limit, describable, hopper)


@lru_cache
def fitting(
    kernel: str, d: int, dv: int, itemsize: int, limit: int, describable: bool, hopper: bool
) -> Config:
    """As `choose`, with at most ``limit`` bytes of shared memory."""
    width = max(64, d, dv)
    if itemsize == 2:
        table = (HOPPER if hopper else AMPERE)[kernel].get(width, ())
    else:
        large = FLOAT32_PARTS if (kernel, itemsize) == ("parts", 4) else LARGE_ELEMENTS[itemsize]
        table = filter(None, [large.get(width)])
    candidates = [c for c in (*table, SMALLEST) if describable or not c.tma or kernel == "parts"]
    for config in candidates:
        if shared_bytes(kernel, config, d, dv, itemsize) <= limit:
            return config if describable else replace(config, tma=False)
    need = min(shared_bytes(kernel, config, d, dv, itemsize) for config in candidates)
    raise ValueError(
        f"the {kernel} kernel needs at least {need} bytes of shared memory for widths {d} and "
        f"{dv} of {itemsize}-byte "
        f"elements, but this device has {limit}: use a narrower dtype or canon.reference"
    )


def is_hopper(device: torch.device) -> bool:
    """Return whether the device is sm_90 or later."""
    return not is_cpu(device) and capability(device) >= (9, 0)


@contextmanager
def forcing(forced: dict, kernels: tuple[str, ...], **configs: Any) -> Iterator[None]:
    """Use these configurations, kernel=Config(...), on any device and in all threads."""
    if unknown := set(configs) - set(kernels):
        raise ValueError(f"unknown kernels {sorted(unknown)}: expected one of {', '.join(kernels)}")
    before = dict(forced)
    forced.update(configs)
    try:
        yield
    finally:
        forced.clear()
        forced.update(before)


forced = partial(forcing, FORCED, KERNELS)
