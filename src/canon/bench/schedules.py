"""`canon bench schedules`: time every schedule of `canon.fast`, and the peers, on several GPUs.

Each schedule must agree with float64 on a short sequence. All times are those of the slowest rank:

    wall, host    eager calls back to back
    GPU           between events; the GPUs first wait until launches are queued, and for one another
    exposed       the part of both passes in which no kernel computes, by the profiler

A schedule that raises on one rank is left out on all.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench import magi_attention_peer, ring_flash_attn_peer
from canon.bench.measuring import (
    Judge,
    Settings,
    add_tflops,
    both_passes,
    reason,
    verdict_of,
)
from canon.bench.on_ranks import OnRanks
from canon.bench.peers import installed
from canon.bench.schedule_peers import Schedule, peer_schedules, schedules
from canon.bench.shapes import Shape, shape_of
from canon.bench.timing import Eager, eager_rounds, median_of, peak_mb, shown_mb, slowest, table
from canon.masks.layout import Layout

SHAPES = ["1,32768,32,8,128,causal", "1,131072,32,8,128,causal"]
CHECKED = 4096  # tokens on which agreement is checked
LARGEST_ALONE = 131072  # tokens that one GPU attends to alone
LIMIT, PEERS_LIMIT = 400.0, 250.0  # seconds for Canon, and for its peers
PROFILED = 5  # runs under the profiler, which delays the host now and then
AHEAD = 60_000_000  # clocks that GPUs wait for launches: 30 ms
# Elements of the message that synchronises the ranks. The first message after a pause is 75 us
# slower on H200s.
MEETING = 1 << 22
EAGER_SPAN = 60.0  # milliseconds of eager calls in one measurement
AGREEING = timedelta(seconds=60)  # a failed rank waits so long for the results of the others


def measure(shape: Shape, settings: Settings, *, peers: bool = False) -> list[dict[str, Any]]:
    """Return a row for each of Canon's schedules, or of the ``peers``; the same on all ranks."""
    device, rounds, ranks = settings.device, settings.rounds, dist.get_world_size()
    # it works even if a GPU's communicator does not
    group = dist.new_group(backend="gloo", timeout=AGREEING) if device.type == "cuda" else None
    sizes = f"{shape.b},{min(shape.n, CHECKED)},{shape.h},{shape.g},{shape.d}"
    short = shape_of(f"{sizes},{shape.mask_name}")
    listed = peer_schedules if peers else schedules
    judge = Judge(short, *short.inputs(settings.dtype, device))
    verdicts = {
        each.name: _tried(each, partial(_agrees, each, short, judge, settings), group)
        for each in listed(short, ranks, settings)
    }
    transport = "torch" if peers else dist.get_backend()
    fields = {"shape": str(shape), "ranks": ranks, "transport": transport}
    rows, runs = [], []
    for each in listed(shape, ranks, settings) + ([] if peers else _alone(shape, settings)):
        row = {"schedule": each.name, **fields, "peer": each.peer}
        rows.append(row := row | verdicts.get(each.name, {}))
        if "failed" in row:
            continue
        ready = _tried(each, partial(_ready, each, shape, settings), group)
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
    eager = [Eager.listed(row, name, run, around=each.around) for each, run, _, row, name in runs]
    eager_rounds(eager, rounds, device, EAGER_SPAN)
    for row in rows:
        share = 1 if row["schedule"] == "one GPU" else ranks
        add_tflops(row, shape.operations / share, forward=1.0, both=3.5)
        if (both := row.get("both_ms")) and row.get("exposed_ms", 0.0) > statistics.median(both):
            row["exposed_failed"] = (
                f"{row.pop('exposed_ms'):.2f} ms, longer than both passes: the profiler delayed "
                "the host"
            )
    return rows


def _alone(shape: Shape, settings: Settings) -> list[Schedule]:
    from canon.fast import attention

    if not settings.wants("one GPU") or shape.n > LARGEST_ALONE:
        return []
    layout = Layout([[range(shape.n)]], shape.n)
    return [Schedule("one GPU", layout, partial(attention, mask=shape.mask))]


def _tried(each: Schedule, call: Callable[[], dict[str, Any] | None], group) -> dict[str, Any]:
    result: dict[str, Any] = {}
    error = ""
    try:
        with each.around():
            result = call() or {}
    except Exception as raised:
        error = reason(raised)
    fine = torch.tensor([int(not error)])
    dist.all_reduce(fine, dist.ReduceOp.MIN, group=group)
    return result if fine.item() else {"failed": error or "another rank failed"}


