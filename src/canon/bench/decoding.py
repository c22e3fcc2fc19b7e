"""`canon bench decode`: time `decode_attention` on several GPUs that divide the keys.

parts           each rank's part, merged
sums travel     rank_invariant=True
keys travel     the same bits, with K and V of all ranks on every rank
one GPU         the same bits, over all keys on every rank
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.bench.measuring import Judge, Settings
from canon.bench.on_ranks import OnRanks
from canon.bench.shapes import Shape
from canon.bench.timing import Eager, eager_rounds, median_of, peak_mb, shown_mb, slowest, table
from canon.masks.layout import Layout
from canon.ranks.divided_keys import keys_of_all_ranks

SHAPES = [f"1,{n},32,8,128,full:{keys}" for n in (1, 8) for keys in (8192, 32768, 131072)]
LIMIT = 300.0  # seconds
BITS = ("sums travel", "keys travel", "one GPU")  # equal ones


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each contender, the same on all ranks."""
    device, (q, k, v, dout) = settings.device, shape.inputs(settings.dtype, settings.device)
    judge, contenders = Judge(shape, q, k, v, dout), _contenders(shape, q, k, v)
    expected = contenders["one GPU"]()
    fields = {"shape": str(shape), "ranks": dist.get_world_size(), "peer": False}
    rows, runs = [], []
    for name, run in contenders.items():
        if not settings.wants(name):
            continue
        row = {"schedule": name, **fields, "transport": dist.get_backend()}
        rows.append(row := row | judge.verdict(out := run()))
        if name in BITS and not torch.equal(out, expected):
            row["failed"] = "other bits than one GPU"
        peak = peak_mb(run, device)
        row |= {} if peak is None else {"peak_mb": slowest(peak, device)}
        runs.append(Eager.listed(row, "", run))
    eager_rounds(runs, settings.rounds, device)
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


def on_ranks(program: OnRanks, ranks: int | None) -> Iterator[list[dict]]:
    """Yield all rows."""
    yield program.on_gpus(ranks, LIMIT)


def tables(rows: list[dict]) -> list:
    """Return a table of medians."""
    columns = "shape", "contender", "agrees", "wall us", "host us", "peak MB"
    lines = []
    for row in rows:
        clocks = [median_of(row, f"{name}_ms", ".0f", 1e3) for name in ("wall", "host")]
        agrees = row.get("failed") or str(row["agrees"])
        lines.append((row["shape"], row["schedule"], agrees, *clocks, shown_mb(row)))
    return [table("a call, medians", columns, lines)]
