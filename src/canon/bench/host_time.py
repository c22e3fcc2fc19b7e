"""`canon bench host`: measure eager calls on short sequences, where the host limits the speed.

    forward        calls without gradients, back to back
    both           both passes, by `torch.autograd.grad`
    chain          both passes of `LAYERS` layers in a row; milliseconds a layer
    loop           a training loop: forward, q.grad = k.grad = v.grad = None, out.backward(dout)

"no kernels" allocates results and gradients, and launches nothing. "to cuDNN" divides median wall
times of the loop."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canon.bench.peers import Contender, attended, both_passes, contenders
from canon.bench.shapes import Shape
from canon.bench.timing import Eager, clocks, eager_rounds, peak_mb, shown_mb, table
from canon.fast.local import empty_result
from canon.testing.judge import Attended, dense, oracle

SHAPES = [
    "1,512,32,8,128,causal",
    "1,2048,32,8,128,causal",
    "2,1024,8,1,256,causal",
    "1,8192,32,8,128,causal",
]
CONTENDERS = "canon auto|SDPA cudnn|SDPA flash|flash-attn-4"
LAYERS = 8
MEASURES = ("forward", "both", "chain", "loop")
CUDNN = "SDPA cudnn"
NO_KERNELS = "no kernels"


class NoKernels(torch.autograd.Function):
    """The allocations of attention, and nothing else."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = empty_result(q, v, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def host(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str
) -> list[dict[str, Any]]:
    """Return a row per contender."""
    q, k, v, dout = shape.inputs(dtype, device)
    exact, honest = oracle(q, k, v, dout, shape.mask), dense(q, k, v, dout, shape.mask)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows, runs = [], []
    for contender in contenders(shape, device, only or CONTENDERS):
        row: dict[str, Any] = {"contender": contender.name, "shape": str(shape)}
        rows.append(row)
        made = contender.agreeing(row, partial(_called, contender, leaves, dout), exact, honest)
        if not made:
            continue
        runs += _measures(row, contender, made[0], leaves, dout)
    rows.append({"contender": NO_KERNELS, "shape": str(shape)})
    no_kernels = Contender(NO_KERNELS, lambda: NoKernels.apply, NO_KERNELS)
    runs += _measures(rows[-1], no_kernels, NoKernels.apply, leaves, dout)
    eager_rounds(runs, rounds, device)
    for row in rows:
        for name in ("chain_wall_ms", "chain_host_ms"):
            row[name] = [x / LAYERS for x in row.get(name, [])]
    medians = {
        row["contender"]: statistics.median(row["loop_wall_ms"])
        for row in rows
        if row.get("loop_wall_ms")
    }
    for row in rows:
        if CUDNN in medians and row["contender"] in medians:
            row["loop_to_cudnn"] = medians[row["contender"]] / medians[CUDNN]
    return rows


def _called(contender: Contender, leaves: list[Tensor], dout: Tensor) -> tuple[Callable, Attended]:
    attend = contender.make()
    return attend, attended(attend, leaves, dout)


def _measures(
    row: dict, contender: Contender, attend: Callable, leaves: list[Tensor], dout: Tensor
) -> Iterator[Eager]:
    q, k, v = leaves
    plain = [x.detach() for x in leaves]
    both = partial(both_passes, attend, leaves, dout)

    def chain() -> None:
        x = q
        for _ in range(LAYERS):
            x = attend(x, k, v)
        torch.autograd.grad(x, leaves, dout)

    def loop() -> None:
        out = attend(q, k, v)
        for x in leaves:
            x.grad = None
        out.backward(dout)

    row["peak_mb"] = peak_mb(contender.inside(chain), leaves[0].device)
    for name, run in zip(MEASURES, (partial(attend, *plain), both, chain, loop), strict=True):
        yield Eager.listed(row, name, contender.inside(run))


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    title, lines = (
        f"wall (host) ms of eager calls; chain: a layer of {LAYERS}; loop: a training loop; "
        "memory of the chain",
        [],
    )
    for row in rows:
        cells = [clocks(row, name) for name in MEASURES]
        cells += [f"{row['loop_to_cudnn']:.2f}" if "loop_to_cudnn" in row else "-"]
        if "failed" in row:
            cells = [row["failed"][:60], *[""] * len(MEASURES)]
        lines.append((row["shape"], row["contender"], *cells, shown_mb(row)))
    return [table(title, ("shape", "contender", *MEASURES, "to cuDNN", "peak MB"), lines)]
