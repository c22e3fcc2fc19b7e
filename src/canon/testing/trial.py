"""One run of the cases, on whatever world: every rank runs the module and the reference, rank 0 judges.

    each rank   inputs of the case -> its shards -> module, twice; reference, once -> gather
    rank 0      gathered results -> judge -> one line of JSON into ``sink``

Lines are written as soon as a case is done, so whoever reads ``sink`` can show progress, and knows after a failure how
far the world came. An exception of the module ends the world: the other ranks may be waiting inside it.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.reference import Layout
from canon.testing import cases as tried
from canon.testing.cases import Case
from canon.testing.documents import Documents
from canon.testing.judge import Attended, Measure, agreement, relative

_making = threading.Lock()  # ranks as threads share one set of inputs


class CaseFailed(Exception):
    """``CaseFailed(name, text)``: the case that raised, and what it raised."""

    def __str__(self) -> str:
        return self.args[1]


@dataclass(frozen=True)
class Trial:
    """A picklable program for every rank of a world."""

    module: str
    cases: tuple[Case, ...]
    documents: Documents
    device: str
    sink: Path

    def __call__(self) -> None:
        if self.device == "cpu":
            from canon.testing import interpreter

            interpreter.repair()  # each process has its own
        module = import_module(self.module)
        for case in self.cases:
            try:
                result = _run(module, case, self.documents, self.device)
            except Exception as error:
                raise CaseFailed(case.name, f"{type(error).__name__}: {error}") from error
            if result is not None:
                with self.sink.open("a") as lines:
                    lines.write(json.dumps(result) + "\n")  # in one piece: the lines are read as they come


def _run(module: Any, case: Case, documents: Documents, device: str) -> dict[str, Any] | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank and not case.distributed:
        return None
    layout = case.layout_of(documents.tokens, ranks)
    with _making:
        x = tried.inputs(case, documents, device)

    def timed(half: Any) -> tuple[Attended, float]:
        _ready(case, device)
        start = time.perf_counter()
        local = tried.run(half, case, x, layout, rank)
        _ready(case, device)
        return local, time.perf_counter() - start

    (first, cold), (second, warm) = timed(module), timed(module)
    theirs, reference_seconds = timed(reference)
    same = all(map(_same_bits, first, second))
    if case.distributed:
        same = _everywhere(same, device)
        first, theirs = (Attended(*map(_assembler(layout), range(5), part)) for part in (first, theirs))
    if rank:
        return None
    exact, honest = tried.expected(case, documents, device)
    verdict, of_reference = agreement(first, exact, honest), agreement(theirs, exact, honest)
    faults = list(verdict.faults) + [f"the reference itself: {fault}" for fault in of_reference.faults]
    if not same and not (case.method == "fused" and device == "cuda"):  # there its dq is added up by atomics
        faults.append("the second run gave other bits than the first")
    errors = {(m.tensor, m.norm): m.error for m in of_reference.measures}
    measures = []
    for m in verdict.measures:
        between = {
            "difference": _difference(m, first, theirs, exact),
            "reference_error": errors.get((m.tensor, m.norm)),
        }
        measures.append(asdict(m) | {"ratio": m.ratio} | between)
    return {
        "case": case.name,
        "verdict": "disagrees" if faults else "agrees",
        "faults": faults,
        "measures": measures,
        "same_bits": same,
        "seconds": [cold, warm],
        "reference_seconds": [reference_seconds],
    }


def _difference(m: Measure, first: Attended, theirs: Attended, exact: Attended) -> float:
    """The module's result against the reference's. It needs no bound of its own: both have one to the oracle."""
    a, b, true = (getattr(x, m.tensor).double() for x in (first, theirs, exact))
    unseen = true == -torch.inf
    return relative(m.tensor, m.norm, (a - b).masked_fill(unseen, 0), true.masked_fill(unseen, 0))


def _ready(case: Case, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if case.distributed:
        dist.barrier()


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))


def _everywhere(holds: bool, device: str) -> bool:
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _assembler(layout: Layout) -> Callable[[int, Tensor | None], Tensor | None]:
    """Puts the shards of all ranks together; written apart from `Layout.unshard`, which is under test."""

    def assemble(field: int, local: Tensor | None) -> Tensor | None:
        if local is None:
            return None
        dim = -1 if Attended._fields[field] == "lse" else -3
        rows = local.movedim(dim, 0).contiguous()
        sizes = [len(layout.positions(rank)) for rank in range(layout.ranks)]
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        shards = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(shards, padded)
        full = rows.new_empty(layout.tokens, *rows.shape[1:])
        for rank, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
            full[layout.positions(rank).to(full.device)] = shard[:size]
        return full.movedim(0, dim)

    return assemble
