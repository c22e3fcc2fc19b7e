"""Records of H200s, and the rates that the notebooks compare with their predictions."""

import json
from pathlib import Path
from typing import Any

from spans import KERNELS, Span, by_rank

FOLDER = Path("../paper/data")


def load(name: str) -> dict[str, Any]:
    """Return a record of `paper/data`."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def matmul_rate() -> float:
    """Return the FLOP/s of a large matrix product on one H200."""
    return 1e12 * load("kernels_peers_h200")["ceilings"]["matmul_tflops"]


def copy_rate() -> float:
    """Return the bytes/s of a copy in the memory of one H200, read and written."""
    return 1e12 * load("kernels_peers_h200")["ceilings"]["copy_tbs"]


def timeline(schedule: str) -> list[list[tuple[float, float, str]]]:
    """Return the kernels of both passes by rank, as (start, duration, name) in microseconds.

    Four H200s hold 16,384 tokens each, with 32 query heads and 8 key heads of width 128.
    """
    return _profiled(schedule)[KERNELS]


def _profiled(schedule: str) -> dict[str, Any]:
    rows = [
        row
        for row in load("schedules_timeline_four_h200")["results"]
        if row["schedule"] == schedule
    ]
    return next(row for row in rows if "default" in row.get("transport", "default"))


def gather_rate() -> float:
    """Return the bytes/s that a rank receives in a gather: K and V of 8 heads from three other
    H200s.
    """
    return 3 * 16_384 * 8 * 256 * 2 / (1e-6 * _slowest_first("strided zigzag 8", "AllGather"))


def hop_rate() -> float:
    """Return the bytes/s of the first hop of a ring on four H200s: K and V of 8 heads."""
    return 16_384 * 8 * 256 * 2 / (1e-6 * _slowest_first("ring zigzag", "SendRecv"))


def _slowest_first(schedule: str, kernel: str) -> float:
    return max(
        next(us for _, us, name in kernels if kernel in name) for kernels in timeline(schedule)
    )


def spans(schedule: str) -> dict[str, list[Span]]:
    """Return the spans of `timeline` by "rank R", in milliseconds, to draw them."""
    return by_rank(_profiled(schedule))
