"""`canon bench kernels`: measure forward and backward kernels of Canon and of peers on one GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canon.bench import shapes
from canon.bench.measuring import (
    Contender,
    Made,
    Settings,
    add_tflops,
    both_passes,
    leaves_of,
    measured,
    verdict_of,
)
from canon.bench.peers import contenders, installed
from canon.bench.shapes import Shape
from canon.bench.timing import ceilings, clocks, shown_mb, table

SHAPES = shapes.KERNELS


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    leaves, dout, judge = leaves_of(shape, settings)
    fields = {name: getattr(shape, name) for name in ("b", "n", "h", "g", "d")}
    fields |= {"shape": str(shape), "mask": shape.mask_name}
    made, found = partial(_made, leaves, dout), contenders(shape, settings)
    rows = measured(found, made, judge, settings, **fields)
    for row in rows:
        add_tflops(row, shape.operations, forward=1.0, backward=2.5)
    return rows


def _made(leaves: Sequence[Tensor], dout: Tensor, contender: Contender) -> Made:
    forward = contender.inside(contender.make())
    out = forward(*leaves)
    backward = contender.inside(partial(torch.autograd.grad, out, leaves, dout, retain_graph=True))
    results = [out, *backward()]
    both = contender.inside(partial(both_passes, forward, leaves, dout))
    gpu = {"backward": backward, "forward": partial(forward, *leaves)}
    eager = {"both": both, "forward": partial(forward, *(x.detach() for x in leaves))}
    return Made(results, both, gpu, eager)


def fields(settings: Settings) -> dict[str, Any]:
    """Return further fields of the record."""
    return {"ceilings": ceilings(settings.dtype, settings.device), "peers": installed()}


def tables(rows: Sequence[dict]) -> list:
    """Return a table of a shape."""
    columns = "contender", "agrees", "forward ms", "both ms", "forward", "backward"
    text = "wall (host) ms of eager calls; TFLOP/s of GPU time"
    title = f"{rows[0]['shape']}: {text}; memory of both passes"
    lines = []
    for row in rows:
        times = [clocks(row, name) for name in ("forward", "both")]
        speeds = [row.get(f"{name}_tflops") for name in ("forward", "backward")]
        speeds = ["-" if speed is None else f"{speed:.0f}" for speed in speeds]
        lines.append((row["contender"], verdict_of(row), *times, *speeds, shown_mb(row)))
    return [table(title, (*columns, "peak MB"), lines)]
