"""Run `canon check --bits`: compare calls with rank_invariant=True with one whole causal call.

pool of tokens:    384 others | the sequence | 100 others
"""

import argparse
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from canon import trees
from canon.check import bits_report
from canon.check.case_runner import CaseRunner
from canon.check.cases import DTYPES, TILED_LAYOUTS, has_option, matches
from canon.masks.layout import TILE, Layout
from canon.masks.mask import Mask
from canon.testing import process_groups
from canon.testing.bit_patterns import digest, first_difference

BEFORE, BEHIND = 3 * TILE, 100  # other tokens beside the sequence
SIZES = {"cpu": (400, (4, 1)), "cuda": (8192, (8, 2))}  # tokens and heads
WIDTHS = {"cpu": {"bfloat16": (128,)}, "cuda": {}}  # of each dtype
OTHER_WIDTHS = {"cpu": (64,), "cuda": (64, 128, 256)}
CHUNKS = {"cpu": (1, 17, 128, 200, 256), "cuda": (1, 17, 128, 1000, 4096)}  # queries of a prefill
SAMPLED = {"cpu": 6, "cuda": 32}  # calls of a row at most
RANKS = 8
ON_RANKS = {
    "strided_attention": ("contiguous", "zigzag", "striped"),
    "magi_attention": ("zigzag", "planned"),
    "ring_attention": ("contiguous", "zigzag"),
}
Part = tuple[slice, tuple[Tensor, Tensor]]  # tokens of the sequence, (out (t, h, dv), lse (h, t))


@dataclass(frozen=True)
class Column:
    """A dtype, a head width, and a kernel backend, if any."""

    dtype: str
    width: int
    backend: str | None


@dataclass(frozen=True)
class Row:
    """A way to compute the queries of the sequence."""

    name: str
    function: str
    compute: Callable[["Trial"], Iterator[Part]]
    ranks: int = 1
    promised: bool = True  # the contract includes it: it must not be refused


