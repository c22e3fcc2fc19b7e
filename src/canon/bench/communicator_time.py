"""`canon bench communicators`: time steps under DDP, with and without `canon.fast.own_communicators`, and the memory of NCCL.

A step is both passes of layers with attention. By default DDP and attention share a communicator.
Windows of steps alternate between both ways. The longest window shows stalls, and a time limit ends a run that hangs.

    step       wall time of a step, of each window
    both       wall time of both passes of attention alone
    MB         GPU memory of one own communicator when it is made, and that of all NCCL buffers in the first step
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from canon.bench.schedules import check_ranks, of_all_shapes
from canon.bench.shapes import Shape, asked_for, shapes_of
from canon.bench.timing import eager, slowest, synchronize, table
from canon.masks.layout import Layout
from canon.testing import process_groups

SHAPES = ["1,8192,32,8,128,causal", "1,32768,32,8,128,causal"]
STEPS, WINDOW, LAYERS = 1000, 20, 2
LIMIT = 570.0  # seconds


class Model(nn.Module):
    """Layers of attention between linear maps."""

    def __init__(self, shape: Shape, attend: Callable[..., Tensor]):
        super().__init__()
        self.heads, self.d, self.attend = [shape.h, shape.g, shape.g], shape.d, attend
        width = shape.h * shape.d
        self.ins = nn.ModuleList(nn.Linear(width, sum(self.heads) * shape.d, bias=False) for _ in range(LAYERS))
        self.outs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for first, last in zip(self.ins, self.outs, strict=True):
            q, k, v = first(x).unflatten(-1, (-1, self.d)).split(self.heads, dim=2)
            x = x + last(self.attend(q, k, v).flatten(2))
        return x


@dataclass(frozen=True)
class Bench:
    """A picklable program for every rank. It returns the same rows on all ranks."""

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    only: str
    device: str = "cuda"
    steps: int = STEPS
    keep: Callable[[list[dict]], object] | None = None  # called on rank 0 after each schedule, with all rows so far

    def __call__(self) -> list[dict]:
        return of_all_shapes(self, lambda shape, device: measure(shape, self.dtype, device, self.only, self.steps))


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, only: str, steps: int) -> Iterator[list[dict]]:
    """Yield two rows for each schedule: without and with own communicators."""
    from canon import fast

    layout = Layout.zigzag(shape.n, dist.get_world_size())
    groups = {own: dist.new_group() for own in (False, True)}
    for group in groups.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL makes it now
    before = nccl_mb(device)
    fast.own_communicators(groups[True])
    made = (nccl_mb(device) - before) / 2
    for name in ("ring_attention", "strided_attention", "magi_attention"):
        if not asked_for(name, only):
            continue
        ways = []
        for own, group in groups.items():
            attend = partial(getattr(fast, name), mask=shape.mask, layout=layout, group=group)
            row: dict[str, Any] = {
                "schedule": name,
                "own": own,
                "shape": str(shape),
                "ranks": layout.ranks,
                "peer": False,
            }
            row |= {"steps": steps, "communicator_mb": made, "step_wall_ms": [], "both_wall_ms": []}
            ways.append((row, *_passes(shape, dtype, device, attend, layout, group)))
        yield _timed(ways, steps, device)


def _timed(ways: list[tuple], steps: int, device: torch.device) -> list[dict]:
    found = []
    for row, step, both in ways:
        before = nccl_mb(device)
        step()
        row["first_step_mb"] = nccl_mb(device) - before
        found.append(both())
    equal = torch.tensor([int(all(map(torch.equal, *found)))], device=device)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    window = min(WINDOW, steps)
    for _ in range(steps // window if equal.item() else 0):
        for row, step, both in ways:
            for name, run in (("step", step), ("both", both)):
                dist.barrier()
                wall, _ = eager(run, window, device)
                row[f"{name}_wall_ms"].append(slowest(wall, device))
    rows = [row for row, _, _ in ways]
    return rows if equal.item() else [row | {"failed": "own communicators change the bits"} for row in rows]


def _passes(
    shape: Shape, dtype: torch.dtype, device: torch.device, attend: Callable, layout: Layout, group
) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
    """Return a step of a model under DDP, and both passes of attention alone."""
    torch.manual_seed(0)  # equal parameters on all ranks
    model = DistributedDataParallel(Model(shape, attend).to(device, dtype), process_group=group)
    x = torch.randn(shape.b, layout.size(dist.get_rank()), shape.h * shape.d, dtype=dtype, device=device)
    *leaves, dout = (layout.shard(y, dist.get_rank()).requires_grad_() for y in shape.inputs(dtype, device))

    def step() -> None:
        model.zero_grad()
        model(x).backward(x)

    def both() -> list[Tensor]:
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.detach())]

    return step, both


def nccl_mb(device: torch.device) -> float:
    """Return the GPU memory in use (10^6 bytes) that PyTorch's allocator does not hold; 0 on a CPU."""
    synchronize(device)
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 1e6


def program(options: argparse.Namespace) -> Bench:
    """Return the program of the command. Raises ValueError."""
    shapes = shapes_of(options.shape or [], options.mask or [], SHAPES)
    check_ranks(options)
    return Bench(tuple(shapes), getattr(torch, options.dtype), options.only)


def measured(made: Bench, ranks: int | None = None) -> Iterator[list[dict]]:
    """Yield all rows. Raises TimeoutError if the steps do not end in time."""
    yield process_groups.gpus(made, ranks, timeout=LIMIT)[0]


def tables(rows: list[dict]) -> list:
    """Return a table of medians, and the longest window."""
    columns = "shape", "schedule", "own", "step ms", "longest", "both ms", "communicator MB", "first step MB"
    lines = []
    for row in rows:
        times = [f"{f(row[x]):.2f}" if row[x] else row.get("failed", "-") for f, x in (
            (statistics.median, "step_wall_ms"), (max, "step_wall_ms"), (statistics.median, "both_wall_ms"),
        )]  # fmt: skip
        memory = [f"{row[name]:.0f}" for name in ("communicator_mb", "first_step_mb")]
        lines.append((row["shape"], row["schedule"], "own" if row["own"] else "shared", *times, *memory))
    return [table("wall time, medians and the longest window of steps; memory of NCCL", columns, lines)]
