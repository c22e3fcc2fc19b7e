"""Tile sizes of the Hopper kernels, for each kernel and pair of padded head widths; two-byte elements.

``rows`` are owned by an item, half of them by each warpgroup (in "forward" 128 by two, or 192 by three); ``columns`` are
visited: queries x keys in "forward" and "dq", keys x queries in "dkdv", "fused" and "dkdv_hdim256".
Shared memory, in bytes, with
s stages and b buffers:

    forward    2 (b rows d + s columns (d + dv))
    dq         2 (rows (d + dv) + s columns (d + dv))
    dkdv       2 (b rows (d + dv) + s columns (d + dv)) + 8 s columns
    fused      dkdv, and 4 rows columns + 8 columns d: ds, and what is added to dq, each twice
    wide       dkdv, and 8 rows columns: p and ds, twice, which the warpgroups exchange

and 1 KB for barriers. A processor of an H200 has 227 KB for a program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from canon.fast.kernels.triton.config import forcing


@dataclass(frozen=True)
class Config:
    """How a kernel cuts its work: see the module's docstring."""

    rows: int
    columns: int
    stages: int  # of the ring of visited tiles
    buffers: int = 1  # of what an item owns: 2 let the next item's tiles be fetched under this one
    turns: bool = False  # the warpgroups issue their products in turns, so that one computes exponentials meanwhile
    optimistic: bool = False  # "forward": the maximum of a row is asked for only if P is too large without

    @property
    def math_registers(self) -> int:
        """Of each thread of the warpgroups; what is left, 24 or 32, is the loader's."""
        return 160 if self.rows == 192 else 240


CAPABILITY = 9, 0  # of the devices that these kernels are for
DTYPES = torch.bfloat16, torch.float16
Widths = tuple[int, int]
TABLE: dict[tuple[str, Widths], Config] = {
    ("forward", (64, 64)): Config(128, 128, 4, 2, turns=True),
    ("forward", (128, 128)): Config(128, 128, 3, turns=True),
    ("forward", (256, 128)): Config(128, 64, 3, turns=True),
    ("forward", (256, 256)): Config(128, 64, 2, turns=True),
    ("dq", (64, 64)): Config(128, 128, 4),
    ("dq", (128, 128)): Config(128, 128, 2),
    ("dq", (256, 128)): Config(128, 64, 2),
    ("dq", (256, 256)): Config(128, 32, 2),
    ("dkdv", (64, 64)): Config(128, 128, 3),
    ("dkdv", (128, 128)): Config(128, 64, 3, 2),
    ("dkdv_hdim256", (256, 128)): Config(64, 64, 2, 2),
    ("dkdv_hdim256", (256, 256)): Config(64, 64, 2),
    ("fused", (64, 64)): Config(128, 128, 2),
    ("fused", (128, 128)): Config(128, 64, 2),
}
# Instead, where queries see more tiles of keys than this: `canon.fast.kernels.gluon.launch.tiles_seen`.
LONG_TABLE: dict[tuple[str, Widths], dict[int, Config]] = {
    ("forward", (64, 64)): {
        3: Config(128, 128, 4, 2, turns=True, optimistic=True),
        6: Config(192, 128, 4, 2, turns=True, optimistic=True),
    },
    ("forward", (128, 128)): {6: Config(128, 128, 3, turns=True, optimistic=True)},
    ("forward", (256, 128)): {3: Config(128, 64, 3, turns=True, optimistic=True)},
    ("forward", (256, 256)): {3: Config(128, 64, 2, turns=True, optimistic=True)},
}
KERNELS = ("forward", "dq", "dkdv", "fused", "dkdv_hdim256")
# 64 for each warpgroup; in "dkdv_hdim256" both share them.
ROWS = {"forward": (128, 192), "dq": (128,), "dkdv": (128,), "fused": (128,), "dkdv_hdim256": (64,)}
LIMIT = 232448  # bytes of shared memory that a program may use on sm_90: CUDA Programming Guide, 16.2

FORCED: dict[str, Config] = {}


def shared_bytes(kernel: str, config: Config, d: int, dv: int) -> int:
    """Shared memory, by the formula above; d and dv padded."""
    c = config
    owned = {"forward": c.buffers * d, "dq": d + dv}.get(kernel, c.buffers * (d + dv))
    need = 1024 + 2 * c.rows * owned + 2 * c.stages * c.columns * (d + dv)
    if kernel in ("dkdv", "fused", "dkdv_hdim256"):
        need += 8 * c.stages * c.columns
    exchanged = {"fused": 4 * c.rows * c.columns + 8 * c.columns * d, "dkdv_hdim256": 8 * c.rows * c.columns}
    return need + exchanged.get(kernel, 0)


def padded_to(kernel: str, d: int, dv: int) -> list[Widths]:
    """What heads d and dv wide can be padded to; nothing if the kernel has no tiles so wide."""
    return [pads for name, pads in TABLE if name == kernel and pads[0] >= d and pads[1] >= dv]


def choose(kernel: str, d: int, dv: int, seen: float = 0.0) -> tuple[Config, int, int]:
    """The configuration of a kernel for heads d and dv wide, and these widths padded to what it is compiled for.

    ``seen``: how many tiles a query sees, for `LONG_TABLE`.
    Raises ValueError if there is none, or if it needs too much shared memory.
    """
    fitting = padded_to(kernel, d, dv)
    if not fitting:
        widest = max((pads for name, pads in TABLE if name == kernel), default=(0, 0))
        raise ValueError(
            f'the Hopper {kernel} kernel is for heads up to {widest} wide, got {(d, dv)}: use backend("triton")'
        )
    pads = min(fitting, key=sum)
    suiting = [config for few, config in LONG_TABLE.get((kernel, pads), {}).items() if seen > few]
    config = FORCED.get(kernel) or [TABLE[kernel, pads], *suiting][-1]
    if config.rows not in ROWS[kernel] or config.stages < 1 + (kernel == "forward"):
        least = "2 stages: a tile's V is awaited before the last one's is let go" if kernel == "forward" else "1 stage"
        raise ValueError(f"the Hopper {kernel} kernel has {ROWS[kernel]} rows and at least {least}; got {config}")
    if (need := shared_bytes(kernel, config, *pads)) > LIMIT:
        raise ValueError(
            f"the Hopper {kernel} kernel with {config} needs {need} bytes of shared memory for widths {pads}, a program "
            f"may use {LIMIT}: use smaller tiles or fewer stages"
        )
    return config, *pads


@contextmanager
def forced(**configs: Config) -> Iterator[None]:
    """Take these configurations, kernel=Config(...): for tests and for tuning. Holds for all threads.

    Raises ValueError for unknown kernels.
    """
    with forcing(FORCED, KERNELS, configs):
        yield
