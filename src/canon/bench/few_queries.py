"""`canon bench few`: measure few queries over many keys on one GPU, with a cold L2 cache, beside peers and a copy.

    canon bench few                                           shapes of 1 to 128 queries, Canon and peers
    canon bench few --config part=1024,stages=4               another configuration beside the chosen one; repeatable
    canon bench few --config grid --only part= --shape ...    all configurations of a grid

Before each run, a kernel reads 256 MiB, so L2 holds clean lines of another buffer. GPU time is that between two events
around the call. Wall time is that of a call between two synchronisations. TB/s count q, k, v and out once.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from canon.bench import timing
from canon.bench.peers import Attend, Contender, contenders, last_head
from canon.bench.shapes import Shape, asked_for
from canon.fast.kernels import key_parts
from canon.fast.kernels.triton import config, launch, parts
from canon.fast.local import empty_result
from canon.testing.judge import Attended, dense, oracle

SHAPES = [f"1,{n},32,8,128,full:{keys}" for keys in (8192, 32768, 131072) for n in (1, 8, 32, 128)]
SHAPES += [f"1,{n},{heads},full:65536" for heads in ("32,8,64", "16,4,256", "32,32,128") for n in (1, 32)]
SHAPES += ["16,1,32,8,128,full:8192"]
FLUSHED = 256 << 20  # bytes
COPY, WITHOUT = "copy", ("triton", "cuda", "mask", "eager")


@dataclass(frozen=True)
class Candidate:
    """A configuration: keys of a part, tiles of the kernel of the parts, and rows, warps and parts at a time of the merge."""

    part: int
    rows: int
    columns: int
    warps: int
    stages: int
    tma: int
    merge_rows: int
    merge_warps: int
    at_once: int

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Use this configuration inside the block."""
        before = key_parts.PART, parts.MERGE, parts.AT_ONCE
        tiles = config.Config(self.rows, self.columns, self.warps, self.stages, tma=bool(self.tma))
        key_parts.PART, parts.AT_ONCE = self.part, self.at_once
        parts.MERGE = config.Config(self.merge_rows, 1, self.merge_warps, 1)
        try:
            with config.forced(parts=tiles):
                yield
        finally:
            key_parts.PART, parts.MERGE, parts.AT_ONCE = before


def chosen(shape: Shape, dtype: torch.dtype, device: torch.device) -> Candidate:
    """Return the configuration that Canon chooses."""
    c = config.choose(
        "parts", *(launch.padded(shape.d),) * 2, dtype.itemsize, device, launch.padded(shape.d) == shape.d
    )
    merge = parts.MERGE
    return Candidate(
        key_parts.PART, c.rows, c.columns, c.warps, c.stages, int(c.tma), merge.rows, merge.warps, parts.AT_ONCE
    )


Change = dict[str, int]


def candidates(options: argparse.Namespace) -> list[Change]:
    """Return the changes of --config, by the names of `Candidate`. Raises ValueError."""
    return [change for text in options.config for change in ([*_grid()] if text == "grid" else [_change(text)])]


def _change(text: str) -> Change:
    pairs = [pair.partition("=") for pair in text.split(",")]
    names = [field.name for field in fields(Candidate)]
    if not all(name in names and value.isdigit() for name, _, value in pairs):
        raise ValueError(f"--config {text!r}: expected grid, or NAME=NUMBER,... with the names {', '.join(names)}")
    return {name: int(value) for name, _, value in pairs}


def _grid() -> Iterator[Change]:
    tiles = product((512, 1024, 2048, 4096), ((64, 4), (128, 8)), (32, 64), (2, 3, 4, 5), (0, 1))
    for part, (rows, warps), columns, stages, tma in tiles:
        yield {"part": part, "rows": rows, "warps": warps, "columns": columns, "stages": stages, "tma": tma}
    for rows, warps, at_once in product((1, 2, 4), (1, 2, 4), (4, 8, 16)):
        yield {"merge_rows": rows, "merge_warps": warps, "at_once": at_once}


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str, changes: Sequence[Change]
) -> list[dict[str, Any]]:
    """Return a row for each contender, and one for a copy of as many bytes."""
    q, k, v, dout = shape.inputs(dtype, device)
    group = shape.h // shape.g
    one = last_head(shape, q, k, v, dout)
    exact, honest = oracle(*one, shape.mask), dense(*one, shape.mask)
    moved = sum(x.numel() for x in (q, k, v, q)) * dtype.itemsize
    copy_tbs = timing.ceilings(dtype, device)["copy_tbs"]
    rows, runs = [], []
    for contender in found(shape, dtype, device, only, changes):
        row: dict[str, Any] = {"contender": contender.name, "shape": str(shape), "canon": contender.canon}
        rows.append(row | {"bytes": moved, "copy_tbs": copy_tbs})
        row = rows[-1]
        if made := contender.agreeing(row, partial(_made, contender, (q, k, v), group), exact, honest):
            runs.append((row, made[0]))
    half = moved // 2
    source, target = (torch.zeros(half, dtype=torch.uint8, device=device) for _ in range(2))
    rows.append({"contender": COPY, "shape": str(shape), "canon": False, "bytes": 2 * half, "copy_tbs": copy_tbs})
    runs.append((rows[-1], lambda: target.copy_(source)))
    time_cold(runs, rounds, device)
    add_speeds(rows)
    return rows


def found(
    shape: Shape, dtype: torch.dtype, device: torch.device, only: str, changes: Sequence[Change]
) -> list[Contender]:
    """Return one contender for each forward pass, and Canon in other configurations."""
    by_forward = {one.forward: one for one in contenders(shape, device, "")}
    kept = [replace(one, name=name) for name, one in by_forward.items() if not any(x in name for x in WITHOUT)]
    own = [replace(chosen(shape, dtype, device), **change) for change in changes]
    for one in dict.fromkeys(own):
        kept.append(Contender(f"canon {one}", partial(_attend, shape, one), str(one), declines=True))
    return [one for one in kept if asked_for(one.name, only)]


def _attend(shape: Shape, candidate: Candidate) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = empty_result(q, v, q.dtype)
        with candidate.forced():
            parts.forward_in_parts(q, k, v, shape.mask, shape.d**-0.5, out, lse)
        return out

    return attend


def _made(contender: Contender, tensors: tuple, group: int) -> tuple[Callable[[], Any], Attended]:
    run = contender.inside(partial(contender.inside(contender.make)(), *tensors))
    with torch.no_grad():
        return run, Attended(run()[-1:, :, -group:])


def time_cold(runs: Sequence[tuple[dict, Callable[[], Any]]], rounds: int, device: torch.device) -> None:
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
    """Write the TB/s of each timed row, its share of a copy of 1 GiB, and its ratio to the fastest peer."""
    timed = [row for row in rows if row.get("gpu_ms")]
    for row in timed:
        row["tbs"] = row["bytes"] / statistics.median(row["gpu_ms"]) / 1e9
        row["of_copy"] = row["tbs"] / row["copy_tbs"]
    peer = max((row["tbs"] for row in timed if not row["canon"] and row["contender"] != COPY), default=None)
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
            cells += [f"{wall:.1f}", f"{gpu:.1f}", f"{row['tbs']:.2f}", f"{row['of_copy']:.0%}", to_peer]
        lines.append((row["contender"], *cells))
    columns = ("contender", "agrees", "wall us", "GPU us", "TB/s", "of a copy", "to peer")
    return [timing.table(f"{rows[0]['shape']}: cold L2, forward", columns, lines)] if rows else []
