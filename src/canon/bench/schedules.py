"""`canon bench schedules`: time every schedule of `canon.fast`, torch's context parallel and
ring-flash-attn on several GPUs.

Each schedule must agree with float64 on a short sequence. Then rounds alternate between the
schedules. All times are those of the slowest rank:

    wall, host    eager calls back to back, without a head start
    graph         wall time of a replayed CUDA graph of both passes
    GPU           between events; the GPUs wait until the launches are queued, and then for one
                  another
    exposed       the part of both passes in which no kernel computes, by the profiler: the median
                  of several runs

Peers run in processes of their own. A schedule that raises on one rank is left out on all.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench import ring_flash_attn_peer
from canon.bench.cuda_graph import captured
from canon.bench.peers import both_passes, installed, verdict_row
from canon.bench.schedule_peers import Schedule, peer_schedules, schedules
from canon.bench.shapes import Shape, asked_for, shape_of, shapes_of
from canon.bench.timing import eager, peak_mb, shown_mb, slowest, table
from canon.masks.layout import Layout
from canon.testing import process_groups
from canon.testing.judge import Attended, agreement, dense, oracle

SHAPES = ["1,32768,32,8,128,causal", "1,131072,32,8,128,causal"]
CHECKED = 4096  # tokens of the sequence on which agreement is checked
LARGEST_ALONE = 131072  # tokens that one GPU attends to alone
LIMIT, PEERS_LIMIT = 400.0, 250.0  # seconds for Canon, and for its peers
PROFILED = 5  # runs under the profiler, which delays the host now and then
AHEAD = 60_000_000  # clocks that GPUs wait for launches: 30 ms
# Elements of the message that synchronises the ranks. The first message after a pause is 75 us
# slower on H200s.
MEETING = 1 << 22
EAGER_SPAN = 60.0  # milliseconds of eager calls in one measurement
AGREEING = timedelta(seconds=60)  # a failed rank waits so long for the results of the others


@dataclass(frozen=True)
class Bench:
    """A picklable program for every rank. It returns the same rows on all ranks."""

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    only: str
    rounds: int
    device: str = "cuda"
    peers: bool = False  # the peers instead of Canon's schedules
    # called on rank 0 after each shape, with all rows so far
    keep: Callable[[list[dict]], object] | None = None

    def __call__(self) -> list[dict]:
        group = dist.new_group(backend="gloo", timeout=AGREEING) if self.device == "cuda" else None
        given: dict[str, Any] = {"peers": self.peers, "group": group}
        return of_all_shapes(
            self,
            lambda shape, device: [
                measure(shape, self.dtype, device, self.only, self.rounds, **given)
            ],
        )


def of_all_shapes(
    program: Any, measure: Callable[[Shape, torch.device], Iterable[list[dict]]]
) -> list[dict]:
    """Return all rows of ``measure(shape, device)``, for the shapes and the device of a `Bench`,
    and keep them on rank 0.
    """
    on_gpu = program.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rows: list[dict] = []
    for shape in program.shapes:
        for some in measure(shape, device):
            rows += some
            if program.keep and not dist.get_rank():
                program.keep(rows)
    return rows


def measure(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    only: str,
    rounds: int,
    *,
    peers: bool = False,
    group=None,
) -> list[dict]:
    """Return a row per schedule. ``group`` works even if a GPU's communicator does not."""
    ranks = dist.get_world_size()
    short = shape_of(
        f"{shape.b},{min(shape.n, CHECKED)},{shape.h},{shape.g},{shape.d}", shape.mask_name
    )
    way = "torch" if peers else dist.get_backend()
    listed = partial(peer_schedules, device=device.type) if peers else schedules
    verdicts = {
        each.name: _tried(each, partial(_agrees, each, short, dtype, device), group)
        for each in listed(short, ranks, only)
    }
    contenders = listed(shape, ranks, only) + ([] if peers else _alone(shape, only))
    rows, runs = [], []
    for each in contenders:
        row = {
            "schedule": each.name,
            "shape": str(shape),
            "ranks": ranks,
            "transport": way,
            "peer": each.peer,
        }
        rows.append(row := row | verdicts.get(each.name, {}))
        if "failed" in row:
            continue
        ready = _tried(each, partial(_ready, each, shape, dtype, device), group)
        for name, run in ready.pop("passes", {}).items():
            row[f"{name}_ms"], row[f"{name}_launches_ms"] = times = [], []
            runs.append((each, run, times, row, name))
        row |= ready
    for turn in range(rounds + 1):  # the first one is not counted
        for each, run, times, _, _ in runs:
            with each.around():
                taken = [slowest(x, device) for x in _timed(run, device)]
            for some, x in zip(times, taken, strict=True):
                some += [x] if turn else []
    for each, run, times, row, name in runs:
        _eager(row, name, each, run, statistics.median(times[0]), rounds, device)
    for each, _, _, row, name in runs:
        if name == "both" and not each.peer:
            _replay(row, each, _shards(each, shape, dtype, device), rounds, device, group)
    for row in rows:
        share = 1 if row["schedule"] == "one GPU" else ranks
        for name, factor in (("forward", 1.0), ("both", 3.5)):
            if times := row.get(f"{name}_ms"):
                row[f"{name}_tflops"] = (
                    factor * shape.operations / share / statistics.median(times) / 1e9
                )
        _refuse_impossible(row)
    return rows


