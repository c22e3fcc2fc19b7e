"""`canon bench schedules`: every schedule of `canon.fast` on several GPUs, on the same tokens, in the same run.

    canon bench schedules                                            all GPUs, causal, 32K and 128K tokens
    canon bench schedules --shape 1,65536,64,8,128 --mask documents:2048 --only magi
    canon bench schedules --ranks 4 --only strided

A rank is a process with a GPU. First each schedule attends to a short sequence of the same kind, and must agree with float64 by
the judge, in out, lse and gradients; then all are timed, taking turns, between events on every rank; a run lasts as long as
on the slowest rank. TFLOP/s per GPU count visible cells alone: 4 h d area / ranks forward, 3.5 times that for both passes.
"exposed" is the part of both passes in which no kernel but NCCL's runs, by the profiler, on the rank where it is longest: what
neither computing nor copying hides. "one GPU" is `attention` of the whole sequence on each GPU alone, where it fits.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.layout import Layout
from canon.testing import world
from canon.testing.bench import Shape, shape_of
from canon.testing.judge import Attended, agreement, dense, oracle

SHAPES = ["1,32768,32,8,128", "1,131072,32,8,128"]
CHECKED = 4096  # tokens of the sequence on which agreement is checked
LARGEST_ALONE = 131072  # tokens that one GPU attends to alone


@dataclass(frozen=True)
class Schedule:
    """A name, the layout of its tokens, and a function (q, k, v) -> (out, lse) of this rank's shards."""

    name: str
    layout: Layout
    attend: Callable[..., tuple[Tensor, Tensor]]