@dataclass(frozen=True, eq=False)
class Trial:
    """The module, and q, k, v (1, pool, heads, width)."""

    module: Any
    tokens: int
    sampled: int
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def place(self) -> slice:
        return slice(BEFORE, BEFORE + self.tokens)

    @property
    def sequence(self) -> list[Tensor]:
        return [x[:, self.place] for x in (self.q, self.k, self.v)]

    def call(self, function: str, *tensors: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Return out (t, h, dv) and lse (h, t) of the last sequence."""
        called = getattr(self.module, function)
        out, lse = called(*tensors, rank_invariant=True, return_lse=True, **arguments)
        return out[-1], lse[-1]

    def whole(self, out: Tensor, lse: Tensor) -> Part:
        return slice(0, self.tokens), (out, lse)

    def chunks(self, size: int, sampled: int) -> Iterator[slice]:
        """Yield evenly spread chunks, the first and the last among them."""
        count = -(-self.tokens // size)
        picked = torch.linspace(0, count - 1, min(count, sampled)).round().long().unique()
        for i in picked.tolist():
            yield slice(size * i, min(size * (i + 1), self.tokens))


def _whole(x: Trial) -> Iterator[Part]:
    yield x.whole(*x.call("attention", *x.sequence, mask=Mask.causal(x.tokens)))


def _prefill(x: Trial, size: int) -> Iterator[Part]:
    q, k, v = x.sequence
    for some in x.chunks(size, x.sampled):
        seen, mask = slice(0, some.stop), Mask.causal(some.stop - some.start, some.stop)
        yield some, x.call("attention", q[:, some], k[:, seen], v[:, seen], mask=mask)


def _decode(x: Trial) -> Iterator[Part]:
    q, k, v = x.sequence
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for some in x.chunks(1, x.sampled if ranks == 1 else max(2, x.sampled // 3)):
        own = Layout.contiguous(some.stop, ranks, TILE).positions(rank).to(q.device)
        yield some, x.call("decode_attention", q[:, some], k[:, own], v[:, own])


def _on_ranks(x: Trial, function: str, layout: str) -> Iterator[Part]:
    mask = Mask.causal(x.tokens)
    held = TILED_LAYOUTS[layout](mask, dist.get_world_size())
    shards = (held.shard(y, dist.get_rank(), 1) for y in x.sequence)
    out, lse = x.call(function, *shards, mask=mask, layout=held)
    yield x.whole(held.unshard(out, dim=0), held.unshard(lse, dim=1))


def _among_documents(x: Trial) -> Iterator[Part]:
    mask = Mask.documents([0, BEFORE, BEFORE + x.tokens, x.q.shape[1]])
    out, lse = x.call("attention", x.q, x.k, x.v, mask=mask)
    yield x.whole(out[x.place], lse[:, x.place])


def _branch(x: Trial) -> Iterator[Part]:
    others, tokens = list(range(BEFORE)), list(range(BEFORE, BEFORE + x.tokens))
    half, fork, late = BEFORE // 2, x.tokens // 2, x.tokens * 3 // 4
    branches = [tokens[:fork] + others[:half], tokens[:late] + others[half : BEFORE - 50], tokens]
    tree = trees.pack(branches, multiple_of=TILE)
    rows = tree.token_ids.to(x.q.device)
    out, lse = x.call("attention", *(y[:, rows] for y in (x.q, x.k, x.v)), mask=tree.mask)
    yield x.whole(tree.unpack(out)[-1], tree.unpack(lse, dim=1)[-1])


def _beside(x: Trial, dim: int) -> Iterator[Part]:
    """Compute the sequence as the last of a batch (dim 0), or beside other heads (dim 2)."""
    tensors = (torch.cat([y.flip(1), y], dim) for y in x.sequence)
    out, lse = x.call("attention", *tensors, mask=Mask.causal(x.tokens))
    yield x.whole(out[:, -x.q.shape[2] :], lse[-x.q.shape[2] :])


def _rows_of(tokens: int, device: str, ranks: int) -> list[Row]:
    rows = [Row("whole call", "attention", _whole)]
    rows += [
        Row(f"prefill in chunks of {size:,}", "attention", partial(_prefill, size=size))
        for size in CHUNKS[device]
        if size < tokens
    ]
    rows += [
        Row("decoding token by token", "decode_attention", _decode),
        Row(f"among documents, moved by {BEFORE}", "attention", _among_documents),
        Row(f"branch of a tree, multiple_of={TILE}", "attention", _branch),
        Row("beside another sequence of a batch", "attention", partial(_beside, dim=0)),
        Row("beside another group of heads", "attention", partial(_beside, dim=2)),
    ]
    several = range(2, ranks + 1)
    for function, layouts in ON_RANKS.items():
        for layout in layouts:
            compute = partial(_on_ranks, function=function, layout=layout)
            name, promised = f"{function}, {layout}", layout != "striped"  # no runs of 128 tokens
            rows += [Row(name, function, compute, count, promised) for count in several]
    name = "decoding, keys on ranks"
    return rows + [Row(name, "decode_attention", _decode, count) for count in several]


_lock = threading.Lock()  # ranks that are threads share inputs and the base


@lru_cache(maxsize=4)
def _trial(runner: "BitsRunner", column: Column) -> Trial:
    pool, generator = BEFORE + runner.tokens + BEHIND, torch.Generator().manual_seed(0)
    normal = lambda heads: torch.randn(1, pool, heads, column.width, generator=generator)
    q, k, v = (normal(runner.heads[i]) for i in (0, 1, 1))
    # so that the rounding of partial sums shows
    drift = torch.linspace(-3, 3, pool)[:, None, None]
    inputs = (x.to(runner.device, DTYPES[column.dtype]) for x in (2 * q, k, v + drift))
    return Trial(import_module(runner.module), runner.tokens, SAMPLED[runner.device], *inputs)


@lru_cache(maxsize=4)
def _base(x: Trial) -> tuple[Tensor, Tensor]:
    ((_, results),) = _whole(x)
    return results


@dataclass(frozen=True)
class BitsRunner(CaseRunner):
    """A program for every rank, which returns a verdict for each row and column."""

    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = ()
    tokens: int = 0
    heads: tuple[int, int] = (1, 1)

    def __call__(self) -> list[dict[str, Any]]:
        # as `CaseRunner` does
        torch.set_num_threads(1)
        results = []
        for column in self.columns:
            with _lock:
                x = _trial(replace(self, rows=()), column)
            with torch.no_grad(), replace(self, backend=column.backend)._kernels():
                results += [_head(row, column) | _verdict(x, row) for row in self.rows]
        return results


def _head(row: Row, column: Column) -> dict[str, Any]:
    return {"row": row.name, "ranks": row.ranks, **asdict(column)}


def _verdict(x: Trial, row: Row) -> dict[str, Any]:
    if not has_option(x.module, row.function):
        return {"verdict": "no option"}
    try:
        parts = list(row.compute(x))
        return {} if dist.get_rank() else _compared(x, row, parts)
    except (ValueError, TypeError, NotImplementedError) as error:
        declined = isinstance(error, NotImplementedError) or not row.promised
        why = f"{type(error).__name__}: {error}"
        return {"verdict": "declined" if declined else "failed", "why": why}


def _compared(x: Trial, row: Row, parts: Sequence[Part]) -> dict[str, Any]:
    out, lse = _base(x)
    if row.compute is _whole:
        return {"verdict": "equal", "digest": digest(out)[:12]}
    found = [(some, first_difference(*part, out[some], lse[:, some])) for some, part in parts]
    places = [x._replace(token=some.start + x.token) for some, x in found if x is not None]
    first = {"verdict": "differs", **places[0]._asdict()} if places else {"verdict": "equal"}
    return first | {"calls": len(parts), "other_calls": len(places)}


def _columns(arguments: argparse.Namespace, device: str) -> list[Column]:
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    backends = ["triton", "gluon"] if hopper else ["triton"]
    backends = [arguments.backend] if arguments.backend else backends
    half = ["bfloat16", "float16"] if device == "cuda" else ["bfloat16"]
    columns = []
    for dtype in arguments.dtype or [*half, "float32"]:
        able = [x for x in backends if x not in ("gluon", "cuda") or DTYPES[dtype].itemsize == 2]
        names = able if arguments.module == "canon.fast" else [None]
        widths = WIDTHS[device].get(dtype, OTHER_WIDTHS[device])
        columns += [Column(dtype, width, name) for name in names for width in widths]
    return columns


def run(arguments: argparse.Namespace, console: Console, device: str, module: Any) -> int:
    """Print the matrix, write the record, and return the number of wrong cells."""
    if not has_option(module, "attention"):
        raise ValueError(
            "--bits compares with the whole call of attention(..., rank_invariant=True), and "
            f"{arguments.module} has no function attention with this keyword"
        )
    tokens, heads = SIZES[device]
    tokens = arguments.tokens or tokens
    most = process_groups.kernel_gpus() if arguments.world == "gpus" else RANKS
    ranks = arguments.ranks or min(RANKS, most)
    rows = [row for row in _rows_of(tokens, device, ranks) if matches(row.name, arguments.only)]
    if not (rows and (columns := _columns(arguments, device))):
        raise ValueError(
            f"--bits: no row matches {arguments.only!r}, or --backend supports none of the dtypes"
        )
    console.print(
        f"{arguments.module}: {tokens:,} tokens, {heads[0]}/{heads[1]} heads, up to {ranks} ranks. "
        "Each row computes out and lse again, with rank_invariant=True.",
        highlight=False,
    )
    runner = BitsRunner(
        arguments.module, (), device, columns=tuple(columns), tokens=tokens, heads=heads
    )
    results: list[dict[str, Any]] = []
    try:
        for count in sorted({row.ranks for row in rows}):
            some = tuple(row for row in rows if row.ranks == count)
            results += _in_world(arguments.world, count, replace(runner, rows=some))
    finally:
        _trial.cache_clear()
        _base.cache_clear()
    return bits_report.report(
        results, [row.name for row in rows], arguments, console, tokens=tokens, ranks=ranks
    )


def _in_world(world: str, ranks: int, runner: BitsRunner) -> list[dict[str, Any]]:
    gpus = world in ("auto", "gpus") and 1 < ranks <= process_groups.kernel_gpus()
    kind = "gpus" if gpus or world == "gpus" else "threads" if world == "auto" else world
    try:
        return process_groups.run(kind, runner, ranks, timeout=1800)[0]
    except (RuntimeError, TimeoutError) as error:
        heads = [_head(row, column) for column in runner.columns for row in runner.rows]
        return [head | {"verdict": "failed", "why": str(error)} for head in heads]