def _refuse_impossible(row: dict) -> None:
    """Put a reason in the place of ``exposed_ms`` where it is longer than both passes, of which it
    is a part.
    """
    if (both := row.get("both_ms")) and row.get("exposed_ms", 0.0) > statistics.median(both):
        row["exposed_failed"] = (
            f"{row.pop('exposed_ms'):.2f} ms, longer than both passes: the profiler delayed the "
            "host"
        )


def _eager(
    row: dict,
    name: str,
    each: Schedule,
    run: Callable,
    expected: float,
    rounds: int,
    device: torch.device,
) -> None:
    wall, host = row[f"{name}_wall_ms"], row[f"{name}_host_ms"] = [], []
    calls = max(2, min(30, round(EAGER_SPAN / expected)))  # the same on all ranks
    for _ in range(rounds):
        with each.around():
            dist.barrier()
            taken = eager(run, calls, device)
        for some, x in zip((wall, host), taken, strict=True):
            some.append(slowest(x, device))


def _replay(
    row: dict, each: Schedule, inputs: list[Tensor], rounds: int, device: torch.device, group
) -> None:
    """Time a replayed graph, then free it: all pools together may exceed a GPU."""
    made = _tried(each, lambda: {"passes": captured(each.attend, *inputs)}, group)
    if "failed" not in made:  # on any rank: a replay sends messages
        made |= _tried(each, made["passes"].check, group)
    if "failed" in made:
        row["graph_failed"] = made["failed"]
        return
    _eager(
        row,
        "graph",
        each,
        made["passes"].graph.replay,
        statistics.median(row["both_wall_ms"]),
        rounds,
        device,
    )


def _alone(shape: Shape, only: str) -> list[Schedule]:
    from canon.fast import attention

    if not asked_for("one GPU", only) or shape.n > LARGEST_ALONE:
        return []
    return [
        Schedule(
            "one GPU", Layout([[range(shape.n)]], shape.n), partial(attention, mask=shape.mask)
        )
    ]


def _tried(each: Schedule, call: Callable[[], dict[str, Any] | None], group) -> dict[str, Any]:
    """Return the result of ``call``, or the reason if it fails on any rank."""
    told: dict[str, Any] = {}
    error = ""
    try:
        with each.around():
            told = call() or {}
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    fine = torch.tensor([int(not error)])
    dist.all_reduce(fine, dist.ReduceOp.MIN, group=group)
    return told if fine.item() else {"failed": error or "another rank failed"}


