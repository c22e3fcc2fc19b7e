"""`canon bench masks`: measure the cost of a new mask of packed documents on one GPU.

first, repeated   both passes with a new mask, and again; each call alone
new mask          made, and first without repeated
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from canon.bench.measuring import Settings
from canon.bench.shapes import Shape, documents
from canon.bench.timing import eager, median_of, peak_mb, table
from canon.masks.mask import Mask

SHAPES = [
    "1,65536,64,8,128,documents:4096",
    "1,65536,64,8,128,documents:1024",
    "1,65536,64,8,128,documents:256",
    "1,1048576,8,1,128,documents:2048",
]
WARMING = 2  # masks whose calls may compile and import
REPEATED = 3  # calls with a known mask


def check(shape: Shape) -> None:
    """Raise ValueError unless the mask can be replaced by a new one."""
    if shape.kind != "documents":
        raise ValueError("masks needs packed documents: documents:MEAN")


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return one row, with the times of ``rounds`` new masks."""
    from canon import fast

    device, (mean,) = settings.device, shape.numbers
    *leaves, dout = shape.inputs(settings.dtype, device)
    leaves = [x.requires_grad_() for x in leaves]
    found = []
    for seed in range(settings.rounds + WARMING):
        ends = documents(shape.n, mean, seed=1000 + seed)
        start = time.perf_counter()
        mask = Mask.documents(ends)
        made = 1e3 * (time.perf_counter() - start)

        def call(mask=mask):
            torch.autograd.grad(fast.attention(*leaves, mask), leaves, dout)

        first, _ = eager(call, 1, device)
        for _ in range(2):  # recorded; then replayed
            call()
        repeated = statistics.median(eager(call, 1, device)[0] for _ in range(REPEATED))
        times = {"made_ms": made, "first_ms": first, "repeated_ms": repeated}
        times["new_mask_ms"] = made + first - repeated
        found.append(times | {"documents": len(ends) - 1, "peak_mb": peak_mb(call, device)})
    row = {name: [each[name] for each in found[WARMING:]] for name in found[0]}
    return [{"shape": str(shape)} | row]


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    names = "made", "first", "repeated", "new_mask"
    lines = []
    for row in rows:
        medians = [median_of(row, f"{name}_ms") for name in names]
        counts = [median_of(row, name, ".0f") for name in ("documents", "peak_mb")]
        lines.append((row["shape"], *medians, *counts))
    title = "new packed masks: milliseconds; memory of a call"
    return [table(title, ("shape", *names, "documents", "peak MB"), lines)]
