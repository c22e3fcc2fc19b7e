"""`canon bench layers`: measure time and peak memory of 18 checkpointed attention layers, beside
dense attention.

A layer is x + attention(q, k, v): queries x, keys the first heads of x, values its last ones.
Without weights, its memory is that of activations and gradients: 2 b n h d bytes a layer in 16
bits.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from canon.bench.peers import (
    Attend,
    Contender,
    attended,
    attention,
    contenders,
    forced,
    measured_both,
)
from canon.bench.shapes import Shape, asked_for
from canon.bench.timing import Run, clocks, shown_mb, table
from canon.testing.judge import Attended, dense, oracle

SHAPES = ["2,1024,8,1,256,prefix:768"]
LAYERS = 18
PEERS = "eager|SDPA mask|canon auto"
WITHOUT = "rank invariant"


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str
) -> list[dict[str, Any]]:
    """Return a row per contender."""
    q, k, v, dout = shape.inputs(dtype, device)
    exact, honest = oracle(q, k, v, dout, shape.mask), dense(q, k, v, dout, shape.mask)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, made = layer_contenders(shape, device, only), partial(_made, shape, leaves, dout)
    return measured_both(
        found, made, exact, honest, rounds, device, shape=str(shape), layers=LAYERS
    )


def layer_contenders(shape: Shape, device: torch.device, only: str) -> list[Contender]:
    """Return the peers with dense masks, "canon auto", and every backend."""
    from canon.fast.device import BACKENDS

    found = [one for one in contenders(shape, device, PEERS) if WITHOUT not in one.name]
    for backend in (name for name, x in BACKENDS.items() if x.compiles):
        name, make = f"canon {backend}", partial(attention, shape, "auto")
        found.append(Contender(name, make, name, declines=True, around=partial(forced, backend)))
    return [contender for contender in found if asked_for(contender.name, only)]


def both(attend: Attend, key_heads: int, q: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of the input of all layers."""
    x = q
    for _ in range(LAYERS):
        x = checkpoint(partial(layer, attend, key_heads), x, use_reentrant=False)
    return torch.autograd.grad(x, q, dout)[0]


def layer(attend: Attend, key_heads: int, x: Tensor) -> Tensor:
    """Return x + attention(x)."""
    return x + attend(x, x[:, :, :key_heads], x[:, :, -key_heads:])


def _made(
    shape: Shape, leaves: Sequence[Tensor], dout: Tensor, contender: Contender
) -> tuple[Run, Attended]:
    attend = contender.make()
    step = contender.inside(partial(both, attend, shape.g, leaves[0], dout))
    got = contender.inside(partial(attended, attend, leaves, dout))()
    step()
    return step, got


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    columns, lines = ("shape", "contender", "wall (host) ms", "GPU ms", "peak MB"), []
    for row in rows:
        reason = row.get("failed") or row.get("declined")
        cells = (
            [reason[:60], ""] if reason else [clocks(row, "both"), f"{median(row['both_ms']):.2f}"]
        )
        lines.append((row["shape"], row["contender"], *cells, shown_mb(row)))
    return [table(f"both passes of {LAYERS} checkpointed layers", columns, lines)]