def _shards(each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    rank = dist.get_rank() if each.layout.ranks > 1 else 0
    return [each.layout.shard(x, rank) for x in shape.inputs(dtype, device)]


def _agrees(
    each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    q, k, v, dout = _shards(each, shape, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = each.attend(*leaves, return_lse=True)
    got = [out, *torch.autograd.grad(out, leaves, dout)]
    group = shape.h // shape.g
    full = [
        each.layout.unshard(x.detach())[:, :, :h]
        for x, h in zip(got, (group, group, 1, 1), strict=True)
    ]
    if lse is not None:
        lse = each.layout.unshard(lse.detach(), dim=2)[:, :group]
    one = [
        x[:, :, :h] for x, h in zip(shape.inputs(dtype, device), (group, 1, 1, group), strict=True)
    ]
    verdict = agreement(
        Attended(full[0], lse, *full[1:]), oracle(*one, shape.mask), dense(*one, shape.mask)
    )
    return verdict_row(verdict)


def _ready(
    each: Schedule, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    q, k, v, dout = _shards(each, shape, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            each.attend(*leaves)

    both = partial(both_passes, each.attend, leaves, dout)
    exposed = _exposed(both, device)
    peak = peak_mb(both, device)
    more = {} if peak is None else {"peak_mb": slowest(peak, device)}  # of the rank with the most
    return {"passes": {"forward": forward, "both": both}, "exposed_ms": exposed, **more}


def _timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meet(device)
    first.record()
    start = time.perf_counter()
    run()
    launched = time.perf_counter() - start
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last), 1e3 * launched


def _exposed(run: Callable[[], object], device: torch.device) -> float:
    """Return for how many milliseconds no kernel computes on the slowest rank: the median of
    `PROFILED` runs.
    """
    run()
    return statistics.median(
        slowest(uncovered(_profiled(run, device)) / 1e3, device) for _ in range(PROFILED)
    )


def _profiled(run: Callable[[], object], device: torch.device) -> list[tuple[float, float, str]]:
    """Return (start, end, name) of each activity of the GPU, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        meet(device)
        run()
        torch.cuda.synchronize(device)
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def meet(device: torch.device) -> None:
    """Let all GPUs wait until launches are queued, and then for one another:
    their clocks differ.
    """
    dist.barrier()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD)
    dist.all_reduce(torch.zeros(MEETING, device=device))


def after_meeting(ran: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return what ran after the message of `meet`, if it ran, from (start, end, name) of each
    activity.
    """
    waited = max((end for _, end, name in ran if "spin_kernel" in name), default=None)
    if waited is None:
        return ran
    met = min(
        (end for start, end, name in ran if "nccl" in name.lower() and start >= waited),
        default=waited,
    )
    return [one for one in ran if one[0] >= met]


def uncovered(ran: list[tuple[float, float, str]]) -> float:
    """Return how long no kernel but NCCL's ran after `meet`, from (start, end, name) of each
    activity.
    """
    spans = sorted(after_meeting(ran))
    covered, reach = 0.0, spans[0][0] if spans else 0.0
    for start, end, name in spans:
        if "nccl" not in name.lower() and "memcpy" not in name.lower():
            covered += max(0.0, end - max(start, reach))
            reach = max(reach, end)
    return (
        max((end for _, end, _ in spans), default=0.0) - (spans[0][0] if spans else 0.0) - covered
    )


def program(options: argparse.Namespace) -> Bench:
    """Return the program of the command. Raises ValueError."""
    shapes = shapes_of(options.shape or [], options.mask or [], SHAPES)
    if any(shape.keys != shape.n for shape in shapes):
        raise ValueError("schedules needs as many keys as queries: full, not full:KEYS")
    check_ranks(options)
    return Bench(tuple(shapes), getattr(torch, options.dtype), options.only, options.rounds)


def check_ranks(options: argparse.Namespace) -> None:
    """Raise ValueError unless --ranks is one number, of GPUs here, or is not given."""
    if options.ranks and (len(options.ranks) > 1 or options.ranks[0] > torch.cuda.device_count()):
        raise ValueError(
            f"--ranks {options.ranks}: expected one number, of the "
            f"{torch.cuda.device_count()} GPUs here"
        )


def measured(made: Bench, ranks: int | None = None) -> Iterator[list[dict]]:
    """Yield the rows of Canon's schedules, then those of the peers."""
    yield process_groups.gpus(made, ranks, timeout=LIMIT)[0]
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if any(peer_schedules(shape, ranks, made.only, made.device) for shape in made.shapes):
        yield peer_rows(
            partial(
                process_groups.gpus,
                replace(made, peers=True, keep=None),
                ranks,
                timeout=PEERS_LIMIT,
            )
        )


def peers() -> dict[str, str]:
    """Return the versions of the peers outside torch, or why one is absent."""
    return installed() | {"ring-flash-attn": ring_flash_attn_peer.installed()}


def peer_rows(run: Callable[[], list[list[dict]]]) -> list[dict]:
    """Return the rows of the peers, or one row with their failure."""
    try:
        return run()[0]
    except (RuntimeError, TimeoutError) as error:
        return [
            {
                "schedule": "torch",
                "shape": "all",
                "peer": True,
                "failed": f"{type(error).__name__}: {error}"[:300],
            }
        ]


def tables(rows: list[dict]) -> list:
    """Return a table of medians."""
    times = ("both_wall_ms", "both_host_ms", "graph_wall_ms", "both_ms", "exposed_ms")
    columns = (
        "shape",
        "schedule",
        "agrees",
        "wall ms",
        "host ms",
        "graph ms",
        "both ms",
        "exposed ms",
        "forward",
        "both",
    )
    title = (
        "both passes, medians: eager calls, replayed graph, GPU time; TFLOP/s per GPU of GPU "
        "time; memory"
    )
    lines = []
    for row in rows:
        speeds = [f"{row[x]:.0f}" if x in row else "-" for x in ("forward_tflops", "both_tflops")]
        verdict = row.get("failed") or (
            (f"{row['agrees']} ({row['worst']})") if "agrees" in row else "-"
        )
        shown_ms = [f"{np.median(row[name]):.2f}" if name in row else "-" for name in times]
        lines.append((row["shape"], row["schedule"], verdict, *shown_ms, *speeds, shown_mb(row)))
    return [table(title, (*columns, "peak MB"), lines)]
