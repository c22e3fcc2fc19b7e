"""Configurations of the Hopper kernels, by kernel and padded head widths.

A CTA owns ``rows`` and visits ``columns``: queries x keys in "forward" and "dq", else keys x
queries."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from canon.fast.kernels import backend
from canon.fast.kernels.triton.config import forcing, tile_bytes


@dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline of a kernel."""

    rows: int
    columns: int
    stages: int  # buffers in the ring of visited tiles
    buffers: int = 1  # of owned tiles: 2 load the next work tile's during this one
    stale_maximum: bool = False  # "forward": P uses a stale row maximum, verified afterwards
    plain: bool = False  # "forward": the kernel of `forward_plain`
    v_stages: int = 0  # "dq": buffers in the ring of V; 0 for ``stages``

    @property
    def math_registers(self) -> int:
        """Registers of a thread of the MMA warpgroups; the loader has the rest, 24 or 32."""
        return 160 if self.rows == 192 else 240


CAPABILITY = 9, 0
DTYPES = torch.bfloat16, torch.float16
Widths = tuple[int, int]
TABLE: dict[tuple[str, Widths], Config] = {
    ("forward", (64, 64)): Config(128, 128, 4, 2),
    ("forward", (128, 128)): Config(128, 128, 3),
    ("forward", (256, 128)): Config(128, 64, 3),
    ("forward", (256, 256)): Config(128, 64, 2),
    ("dq", (64, 64)): Config(128, 128, 4),
    ("dq", (128, 128)): Config(128, 128, 2),
    ("dq", (256, 128)): Config(128, 64, 2),
    ("dq", (256, 256)): Config(128, 64, 2, v_stages=1),
    ("dkdv", (64, 64)): Config(128, 128, 3),
    ("dkdv", (128, 128)): Config(128, 64, 3, 2),
    ("dkdv_hdim256", (256, 128)): Config(64, 64, 2, 2),
    ("dkdv_hdim256", (256, 256)): Config(64, 64, 2),
    ("fused", (64, 64)): Config(128, 128, 2),
    ("fused", (128, 128)): Config(128, 64, 2),
}
# For queries that see more tiles of keys than so many (`launch.tiles_seen`).
LONG_TABLE: dict[tuple[str, Widths], dict[int, Config]] = {
    ("forward", pads): {few: replace(TABLE["forward", pads], stale_maximum=True)}
    for pads, few in {(64, 64): 3, (128, 128): 6, (256, 128): 3, (256, 256): 3}.items()
}
LONG_TABLE["forward", (64, 64)][6] = replace(LONG_TABLE["forward", (64, 64)][3], rows=192)
TILES_SEEN = sorted({few for table in LONG_TABLE.values() for few in table})
# Of `forward_plain`, if forced.
PLAIN: dict[Widths, Config] = {
    (64, 64): Config(128, 128, 4, plain=True),
    (128, 128): Config(128, 128, 3, plain=True),
}
KERNELS = ("forward", "dq", "dkdv", "fused", "dkdv_hdim256")
# 64 for each warpgroup; in "dkdv_hdim256" both share them
ROWS = {"forward": (128, 192), "dq": (128,), "dkdv": (128,), "fused": (128,), "dkdv_hdim256": (64,)}
LIMIT = 232448  # bytes of shared memory of a CTA on sm_90: CUDA Programming Guide, 16.2

FORCED: dict[str, Config] = {}
backend.FORCED.append(FORCED)


def shared_bytes(kernel: str, config: Config, d: int, dv: int) -> int:
    """Return the bytes of shared memory, with 1 KB for barriers."""
    c = config
    need = 1024 + tile_bytes(kernel, c.rows * c.buffers, c.columns, c.stages, d, dv)
    need -= (c.stages - (c.v_stages or c.stages)) * c.columns * 2 * dv
    exchanged = {
        "fused": 4 * c.rows * c.columns + 8 * c.columns * d,
        "dkdv_hdim256": 2 * c.stages * c.rows * c.columns,
    }
    return need + exchanged.get(kernel, 0)


def padded_to(kernel: str, d: int, dv: int) -> list[Widths]:
    """Return the padded widths of the kernel that hold widths d and dv."""
    return [pads for name, pads in TABLE if name == kernel and pads[0] >= d and pads[1] >= dv]


def choose(
    kernel: str, d: int, dv: int, seen: float = 0.0, most_rows: int = 192
) -> tuple[Config, int, int]:
    """Return the configuration and the padded widths, or raise ValueError. ``seen``: mean tiles
    that a query sees; ``most_rows``: of `LONG_TABLE`."""
    fitting = padded_to(kernel, d, dv)
    if not fitting:
        widest = max((pads for name, pads in TABLE if name == kernel), default=(0, 0))
        raise ValueError(
            f"the Hopper {kernel} kernel supports heads up to {widest} wide, not {(d, dv)}: use "
            'backend("triton")'
        )
    pads, least = min(fitting, key=sum), 1 + (kernel == "forward")
    longer = LONG_TABLE.get((kernel, pads), {}).items()
    suiting = [config for few, config in longer if seen > few and config.rows <= most_rows]
    config = FORCED.get(kernel) or [TABLE[kernel, pads], *suiting][-1]
    plain = Config(128, config.columns, config.stages, plain=True)
    if (
        config.rows not in ROWS[kernel]
        or config.stages < least  # the forward waits for V of a tile before it releases the last V
        or (config.plain and config != plain)
    ):
        raise ValueError(
            f"the Hopper {kernel} kernel needs {ROWS[kernel]} rows and at least {least} stages, "
            f"and the plain forward 128 rows, one buffer of Q and no switches; got {config}"
        )
    if (need := shared_bytes(kernel, config, *pads)) > LIMIT:
        raise ValueError(
            f"the Hopper {kernel} kernel with {config} needs {need} bytes of shared memory for "
            f"widths {pads}, but a CTA "
            f"may use {LIMIT}: use smaller tiles or fewer stages"
        )
    return config, *pads


forced = partial(forcing, FORCED, KERNELS)
