"""`canon bench decode`: time `decode_attention` on several GPUs that divide the keys.

    parts           each rank's part, merged: other bits for another number of ranks
    sums travel     rank_invariant=True
    keys travel     the same bits, with K and V of all ranks on every rank
    one GPU         rank_invariant=True over all keys on every rank, without messages

A contender must agree with float64, and with rank_invariant=True have the bits of "one GPU". Wall
time is that of the slowest rank: calls back to back, without a head start. There is no GPU time,
because the host waits inside some calls. GPU memory is the most that a call adds.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench.peers import last_head, verdict_row
from canon.bench.schedules import check_ranks, of_all_shapes
from canon.bench.shapes import Shape, asked_for, shapes_of
from canon.bench.timing import eager, peak_mb, shown_mb, slowest, table
from canon.masks.layout import Layout
from canon.ranks.divided_keys import keys_of_all_ranks
from canon.testing import process_groups
from canon.testing.judge import Attended, agreement, dense, oracle

SHAPES = [f"1,{n},32,8,128,full:{keys}" for n in (1, 8) for keys in (8192, 32768, 131072)]
CALLS = 50  # back to back
LIMIT = 300.0  # seconds
BITS = ("sums travel", "keys travel", "one GPU")  # equal ones


@dataclass(frozen=True)
class Bench:
    """A picklable program for every rank. It returns the same rows on all ranks."""

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    only: str
    rounds: int
    device: str = "cuda"
    calls: int = CALLS
    # called on rank 0 after each shape, with all rows so far
    keep: Callable[[list[dict]], object] | None = None

    def __call__(self) -> list[dict]:
        given = self.only, self.rounds, self.calls
        return of_all_shapes(
            self, lambda shape, device: [measure(shape, self.dtype, device, *given)]
        )


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, only: str, rounds: int, calls: int
) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    q, k, v, dout = shape.inputs(dtype, device)
    one, ranks = last_head(shape, q, k, v, dout), dist.get_world_size()
    exact, honest = oracle(*one, shape.mask), dense(*one, shape.mask)
    rows, runs = [], []
    contenders = _contenders(shape, q, k, v)
    expected = contenders["one GPU"]()
    for name, run in contenders.items():
        if not asked_for(name, only):
            continue
        out = run()
        row = {
            "schedule": name,
            "shape": str(shape),
            "ranks": ranks,
            "transport": dist.get_backend(),
            "peer": False,
        }
        rows.append(row)
        row |= verdict_row(agreement(Attended(out[-1:, :, -shape.h // shape.g :]), exact, honest))
        if name in BITS and not torch.equal(out, expected):
            row["failed"] = "other bits than one GPU"
        peak = peak_mb(run, device)
        row |= {} if peak is None else {"peak_mb": slowest(peak, device)}
        row |= {"wall_ms": [], "host_ms": []}
        runs.append((row, run))
    for _ in range(rounds):
        for row, run in runs:
            dist.barrier()
            for clock, taken in zip(("wall", "host"), eager(run, calls, device), strict=True):
                row[f"{clock}_ms"].append(slowest(taken, device))
    return rows


def _contenders(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    from canon import fast

    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = Layout.contiguous(shape.keys, ranks, 128).ranges_per_rank[rank]
    (own,) = held or [range(0)]
    shard = [x[:, own.start : own.stop] for x in (k, v)]
    mask = shape.mask.crop(keys=own)
    decode = partial(torch.no_grad()(fast.decode_attention), q, *shard, mask)
    whole = partial(torch.no_grad()(fast.attention), rank_invariant=True)

    def keys_travel() -> Tensor:
        return whole(q, *keys_of_all_ranks("decode_attention", *shard, mask, None, ranks))

    return {
        "parts": decode,
        "sums travel": partial(decode, rank_invariant=True),
        "keys travel": keys_travel,
        "one GPU": partial(whole, q, k, v, shape.mask),
    }


def program(options: argparse.Namespace) -> Bench:
    """Return the program of the command. Raises ValueError."""
    check_ranks(options)
    shapes = shapes_of(options.shape or [], options.mask or [], SHAPES)
    return Bench(tuple(shapes), getattr(torch, options.dtype), options.only, options.rounds)


def measured(made: Bench, ranks: int | None = None) -> Iterator[list[dict]]:
    """Yield all rows."""
    yield process_groups.gpus(made, ranks, timeout=LIMIT)[0]


def tables(rows: list[dict]) -> list:
    """Return a table of medians."""
    lines = []
    for row in rows:
        clocks = [f"{1e3 * np.median(row[f'{name}_ms']):.0f}" for name in ("wall", "host")]
        lines.append(
            (
                row["shape"],
                row["schedule"],
                row.get("failed") or str(row["agrees"]),
                *clocks,
                shown_mb(row),
            )
        )
    return [
        table(
            "a call, medians",
            ("shape", "contender", "agrees", "wall us", "host us", "peak MB"),
            lines,
        )
    ]