def schedules(shape: Shape, ranks: int, only: str) -> list[Schedule]:
    """Everything that is compared, filtered by a part of the name."""
    from canon import fast

    n, mask = shape.n, shape.mask
    layouts = {kind: getattr(Layout, kind)(n, ranks) for kind in ("contiguous", "zigzag", "striped")}
    found = [
        Schedule(f"ring {kind}", layout, partial(fast.ring_attention, mask=mask, layout=layout))
        for kind, layout in layouts.items()
    ]
    for kind in ("contiguous", "zigzag"):
        layout = layouts[kind]
        for stride in (s for s in (1, 2, 4, 8) if shape.g % s == 0):
            ends = {"forward_first_stride": 1, "backward_first_stride": 1}
            ends |= {"backward_last_stride": 1} if shape.g >= 2 * stride else {}
            for name, options in (("", {}), (", small ends", ends)):
                if stride > 1 or not options:
                    attend = partial(fast.strided_attention, mask=mask, layout=layout, head_stride=stride, **options)
                    found.append(Schedule(f"strided {kind} {stride}{name}", layout, attend))
    planned = fast.dispatch(mask, ranks, chunk=max(1, min(1024, n // (8 * ranks))))
    for stages in (0, 1, 2):
        attend = partial(fast.magi_attention, mask=mask, layout=planned, stages=stages)
        found.append(Schedule(f"magi, {stages} stages", planned, attend))
    return [schedule for schedule in found if only in schedule.name]


# ---------------------------------------------------------------------- on every rank
@dataclass(frozen=True)
class Bench:
    """A picklable program for every rank: returns a row per shape and schedule, the same on all ranks."""

    shapes: tuple[tuple[str, str], ...]
    dtype: torch.dtype
    only: str
    rounds: int
    device: str = "cuda"

    def __call__(self) -> list[dict]:
        device = (
            torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        )
        rows = []
        for text, mask_name in self.shapes:
            rows += measure(shape_of(text, mask_name), self.dtype, device, self.only, self.rounds)
        return rows


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, only: str, rounds: int) -> list[dict]:
    """A row per schedule: agreement, and the milliseconds of forward and of both passes on the slowest rank."""
    from canon.fast import attention
    from canon.fast.transport import transport_report

    ranks, way = dist.get_world_size(), transport_report(device)
    short = _shorter(shape)
    verdicts = {each.name: _agrees(each, short, dtype, device) for each in schedules(short, ranks, only)}
    rows, runs = [], []
    contenders = schedules(shape, ranks, only)
    if only in "one GPU" and shape.n <= LARGEST_ALONE:
        alone = Layout([[range(shape.n)]], shape.n)
        contenders.append(Schedule("one GPU", alone, partial(attention, mask=shape.mask)))
    for each in contenders:
        row: dict[str, Any] = {"schedule": each.name, "shape": str(shape), "ranks": ranks, "transport": way}
        rows.append(row | verdicts.get(each.name, {}))
        if "failed" in rows[-1]:
            continue
        forward, both = _passes(each, shape, dtype, device)
        rows[-1] |= {"forward_ms": [], "both_ms": []}
        runs += [(forward, rows[-1]["forward_ms"]), (both, rows[-1]["both_ms"])]
        rows[-1]["exposed_ms"] = _exposed(both, device)
    for turn in range(rounds + 1):  # the first one is not counted
        for run, times in runs:
            taken = _slowest(_timed(run, device), device)
            times += [taken] if turn else []
    for row in rows:
        share = 1 if row["schedule"] == "one GPU" else ranks
        for name, factor in (("forward", 1.0), ("both", 3.5)):
            if times := row.get(f"{name}_ms"):
                row[f"{name}_tflops"] = factor * shape.operations / share / statistics.median(times) / 1e9
    return rows


def _shorter(shape: Shape) -> Shape:
    text = f"{shape.b},{min(shape.n, CHECKED)},{shape.h},{shape.g},{shape.d}"
    return shape_of(text, shape.mask_name)


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on all ranks."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = (shape.h, shape.g, shape.g, shape.h)
    return [torch.randn(shape.b, shape.n, h, shape.d, generator=draw, dtype=dtype, device=device) for h in sizes]


def _shards(each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    rank = dist.get_rank() if each.layout.ranks > 1 else 0
    return [each.layout.shard(x, rank) for x in _inputs(shape, dtype, device)]


def _agrees(each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The judge's verdict on one key head and its queries."""
    q, k, v, dout = _shards(each, shape, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = each.attend(*leaves, return_lse=True)
    got = [out, lse, *torch.autograd.grad(out, leaves, dout)]
    full = [each.layout.unshard(x.detach(), dim=2 if i == 1 else 1) for i, x in enumerate(got)]
    group = shape.h // shape.g
    heads = [full[0][:, :, :group], full[1][:, :group], full[2][:, :, :group], full[3][:, :, :1], full[4][:, :, :1]]
    one = [x[:, :, :h] for x, h in zip(_inputs(shape, dtype, device), (group, 1, 1, group), strict=True)]
    verdict = agreement(Attended(*heads), oracle(*one, shape.mask), dense(*one, shape.mask))
    worst = verdict.worst
    told = {"agrees": verdict.agrees, "worst": f"{worst.tensor} {worst.norm} {worst.ratio:.2f}" if worst else ""}
    return told if verdict.agrees else told | {"failed": f"disagrees: {verdict}"}


def _passes(each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Callable, Callable]:
    q, k, v, dout = _shards(each, shape, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            each.attend(*leaves)

    return forward, lambda: torch.autograd.grad(each.attend(*leaves), leaves, dout)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds between events, all ranks having started together."""
    dist.barrier()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def _slowest(milliseconds: float, device: torch.device) -> float:
    longest = torch.tensor([milliseconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def _exposed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from the first kernel of a run to its last in which nothing but NCCL or copies ran; the longest rank's."""
    from torch.profiler import ProfilerActivity, profile

    run()
    dist.barrier()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy = [(start, end) for start, end, name in spans if "nccl" not in name.lower() and "memcpy" not in name.lower()]
    covered, reach = 0.0, spans[0][0] if spans else 0.0
    for start, end in busy:
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    whole = max((end for _, end, _ in spans), default=0.0) - (spans[0][0] if spans else 0.0)
    return _slowest((whole - covered) / 1e3, device)


# ---------------------------------------------------------------------- the command
def run(options: argparse.Namespace) -> list[dict]:
    """The rows that ``canon bench schedules`` asks for. Raises ValueError if there are too few GPUs or a shape is wrong."""
    shapes = tuple((text, mask) for text in options.shape or SHAPES for mask in options.mask or ["causal"])
    for text, mask in shapes:
        shape_of(text, mask)
    program = Bench(shapes, getattr(torch, options.dtype), options.only, options.rounds)
    return world.gpus(program, options.ranks[0] if options.ranks else None, timeout=580)[0]


def table(rows: list[dict]):
    """Medians, and what no kernel hides."""
    from rich.table import Table

    shown = Table("shape", "schedule", "agrees", "forward", "both", "exposed ms", title="TFLOP/s per GPU (median)")
    for row in rows:
        speeds = [f"{row[x]:.0f}" if x in row else "-" for x in ("forward_tflops", "both_tflops")]
        verdict = row.get("failed") or (f"{row['agrees']} ({row['worst']})" if "agrees" in row else "-")
        exposed = f"{row['exposed_ms']:.2f}" if "exposed_ms" in row else "-"
        shown.add_row(row["shape"], row["schedule"], verdict, *speeds, exposed)
    return shown
