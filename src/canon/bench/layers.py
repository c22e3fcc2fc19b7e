"""`canon bench layers`: measure time and peak memory of 18 checkpointed attention layers, beside
dense attention.

A layer is x + attention(q, k, v): queries x, keys the first heads of x, values its last ones.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from canon.bench.measuring import (
    Attend,
    Contender,
    Made,
    Settings,
    both_passes,
    leaves_of,
    listed,
    measured,
)
from canon.bench.peers import attention, contenders, forced
from canon.bench.shapes import Shape
from canon.bench.timing import clocks, median_of, shown_mb, table

SHAPES = ["2,1024,8,1,256,prefix:768"]
LAYERS = 18
PEERS = "eager", "eager float32", "SDPA mask", "canon auto"


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    leaves, dout, judge = leaves_of(shape, settings)
    made, found = partial(_made, shape, leaves, dout), layer_contenders(shape, settings)
    return measured(found, made, judge, settings, shape=str(shape), layers=LAYERS)


def layer_contenders(shape: Shape, settings: Settings) -> list[Contender]:
    """Return the peers with dense masks, "canon auto", and every backend."""
    from canon.fast.device import BACKENDS

    found = [one for one in contenders(shape, settings) if one.name in PEERS]
    make = partial(attention, shape, "auto")
    for backend in (name for name, x in BACKENDS.items() if x.compiles):
        around = partial(forced, backend)
        found += listed([Contender(f"canon {backend}", make, "", True, around)], settings)
    return found


def both(attend: Attend, key_heads: int, q: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of the input of all layers."""
    x = q
    for _ in range(LAYERS):
        x = checkpoint(partial(layer, attend, key_heads), x, use_reentrant=False)
    return torch.autograd.grad(x, q, dout)[0]


def layer(attend: Attend, key_heads: int, x: Tensor) -> Tensor:
    """Return x + attention(x)."""
    return x + attend(x, x[:, :, :key_heads], x[:, :, -key_heads:])


def _made(shape: Shape, leaves: Sequence[Tensor], dout: Tensor, contender: Contender) -> Made:
    attend = contender.make()
    step = contender.inside(partial(both, attend, shape.g, leaves[0], dout))
    results = contender.inside(both_passes)(attend, leaves, dout)
    step()
    return Made(results, step, {"both": step}, {"both": step})


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    columns, lines = ("shape", "contender", "wall (host) ms", "GPU ms", "peak MB"), []
    for row in rows:
        reason = (row.get("failed") or row.get("declined") or "")[:60]
        cells = reason or clocks(row, "both"), median_of(row, "both_ms")
        lines.append((row["shape"], row["contender"], *cells, shown_mb(row)))
    return [table(f"both passes of {LAYERS} checkpointed layers", columns, lines)]
