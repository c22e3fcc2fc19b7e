"""Time on a GPU: of runs that take turns, between events, and what the device can do at best, measured beside them."""

import random
import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]
LONG = 20.0  # milliseconds from which on a run is its own warm-up
LEAD = 4_000_000  # clocks, about 2 ms, that the device waits before timed runs: launches get ahead of it,
CLOCKS = 3e9  # and so many for each second that they take
MATMUL = 8192  # rows and columns of the product that sets the ceiling
COPIED = 1 << 30  # bytes


def milliseconds(run: Run, times: int = 10, *, warm: int = 2) -> list[float]:
    """Of each run, between events, after ``warm`` that are not counted: the time of the device, not of the launches."""
    launching = 0.0
    for _ in range(warm):
        start = time.perf_counter()
        run()
        launching = time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda._sleep(LEAD + int(times * min(launching, 0.02) * CLOCKS))  # at most: a first call may have compiled
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def take_turns(runs: list[tuple[Run, list[float]]], rounds: int) -> None:
    """Appends the milliseconds of each run to its list: round by round, one after the other, so that a clock that drifts
    drifts for all; each round in another order, as a GPU is faster behind a slow kernel that has let it cool. A round runs a
    short one once to warm up and three times, a long one once."""
    order = [(run, times, milliseconds(run, 1, warm=1)[0]) for run, times in runs]
    shuffled = random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for run, times, expected in order:
            times += milliseconds(run, 1, warm=0) if expected > LONG else milliseconds(run, 3, warm=1)


def ceilings(dtype: torch.dtype, device: torch.device, size: int = MATMUL, copied: int = COPIED) -> dict[str, float]:
    """TFLOP/s of a square product of ``size`` in this dtype and TB/s of a copy on the device, read and written: medians."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplied = statistics.median(milliseconds(lambda: torch.mm(a, b, out=product), 20, warm=5))
    moved = statistics.median(milliseconds(lambda: target.copy_(source), 20, warm=5))
    return {"matmul_tflops": 2 * size**3 / multiplied / 1e9, "copy_tbs": 2 * copied / moved / 1e9}
