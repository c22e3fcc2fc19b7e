"""`canon bench host` and `canon bench masks`: what a call costs before the GPU has anything to do.

    canon bench host                        wall and host time of eager calls beside peers, on short sequences
    canon bench masks                       the first call with a new packed mask beside a repeated one

host     forward        calls without gradients, back to back
         both           forward and backward
         chain          both passes of `LAYERS` layers, each with the output of the last as its queries; ms a layer
masks    first          forward and backward with a mask that the process has not seen; kernels are compiled already
         repeated       the same call again

Every row has single times in milliseconds, wall time and host time apart (`canon.testing.timing.Eager`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from canon.reference.mask import Mask
from canon.testing.judge import Attended, agreement, dense, oracle
from canon.testing.peers import Contender, contenders
from canon.testing.shapes import Shape, documents
from canon.testing.timing import Eager, clocks, eager, eager_rounds

HOST_SHAPES = ["1,512,32,8,128,causal", "1,2048,32,8,128,causal", "2,1024,8,1,256,causal", "1,8192,32,8,128,causal"]
MASK_SHAPES = ["1,65536,32,8,128,documents:131", "1,65536,32,8,128,documents:900", "1,1048576,8,1,128,documents:2048"]
CONTENDERS = "canon auto|SDPA|flash-attn-4"
LAYERS = 8
MEASURES = ("forward", "both", "chain")


def host(shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str) -> list[dict[str, Any]]:
    """Return a row per contender: agreement, and wall and host times of each measure."""
    q, k, v, dout = shape.inputs(dtype, device)
    exact, honest = oracle(q, k, v, dout, shape.mask), dense(q, k, v, dout, shape.mask)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows, runs = [], []
    for contender in contenders(shape, device, only or CONTENDERS):
        row: dict[str, Any] = {"contender": contender.name, "shape": str(shape)}
        rows.append(row)
        try:
            attend = contender.make()
            out = attend(*leaves)
            got = Attended(out.detach(), None, *torch.autograd.grad(out, leaves, dout))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            continue
        verdict = agreement(got, exact, honest)
        row["agrees"] = verdict.agrees
        if not verdict.agrees:
            row["failed"] = f"disagrees: {verdict}"
            continue
        runs += _measures(row, contender, attend, leaves, dout)
    eager_rounds(runs, rounds, device)
    for row in rows:
        for name in ("chain_wall_ms", "chain_host_ms"):
            row[name] = [x / LAYERS for x in row.get(name, [])]
    return rows


def _measures(row: dict, contender: Contender, attend: Callable, leaves: list[Tensor], dout: Tensor) -> Iterator[Eager]:
    q, k, v = leaves
    plain = [x.detach() for x in leaves]

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), leaves, dout)

    def chain() -> None:
        x = q
        for _ in range(LAYERS):
            x = attend(x, k, v)
        torch.autograd.grad(x, leaves, dout)

    for name, run in zip(MEASURES, (partial(attend, *plain), both, chain), strict=True):
        yield Eager.listed(row, name, contender.inside(run))


def masks(shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return a row: milliseconds of first and repeated calls with ``rounds`` new masks of the kind of ``shape``'s."""
    from canon import fast

    mean = int(shape.mask_name.partition(":")[2])
    q, k, v, dout = shape.inputs(dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    row: dict[str, Any] = {"shape": str(shape), "documents": [], "made_ms": [], "first_ms": [], "repeated_ms": []}

    def both(mask: Mask) -> None:
        torch.autograd.grad(fast.attention(*leaves, mask), leaves, dout)

    for seed in range(rounds + 2):
        ends = documents(shape.n, mean, seed=1000 + seed)
        made_ms, mask = _timed(lambda ends=ends: Mask.documents(ends))
        first, _ = eager(partial(both, mask), 1, device)
        both(mask)
        repeated, _ = eager(partial(both, mask), 2, device)
        if seed >= 2:  # the first two may compile
            row["documents"].append(len(ends) - 1)
            row["made_ms"].append(made_ms)
            row["first_ms"].append(first)
            row["repeated_ms"].append(repeated)
    row["new_mask_ms"] = [
        a + b - c for a, b, c in zip(row["made_ms"], row["first_ms"], row["repeated_ms"], strict=True)
    ]
    return [row]


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return 1e3 * (time.perf_counter() - start), result


# ---------------------------------------------------------------------- shown
def host_table(rows: Sequence[dict]):
    """Return a table of medians: wall time, and host time in brackets."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table("shape", "contender", *MEASURES, title=f"wall (host) ms of eager calls; chain: a layer of {LAYERS}")
    for row in rows:
        cells = [row["failed"][:60], "", ""] if "failed" in row else [clocks(row, name) for name in MEASURES]
        shown.add_row(row["shape"], row["contender"], *map(escape, cells))
    return shown


def mask_table(rows: Sequence[dict]):
    """Return a table of medians."""
    from rich.table import Table

    shown = Table("shape", "documents", "mask ms", "first ms", "repeated ms", "new mask ms", title="new packed masks")
    for row in rows:
        medians = [f"{median(row[name]):.2f}" for name in ("made_ms", "first_ms", "repeated_ms", "new_mask_ms")]
        shown.add_row(row["shape"], f"{median(row['documents']):.0f}", *medians)
    return shown
