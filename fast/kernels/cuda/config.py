"""Tile sizes of the CUDA kernels: the first of a table that fits.

``rows`` and ``columns`` are those of `canon.fast.kernels.gluon.config`. ``parts`` warps share rows,
and divide the columns and widths.
"""

from dataclasses import dataclass, replace

from canon.fast.kernels.launcher import Gpu
from canon.fast.kernels.triton.config import tile_bytes


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options."""

    rows: int
    columns: int
    warps: int
    parts: int = 1
    stages: int = 2
    ctas: int = 1  # on an SM
    exchanges: int = 2  # buffers of "dkdv" for P and dS if parts > 1; if 1, dS follows P
    shared_bytes: int = 0

    def macros(self) -> dict[str, int]:
        return {
            f"CANON_{name.upper()}": value
            for name, value in vars(self).items()
            if name != "shared_bytes"
        }


RESERVED = 1024  # bytes that the system uses for each CTA

# By kernel and larger width, rounded up to 64, 128, 192 or 256; the fastest on an H200 first, then
# for 163 KB or 99 KB.
TABLE: dict[str, dict[int, tuple[Config, ...]]] = {
    "forward": {
        64: (Config(128, 64, 4, ctas=2),),
        128: (
            Config(128, 64, 4, ctas=2),
            Config(128, 32, 4, ctas=2),
            Config(64, 32, 4, ctas=2),
        ),
        192: (Config(128, 64, 8), Config(128, 32, 8)),
        256: (Config(128, 64, 8), Config(128, 32, 8), Config(64, 32, 4)),
    },
    "dq": {
        64: (Config(128, 64, 4, ctas=2), Config(128, 32, 4, ctas=2)),
        128: (Config(128, 32, 4, ctas=2), Config(128, 64, 8), Config(128, 32, 8)),
        192: (Config(128, 32, 8), Config(64, 32, 4)),
        256: (
            Config(128, 32, 8, parts=2),
            Config(64, 32, 8, parts=2),
            Config(32, 32, 4, parts=2),
        ),
    },
    "dkdv": {
        64: (Config(128, 32, 4, ctas=2),),
        128: (Config(64, 64, 4, ctas=2), Config(128, 64, 8), Config(64, 64, 4)),
        192: (
            Config(64, 64, 8, parts=4),
            Config(64, 32, 8, parts=2),
            Config(32, 32, 4, parts=2),
        ),
        256: (
            Config(64, 64, 8, parts=4),
            Config(64, 32, 8, parts=2),
            Config(32, 32, 4, parts=2, exchanges=1),
        ),
    },
}


def shared_bytes(kernel: str, config: Config, d: int, dv: int) -> int:
    """Return the dynamic shared memory of a CTA."""
    rows, columns, stages = config.rows, config.columns, config.stages
    need = tile_bytes(kernel, rows, columns, stages, d, dv) + 32 * (stages + 1)
    if kernel == "forward":  # out takes the place of Q
        return need + 2 * rows * max(0, dv - d)
    exchanges = 0 if config.parts == 1 else 1 if kernel == "dq" else config.exchanges
    return need + 2 * exchanges * rows * columns


def choose(kernel: str, d: int, dv: int, gpu: Gpu) -> Config:
    """Return the configuration for widths d and dv, or raise ValueError."""
    if kernel not in TABLE:
        raise ValueError(f"unknown kernel {kernel!r}: expected one of {', '.join(TABLE)}")
    if any(width % 16 or not 16 <= width <= 256 for width in (d, dv)):
        raise ValueError(
            f"the CUDA {kernel} kernel supports widths that are multiples of 16 from 16 to 256, "
            f"got {d} and {dv}: "
            'use backend("triton")'
        )
    candidates = TABLE[kernel][max(64, -(-max(d, dv) // 64) * 64)]
    for config in candidates:
        need = shared_bytes(kernel, config, d, dv)
        if config.ctas * (need + RESERVED) <= gpu.shared_memory + RESERVED:
            return replace(config, shared_bytes=need)
    need = (
        min(config.ctas * (shared_bytes(kernel, config, d, dv) + RESERVED) for config in candidates)
        - RESERVED
    )
    raise ValueError(
        f"the CUDA {kernel} kernel needs {need} bytes of shared memory for widths {d} and {dv}, "
        "but this GPU has "
        f'{gpu.shared_memory}: use backend("triton")'
    )
