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
from canon.testing.cases import TAKE_A_LAYOUT, Case, Shape
from canon.testing.documents import Documents
from canon.testing.inputs import Inputs, expected, inputs
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
    with _making:
        x = inputs(case, documents, device)
    layout = case.layout_of(x.mask, ranks)

    def timed(half: Any) -> tuple[Attended, float]:
        _ready(case, device)
        start = time.perf_counter()
        local = call(half, case, x, layout, rank)
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
    exact, honest = expected(case, documents, device)
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
        "heads": case.shape.heads,
        "widths": case.shape.widths,
        "options": dict(case.options),
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


# ---------------------------------------------------------------------- calls
def call(module: Any, case: Case, x: Inputs, layout: Layout, rank: int) -> Attended:
    """What ``module`` gives for this rank's part of ``x``. Local functions get the whole."""
    q, k, v, dout = (_own(t, layout, rank, -3, case.shape) for t in (x.q, x.k, x.v, x.dout))
    dlse = layout.shard(x.dlse, rank, x.dlse.dim() - 1)
    runner: Callable = _RUNNERS.get(case.function, _whole)
    return runner(module, case, q, k, v, dout, dlse, x, layout)


def _own(x: Tensor, layout: Layout, rank: int, dim: int, shape: Shape) -> Tensor:
    """This rank's tokens, in its own memory; heads outermost and rows with a gap where the case asks for strides."""
    mine = layout.shard(x, rank, x.dim() + dim)
    if shape.contiguous:
        return mine
    apart = mine.new_empty(*mine.transpose(-3, -2).shape[:-1], mine.shape[-1] + 16)[..., : mine.shape[-1]]
    return apart.copy_(mine.transpose(-3, -2)).transpose(-3, -2)


def _whole(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """A differentiable function, forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    arguments = (*leaves, x.mask, layout) if case.function in TAKE_A_LAYOUT else (*leaves, x.mask)
    options = dict(case.options, scale=x.scale, backward=case.method, return_lse=True)
    out, lse = getattr(module, case.function)(*arguments, **options)
    return Attended(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse)))


def _forward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    return Attended(*module.attention_forward(q, k, v, x.mask, scale=x.scale))


def _backward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    forward = module if hasattr(module, "attention_forward") else reference
    out, lse = forward.attention_forward(q, k, v, x.mask, scale=x.scale)
    grads = module.attention_backward(dout, q, k, v, out, lse, x.mask, scale=x.scale, dlse=dlse, method=case.method)
    return Attended(None, None, *grads)


def _merge(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """Two uneven parts of the keys, attended to by the reference in float32, put together by the module."""
    middle, n = x.mask.keys // 3, x.mask.keys
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    parts: list[Tensor] = []
    for keys in (range(0, middle), range(middle, n)):
        some = (t[..., keys.start : keys.stop, :, :] for t in (k, v))
        parts += reference.attention_forward(q, *some, x.mask.crop(keys=keys), scale=x.scale, out_dtype=wide)
    return Attended(*module.merge(*parts))


_RUNNERS = {"attention_forward": _forward, "attention_backward": _backward, "merge": _merge}
