"""Measure GPU time (between events, launches queued ahead), wall time (eager calls, host included)
and ceilings.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], object]
LONG = 20.0  # milliseconds; a longer run is its own warm-up
# clocks (2 ms) that the device waits before timed runs, so that launches are queued ahead
LEAD = 4_000_000
CLOCKS = 3e9  # further clocks for each second of launching
MATMUL = 8192  # of the product that sets the ceiling
COPIED = 1 << 30  # bytes
FLUSHED = 256 << 20  # bytes that fill L2 with other lines
SPAN = 20.0  # milliseconds of eager calls in one measurement
MOST_CALLS = 100  # so that the queue of launches never fills up


def milliseconds(
    run: Run, times: int = 10, *, warm: int = 2, before: Run | None = None
) -> list[float]:
    """Return the GPU time of each run after ``warm`` others. ``before`` is not timed."""
    launching = 0.0
    for _ in range(warm):
        start = time.perf_counter()
        run()
        launching = time.perf_counter() - start
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    # at most: a first call may have compiled
    torch.cuda._sleep(LEAD + int(times * min(launching, 0.02) * CLOCKS))
    for first, last in events:
        if before:
            before()
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


def flush_of(device: torch.device) -> Run:
    """Return a run after which L2 holds lines of another buffer."""
    buffer, total = torch.ones(FLUSHED // 4, device=device), torch.empty((), device=device)
    return partial(torch.sum, buffer, 0, out=total)


def take_turns(
    runs: Sequence[tuple[Run, list[float]]], rounds: int, before: Run | None = None
) -> None:
    """Append the milliseconds of each run to its list, in rounds of random order."""
    order = [(run, times, milliseconds(run, 1, warm=1)[0]) for run, times in runs]
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for run, times, expected in order:
            count, warm = (1, 0) if expected > LONG else (3, 1)
            times += milliseconds(run, count, warm=warm, before=before)


@dataclass
class Eager:
    """Milliseconds of an eager call, one entry for each round. ``around`` is not timed."""

    run: Run
    wall_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def listed(cls, row: dict, name: str, run: Run, **options: Any) -> "Eager":
        """Return one whose times are NAME_wall_ms and NAME_host_ms of a row."""
        made, name = cls(run, **options), f"{name}_" if name else ""
        row[f"{name}wall_ms"], row[f"{name}host_ms"] = made.wall_ms, made.host_ms
        return made


def eager(run: Run, calls: int, device: torch.device) -> tuple[float, float]:
    """Return (wall, host) milliseconds of a call."""
    if several := dist.is_initialized():
        dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    returned = time.perf_counter()
    synchronize(device)
    finished = time.perf_counter()
    wall, host = 1e3 * (finished - start) / calls, 1e3 * (returned - start) / calls
    return (slowest(wall, device), slowest(host, device)) if several else (wall, host)


def eager_rounds(
    runs: Sequence[Eager], rounds: int, device: torch.device, span: float = SPAN
) -> None:
    """Measure all runs in random order, about ``span`` milliseconds each."""
    order = []
    for one in runs:
        with one.around():
            one.run()
            expected, _ = eager(one.run, 2, device)
        order.append((one, max(2, min(MOST_CALLS, round(span / expected)))))
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for one, calls in order:
            with one.around():
                wall, host = eager(one.run, calls, device)
            one.wall_ms.append(wall)
            one.host_ms.append(host)


def peak_mb(run: Run, device: torch.device) -> float | None:
    """Return the most memory (10^6 bytes) that a run adds; None without a GPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def median_of(row: dict, name: str, form: str = ".2f", scale: float = 1.0) -> str:
    """Return the median of a list of a row, "-" without one."""
    return format(scale * statistics.median(row[name]), form) if row.get(name) else "-"


def clocks(row: dict, name: str) -> str:
    """Return the median wall and host time of a pass."""
    wall, host = (median_of(row, f"{name}_{clock}_ms", ".3f") for clock in ("wall", "host"))
    return wall if wall == "-" else f"{wall} ({host})"


def shown_mb(row: dict) -> str:
    """Return the column "peak MB" of a row."""
    return "-" if row.get("peak_mb") is None else f"{row['peak_mb']:.0f}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """Return a table of plain text."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=title)
    for name in columns:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def slowest(milliseconds: float, device: torch.device) -> float:
    """Return the largest number of all ranks."""
    longest = torch.tensor([milliseconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def ceilings(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return medians: TFLOP/s of a square product, and TB/s of a copy, read and written."""
    a, b = (torch.randn(MATMUL, MATMUL, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplied = statistics.median(milliseconds(lambda: torch.mm(a, b, out=product), 20, warm=5))
    moved = statistics.median(milliseconds(lambda: target.copy_(source), 20, warm=5))
    return {"matmul_tflops": 2 * MATMUL**3 / multiplied / 1e9, "copy_tbs": 2 * COPIED / moved / 1e9}