def _leaves(each: Schedule, shape: Shape, settings: Settings) -> tuple[list[Tensor], Tensor]:
    rank, inputs = dist.get_rank(), shape.inputs(settings.dtype, settings.device)
    *leaves, dout = (each.layout.shard(x, rank % each.layout.ranks) for x in inputs)
    return [x.requires_grad_() for x in leaves], dout


def _agrees(each: Schedule, shape: Shape, judge: Judge, settings: Settings) -> dict[str, Any]:
    leaves, dout = _leaves(each, shape, settings)
    out, lse = each.attend(*leaves, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    full = [each.layout.unshard(x.detach()) for x in (out, *gradients)]
    lse = None if lse is None else each.layout.unshard(lse.detach(), dim=2)
    return judge.verdict(*full, lse=lse)


def _ready(each: Schedule, shape: Shape, settings: Settings) -> dict[str, Any]:
    leaves, dout = _leaves(each, shape, settings)
    forward = partial(torch.no_grad()(each.attend), *leaves)
    both = partial(both_passes, each.attend, leaves, dout)
    exposed, peak = _exposed(both, settings.device), peak_mb(both, settings.device)
    # of the rank with the most
    more = {} if peak is None else {"peak_mb": slowest(peak, settings.device)}
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
    """Let all GPUs wait until launches are queued, and then for one another."""
    dist.barrier()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD)
    dist.all_reduce(torch.zeros(MEETING, device=device))


def after_meeting(ran: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return the activities after the message of `meet`."""
    waited = max((end for _, end, name in ran if "spin_kernel" in name), default=None)
    if waited is None:
        return ran
    met = min(
        (end for start, end, name in ran if "nccl" in name.lower() and start >= waited),
        default=waited,
    )
    return [one for one in ran if one[0] >= met]


def uncovered(ran: list[tuple[float, float, str]]) -> float:
    """Return how long no kernel but NCCL's ran after `meet`."""
    spans = sorted(after_meeting(ran))
    covered, reach = 0.0, spans[0][0] if spans else 0.0
    for start, end, name in spans:
        if "nccl" not in name.lower() and "memcpy" not in name.lower():
            covered += max(0.0, end - max(start, reach))
            reach = max(reach, end)
    return (
        max((end for _, end, _ in spans), default=0.0) - (spans[0][0] if spans else 0.0) - covered
    )


def check(shape: Shape) -> None:
    """Raise ValueError unless schedules support the shape."""
    if shape.keys != shape.n:
        raise ValueError("schedules needs as many keys as queries: full, not full:KEYS")


def on_ranks(program: OnRanks, ranks: int | None) -> Iterator[list[dict]]:
    """Yield Canon's rows, then those of the peers."""
    yield program.on_gpus(ranks, LIMIT)
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if any(peer_schedules(shape, ranks, program.settings) for shape in program.shapes):
        yield peer_rows(replace(program, measure=partial(measure, peers=True), keep=None), ranks)


def peer_rows(program: OnRanks, ranks: int | None) -> list[dict]:
    """Return the rows of the peers, or their failure."""
    try:
        return program.on_gpus(ranks, PEERS_LIMIT)
    except (RuntimeError, TimeoutError) as error:
        return [{"schedule": "torch", "shape": "all", "peer": True, "failed": reason(error)}]


def fields(settings: Settings) -> dict[str, Any]:
    """Return further fields of the record."""
    peers = installed() | {"ring-flash-attn": ring_flash_attn_peer.installed()}
    return {"peers": peers | {magi_attention_peer.NAME: magi_attention_peer.api()[1]}}


def tables(rows: list[dict]) -> list:
    """Return a table of medians."""
    times = ("both_wall_ms", "both_host_ms", "both_ms", "exposed_ms")
    columns = ("shape", "schedule", "agrees", "wall ms", "host ms", "both ms")
    columns += ("exposed ms", "forward", "both", "peak MB")
    title = "both passes, medians: eager calls, GPU time; TFLOP/s per GPU of GPU time; memory"
    lines = []
    for row in rows:
        row = row | {"exposed_ms": [row["exposed_ms"]]} if "exposed_ms" in row else row
        speeds = [f"{row[x]:.0f}" if x in row else "-" for x in ("forward_tflops", "both_tflops")]
        shown_ms = [median_of(row, name) for name in times]
        cells = row["shape"], row["schedule"], verdict_of(row), *shown_ms, *speeds
        lines.append((*cells, shown_mb(row)))
    return [table(title, columns, lines)]
