"""`canon bench few`: measure few queries over many keys on one GPU, with a cold L2 cache, beside
peers and a copy.

Before each run, a kernel reads 256 MiB, so L2 holds clean lines of another buffer. GPU time is that
between two events around the call. Wall time is that of a call between two synchronisations. TB/s
count q, k, v and out once."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from canon.bench import timing
from canon.bench.peers import Contender, contenders, last_head
from canon.bench.shapes import Shape, asked_for
from canon.testing.judge import Attended, dense, oracle

SHAPES = [f"1,{n},32,8,128,full:{keys}" for keys in (8192, 32768, 131072) for n in (1, 8, 32, 128)]
SHAPES += [
    f"1,{n},{heads},full:65536" for heads in ("32,8,64", "16,4,256", "32,32,128") for n in (1, 32)
]
SHAPES += ["16,1,32,8,128,full:8192"]
FLUSHED = 256 << 20  # bytes
COPY, WITHOUT = "copy", ("triton", "cuda", "mask", "eager")


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str
) -> list[dict[str, Any]]:
    """Return a row for each contender, and one for a copy of as many bytes."""
    q, k, v, dout = shape.inputs(dtype, device)
    group = shape.h // shape.g
    one = last_head(shape, q, k, v, dout)
    exact, honest = oracle(*one, shape.mask), dense(*one, shape.mask)
    moved = sum(x.numel() for x in (q, k, v, q)) * dtype.itemsize
    copy_tbs = timing.ceilings(dtype, device)["copy_tbs"]
    rows, runs = [], []
    for contender in found(shape, device, only):
        row: dict[str, Any] = {
            "contender": contender.name,
            "shape": str(shape),
            "canon": contender.canon,
        }
        rows.append(row | {"bytes": moved, "copy_tbs": copy_tbs})
        row = rows[-1]
        if made := contender.agreeing(
            row, partial(_made, contender, (q, k, v), group), exact, honest
        ):
            runs.append((row, made[0]))
    half = moved // 2
    source, target = (torch.zeros(half, dtype=torch.uint8, device=device) for _ in range(2))
    rows.append(
        {
            "contender": COPY,
            "shape": str(shape),
            "canon": False,
            "bytes": 2 * half,
            "copy_tbs": copy_tbs,
        }
    )
    runs.append((rows[-1], lambda: target.copy_(source)))
    time_cold(runs, rounds, device)
    add_speeds(rows)
    return rows


def found(shape: Shape, device: torch.device, only: str) -> list[Contender]:
    """Return one contender for each forward pass."""
    by_forward = {one.forward: one for one in contenders(shape, device, "")}
    kept = [
        replace(one, name=name)
        for name, one in by_forward.items()
        if not any(x in name for x in WITHOUT)
    ]
    return [one for one in kept if asked_for(one.name, only)]


def _made(contender: Contender, tensors: tuple, group: int) -> tuple[Callable[[], Any], Attended]:
    run = contender.inside(partial(contender.inside(contender.make)(), *tensors))
    with torch.no_grad():
        return run, Attended(run()[-1:, :, -group:])


def time_cold(
    runs: Sequence[tuple[dict, Callable[[], Any]]], rounds: int, device: torch.device
) -> None:
    """Write the lists gpu_ms and wall_ms of each run, in rounds of random order."""
    buffer, total = torch.ones(FLUSHED // 4, device=device), torch.empty((), device=device)
    flush = partial(torch.sum, buffer, 0, out=total)
    shuffled, order = random.Random(0), list(runs)
    for row, run in order:
        row |= {"gpu_ms": [], "wall_ms": []}
        run()
    for _ in range(rounds):
        shuffled.shuffle(order)
        for row, run in order:
            with torch.no_grad():
                row["gpu_ms"] += _gpu_times(run, flush, times=5)
                flush()
                row["wall_ms"].append(timing.eager(run, 1, device)[0])


def _gpu_times(run: Callable[[], Any], flush: Callable[[], Any], times: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    torch.cuda._sleep(timing.LEAD)  # launches are queued ahead
    for start, end in events:
        flush()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def add_speeds(rows: Sequence[dict[str, Any]]) -> None:
    """Write the TB/s of each timed row, its share of a copy of 1 GiB, and its ratio to the fastest
    peer.
    """
    timed = [row for row in rows if row.get("gpu_ms")]
    for row in timed:
        row["tbs"] = row["bytes"] / statistics.median(row["gpu_ms"]) / 1e9
        row["of_copy"] = row["tbs"] / row["copy_tbs"]
    peer = max(
        (row["tbs"] for row in timed if not row["canon"] and row["contender"] != COPY), default=None
    )
    for row in timed if peer else ():
        row["to_peer"] = row["tbs"] / peer


def tables(rows: Sequence[dict[str, Any]]) -> list:
    """Return a table of medians, fastest first."""
    lines = []
    for row in sorted(rows, key=lambda row: -row.get("tbs", 0.0)):
        cells = [row.get("failed") or row.get("declined") or str(row.get("agrees", ""))]
        if "tbs" in row:
            wall, gpu = (1e3 * statistics.median(row[f"{clock}_ms"]) for clock in ("wall", "gpu"))
            to_peer = f"{row['to_peer']:.2f}" if "to_peer" in row else "-"
            cells += [
                f"{wall:.1f}",
                f"{gpu:.1f}",
                f"{row['tbs']:.2f}",
                f"{row['of_copy']:.0%}",
                to_peer,
            ]
        lines.append((row["contender"], *cells))
    columns = ("contender", "agrees", "wall us", "GPU us", "TB/s", "of a copy", "to peer")
    return [timing.table(f"{rows[0]['shape']}: cold L2, forward", columns, lines)] if rows else []
