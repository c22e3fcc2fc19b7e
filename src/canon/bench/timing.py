"""Measure GPU time (between events, launches queued ahead), wall time (eager calls, host included)
and ceilings.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], object]
LONG = 20.0  # milliseconds; a longer run is its own warm-up
# clocks (about 2 ms) that the device waits before timed runs, so that launches are queued ahead
LEAD = 4_000_000
CLOCKS = 3e9  # further clocks for each second of launching
MATMUL = 8192  # rows and columns of the product that sets the ceiling
COPIED = 1 << 30  # bytes
SPAN = 20.0  # milliseconds of eager calls in one measurement
MOST_CALLS = 100  # in one measurement, so that the queue of launches never fills up


def milliseconds(run: Run, times: int = 10, *, warm: int = 2) -> list[float]:
    """Return the GPU time of each run, after ``warm`` runs that are not counted."""
    launching = 0.0
    for _ in range(warm):
        start = time.perf_counter()
        run()
        launching = time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    # at most: a first call may have compiled
    torch.cuda._sleep(LEAD + int(times * min(launching, 0.02) * CLOCKS))
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def take_turns(runs: list[tuple[Run, list[float]]], rounds: int) -> None:
    """Append the milliseconds of each run to its list, in rounds of random order: a drifting clock
    drifts for all.
    """
    order = [(run, times, milliseconds(run, 1, warm=1)[0]) for run, times in runs]
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for run, times, expected in order:
            times += (
                milliseconds(run, 1, warm=0) if expected > LONG else milliseconds(run, 3, warm=1)
            )


@dataclass
class Eager:
    """Milliseconds of an eager call: wall time and host time, one entry per round."""

    run: Run
    wall_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    @classmethod
    def listed(cls, row: dict, name: str, run: Run) -> "Eager":
        made = cls(run)
        row[f"{name}_wall_ms"], row[f"{name}_host_ms"] = made.wall_ms, made.host_ms
        return made


def clocks(row: dict, name: str) -> str:
    """Return the median wall time of a pass, and its host time in brackets; "-" if the row has
    none.
    """
    if not row.get(f"{name}_wall_ms"):
        return "-"
    wall, host = (statistics.median(row[f"{name}_{clock}_ms"]) for clock in ("wall", "host"))
    return f"{wall:.3f} ({host:.3f})"


def eager(run: Run, calls: int, device: torch.device) -> tuple[float, float]:
    """Return (wall, host) milliseconds of a call, averaged over ``calls``. Host time ends when the
    last call has returned.
    """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    returned = time.perf_counter()
    synchronize(device)
    finished = time.perf_counter()
    return 1e3 * (finished - start) / calls, 1e3 * (returned - start) / calls


def eager_rounds(runs: Sequence[Eager], rounds: int, device: torch.device) -> None:
    """Measure all runs in rounds of random order, about `SPAN` milliseconds each."""
    order = []
    for one in runs:
        one.run()
        expected, _ = eager(one.run, 2, device)
        order.append((one, max(2, min(MOST_CALLS, round(SPAN / expected)))))
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for one, calls in order:
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


def shown_mb(row: dict) -> str:
    """Return the column "peak MB" of a row."""
    return "-" if row.get("peak_mb") is None else f"{row['peak_mb']:.0f}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """Return a table of plain text."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def slowest(milliseconds: float, device: torch.device) -> float:
    """Return the largest number of all ranks."""
    longest = torch.tensor([milliseconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(
    dtype: torch.dtype, device: torch.device, size: int = MATMUL, copied: int = COPIED
) -> dict[str, float]:
    """Return medians: TFLOP/s of a square product, and TB/s of a copy, read and written."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplied = statistics.median(milliseconds(lambda: torch.mm(a, b, out=product), 20, warm=5))
    moved = statistics.median(milliseconds(lambda: target.copy_(source), 20, warm=5))
    return {"matmul_tflops": 2 * size**3 / multiplied / 1e9, "copy_tbs": 2 * copied / moved / 1e9}
