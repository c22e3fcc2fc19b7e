"""`canon bench host`: measure eager calls on short sequences, where the host limits the speed.

    forward        calls without gradients
    both           both passes, by `torch.autograd.grad`
    chain          both passes of `LAYERS` layers in a row; milliseconds a layer

"no kernels" allocates results and gradients alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canon.bench.measuring import Contender, Made, Settings, both_passes, leaves_of, measured
from canon.bench.peers import contenders
from canon.bench.shapes import Shape
from canon.bench.timing import clocks, shown_mb, table
from canon.fast.local import empty_result

SHAPES = [
    "1,512,32,8,128,causal",
    "1,2048,32,8,128,causal",
    "2,1024,8,1,256,causal",
    "1,8192,32,8,128,causal",
]
CONTENDERS = "canon auto|SDPA cudnn|SDPA flash|flash-attn-4"
LAYERS = 8
MEASURES = ("forward", "both", "chain")


class _NoKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = empty_result(q, v, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


NO_KERNELS = Contender("no kernels", lambda: _NoKernels.apply, bound=None)


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    leaves, dout, judge = leaves_of(shape, settings)
    found = contenders(shape, replace(settings, only=settings.only or CONTENDERS))
    found = [replace(one, forward="") for one in found]  # each has a forward time
    made = partial(_made, leaves, dout)
    rows = measured([*found, NO_KERNELS], made, judge, settings, shape=str(shape))
    for row in rows:
        for name in ("chain_wall_ms", "chain_host_ms"):
            row[name] = [x / LAYERS for x in row.get(name, [])]
    return rows


def _made(leaves: Sequence[Tensor], dout: Tensor, contender: Contender) -> Made:
    attend, (q, k, v) = contender.make(), leaves

    def chain() -> None:
        x = q
        for _ in range(LAYERS):
            x = attend(x, k, v)
        torch.autograd.grad(x, leaves, dout)

    forward = partial(attend, *(x.detach() for x in leaves))
    runs = forward, partial(both_passes, attend, leaves, dout), chain
    eager = {name: contender.inside(run) for name, run in zip(MEASURES, runs, strict=True)}
    results = contender.inside(both_passes)(attend, leaves, dout)
    return Made(results, eager["chain"], eager=eager)


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    title = f"wall (host) ms of eager calls; chain: a layer of {LAYERS}; memory of the chain"
    lines = []
    for row in rows:
        cells = [clocks(row, name) for name in MEASURES]
        if "failed" in row:
            cells = [row["failed"][:60], *[""] * (len(MEASURES) - 1)]
        lines.append((row["shape"], row["contender"], *cells, shown_mb(row)))
    return [table(title, ("shape", "contender", *MEASURES, "peak MB"), lines)]
