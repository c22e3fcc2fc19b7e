"""One run of the cases, on whatever world: every rank runs the module and the reference, rank 0 judges.

    each rank   inputs of the case -> its shards -> module, twice or more; reference, once -> gather
    rank 0      gathered results -> judge -> one line of JSON into ``sink``

Where nothing is attended to (`exchanges`), every rank judges what it has, and rank 0 gathers the verdicts.

Lines are written as soon as a case is done, so whoever reads ``sink`` can show progress, and knows after a failure how
far the world came. An exception of the module ends the world: the other ranks may be waiting inside it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.reference import Layout, Mask
from canon.reference.call import accumulate_dtype
from canon.testing.cases import DTYPES, EXCHANGES, TAKE_A_LAYOUT, Case
from canon.testing.exchanges import answers, compared, rows_that_differ, tables
from canon.testing.inputs import Expected, Inputs, placed
from canon.testing.judge import Attended, Measure, agreement, relative
from canon.testing.places import worst_places

DEFAULTS = {"scale": None, "backward": "auto", "return_lse": False}  # are not passed
_making = threading.Lock()  # ranks as threads share one set of inputs


class Source(Protocol):
    """Where the inputs of a case, and the answers to it, come from."""

    def mask(self, case: Case) -> Mask:
        """The mask over the whole sequence."""
        ...

    def inputs(self, case: Case, device: str) -> Inputs:
        """The whole sequence, the same tensors on every rank."""
        ...

    def expected(self, case: Case, layout: Layout, device: str) -> Expected:
        """What the judge compares with."""
        ...


class CaseFailed(Exception):
    """``CaseFailed(name, text)``: the case that raised, and what it raised."""

    def __str__(self) -> str:
        return self.args[1]


@dataclass(frozen=True)
class CaseRunner:
    """A picklable program for every rank of a world."""

    module: str
    cases: tuple[Case, ...]
    source: Source
    device: str
    sink: Path
    backend: str | None = None  # of canon.fast
    runs: int = 2  # of the module, each case

    def __call__(self) -> None:
        if self.device == "cpu":
            with suppress(ModuleNotFoundError):  # without Triton, the reference can be checked
                from canon.fast.kernels.interpreter import repair

                repair()  # each process has its own
        module = import_module(self.module)
        with self._kernels():
            for case in self.cases:
                try:
                    result = _run(module, case, self.source, self.device, self.runs)
                except Exception as error:
                    raise CaseFailed(case.name, f"{type(error).__name__}: {error}") from error
                if result is not None:
                    with self.sink.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")  # in one piece: the lines are read as they come

    def rehearse(self) -> None:
        """Run the module's half of every case once, and judge nothing: to find out which kernels it launches."""
        module, rank, ranks = import_module(self.module), dist.get_rank(), dist.get_world_size()
        with self._kernels():
            for case in self.cases:
                if rank and not case.distributed:
                    continue
                mask, x = self.source.mask(case), None
                layout = case.layout_of(mask, ranks)
                if case.dtype:
                    with _making:
                        x = self.source.inputs(case, self.device)
                if case.function in EXCHANGES:
                    tables(module, case, mask, layout, x, rank)
                else:
                    call(module, case, x, layout, rank)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """The backend that was asked for; on a CPU, where Gluon does not run, its simulator."""
        if self.backend is None:
            yield
            return
        from canon import fast

        simulate = nullcontext
        if self.backend == "gluon" and self.device == "cpu":
            from canon.testing.simulator import simulated as simulate
        with fast.backend(self.backend), simulate():
            yield


def _run(module: Any, case: Case, source: Source, device: str, runs: int) -> dict[str, Any] | None:
    if dist.get_rank() and not case.distributed:
        return None
    mask, x = source.mask(case), None
    if case.dtype:
        with _making:
            x = source.inputs(case, device)
    layout = case.layout_of(mask, dist.get_world_size())
    run = _exchanged if case.function in EXCHANGES else _attended
    result = run(module, case, source, device, runs, mask, layout, x)
    if dist.get_rank():
        return None
    verdict = "disagrees" if result["faults"] else "agrees"
    shape = {"heads": case.shape.heads, "widths": case.shape.widths} if case.dtype else {}
    return {"case": case.name, **shape, "options": dict(case.options), "verdict": verdict, **result}


def _attended(module, case: Case, source: Source, device, runs, mask, layout: Layout, x: Inputs) -> dict[str, Any]:
    rank = dist.get_rank()
    program = lambda half: call(half, case, x, layout, rank)
    first, wavers, seconds = _repeated(program, module, case, device, runs, _rows_apart)
    theirs, reference_seconds = _timed(program, reference, case, device)
    if case.distributed:
        wavers = [f"rank {number}: {told}" for number, some in enumerate(_everyone(wavers)) for told in some]
        first, theirs = (Attended(*map(_assembler(layout), range(5), part)) for part in (first, theirs))
    if rank:
        return {}
    should = source.expected(case, layout, device)
    exact, judge = should.exact, lambda got: agreement(got, should.exact, should.honest, should.roundings)
    verdict, of_reference = judge(first), judge(theirs)
    faults = _wrong_dtypes(case, first, exact) + list(verdict.faults)
    faults += worst_places(list(verdict.faults), first, exact, layout if case.distributed else None)
    faults += [f"the reference itself: {fault}" for fault in of_reference.faults]
    if not (case.method == "fused" and device == "cuda"):  # there its dq is added up by atomics
        faults += wavers
    errors = {(m.tensor, m.norm): m.error for m in of_reference.measures}
    measures = []
    for m in verdict.measures:
        between = {
            "difference": _difference(m, first, theirs, exact),
            "reference_error": errors.get((m.tensor, m.norm)),
        }
        measures.append(asdict(m) | {"ratio": m.ratio} | between)
    seconds = {"seconds": seconds, "reference_seconds": [reference_seconds]}
    return {"faults": faults, "measures": measures, "same_bits": not wavers, **seconds}


def _exchanged(
    module, case: Case, source: Source, device, runs, mask, layout: Layout, x: Inputs | None
) -> dict[str, Any]:
    """Every rank judges what it has. The worst of each measure, and every fault with the ranks that found it."""
    rank = dist.get_rank()
    program = lambda half: tables(half, case, mask, layout, x, rank)
    first, wavers, seconds = _repeated(program, module, case, device, runs, _tables_apart)
    theirs, reference_seconds = _timed(program, reference, case, device)
    should = answers(case, mask, layout, x, rank)
    measures, faults = compared(first, should)
    faults += [f"the reference itself: {fault}" for fault in compared(theirs, should)[1]]
    everyone = _everyone((measures, faults + wavers, not wavers))
    seconds = {"seconds": seconds, "reference_seconds": [reference_seconds]}
    worst, told = {}, {}
    for m in sorted((m for some, _, _ in everyone for m in some), key=lambda m: m.ratio):
        worst[m.tensor, m.norm] = asdict(m) | {"ratio": m.ratio}
    for number, (_, some, _) in enumerate(everyone):
        for fault in some:
            told.setdefault(fault, []).append(str(number))
    return {
        "faults": [f"rank {', '.join(who)}: {fault}" for fault, who in told.items()],
        "measures": list(worst.values()),
        "same_bits": all(same for _, _, same in everyone),
        **seconds,
    }


def _repeated(
    program: Callable[[Any], Any], module: Any, case: Case, device: str, runs: int, apart: Callable[[Any, Any], str]
) -> tuple[Any, list[str], list[float]]:
    """What the first run gives, where others give other bits, and the seconds of the first run and of the last."""
    first, cold = _timed(program, module, case, device)
    wavers, warm = [], cold
    for number in range(2, runs + 1):
        other, warm = _timed(program, module, case, device)
        if where := apart(first, other):
            wavers.append(f"run {number} gave other bits than the first, in {where}")
    return first, wavers, [cold, warm]


def _rows_apart(a: Attended, b: Attended) -> str:
    """How many rows of which tensors, a row being one head of one token; nothing if all bits are the same."""
    told = []
    for name, x, y in zip(Attended._fields, a, b, strict=True):
        if x is not None and y is not None:
            differ = (x != y) & ~((x != x) & (y != y))  # a NaN equals a NaN
            rows = differ if name == "lse" else differ.any(-1)
            if not rows.any():
                continue
            told.append(f"{int(rows.sum())} of {rows.numel()} rows of {name}")
        elif (x is None) != (y is None):
            told.append(f"whether there is {name}")
    return ", ".join(told)


def _tables_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    differ = {name: len(rows_that_differ(a[name], b[name])) for name in a}
    return ", ".join(f"{rows} of {len(a[name])} rows of {name}" for name, rows in differ.items() if rows)


def _timed(program: Callable[[Any], Any], half: Any, case: Case, device: str) -> tuple[Any, float]:
    _ready(case, device)
    start = time.perf_counter()
    result = program(half)
    _ready(case, device)
    return result, time.perf_counter() - start


def _wrong_dtypes(case: Case, got: Attended, exact: Attended) -> list[str]:
    """Return a fault for each result of the wrong dtype: that of the inputs; float32 (float64) for lse and parts.

    A wide result whose numbers all fit the narrow dtype was rounded too early. One honest exception: where dout is all ones
    and one query sees a key, dv is the rounded operand P itself.
    """
    narrow, faults = DTYPES[case.dtype], []
    rounded = lambda x: torch.equal(x, x.to(narrow).to(x.dtype))
    for name, x, true in zip(Attended._fields, got, exact, strict=True):
        if x is None:
            continue
        wide = name == "lse" or case.variant == "part" or case.function == "merge"
        expected = torch.promote_types(narrow, torch.float32) if wide else narrow
        if x.dtype != expected:
            faults.append(f"{name} is {x.dtype}, expected {expected}")
        elif name == "dv" and getattr(case, "used", "") == "sum":
            continue
        elif expected != narrow and rounded(x) and not rounded(true.float()):
            faults.append(f"{name} is {x.dtype} in name, but was rounded to {narrow}")
    return faults


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


def _everyone(mine: Any) -> list[Any]:
    """What every rank has to tell."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


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
    shard = layout.shard if case.distributed else lambda whole, rank, dim: whole
    q, k, v, dout = (placed(shard(t, rank, t.dim() - 3), case.shape, heads_first=True) for t in (x.q, x.k, x.v, x.dout))
    if case.used == "sum":  # the gradient of out.sum(): one number with strides of 0
        dout = dout.new_ones(()).expand(dout.shape)
    dlse = shard(x.dlse, rank, x.dlse.dim() - 1)
    runner: Callable = _RUNNERS.get(case.function, _whole)
    return runner(module, case, q, k, v, dout, dlse, x, layout)


def _whole(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """A differentiable function, forward and backward."""
    leaves = [t.detach().requires_grad_(not case.used.startswith("forward")) for t in (q, k, v)]
    if case.variant == "plain":  # the mask is causal, which is what None means
        out = getattr(module, case.function)(*leaves, *((None, layout) if case.function in TAKE_A_LAYOUT else ()))
        if case.used.startswith("forward"):
            return Attended(out)
        return Attended(out.detach(), None, *torch.autograd.grad(out, leaves, dout))
    arguments = (*leaves, x.mask, layout) if case.function in TAKE_A_LAYOUT else (*leaves, x.mask)
    options = _options(case) | {"scale": x.scale, "backward": case.method, "return_lse": case.returns_lse}
    options = {name: value for name, value in options.items() if value != DEFAULTS.get(name, ...)}
    results = getattr(module, case.function)(*arguments, **options)
    out, lse = results if case.returns_lse else (results, None)
    if case.used.startswith("forward"):
        return Attended(out, lse)
    some, grads = {"both": ((out, lse), (dout, dlse)), "lse": (lse, dlse)}.get(case.used, (out, dout))
    return Attended(out.detach(), None if lse is None else lse.detach(), *torch.autograd.grad(some, leaves, grads))


def _options(case: Case) -> dict[str, Any]:
    """The options of a case; a dtype is named in it."""
    options = dict(case.options)
    return options | {name: DTYPES[options[name]] for name in ("reduce_dtype",) if name in options}


def _forward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    options = {"out_dtype": accumulate_dtype(q.dtype)} if case.variant == "part" else {}
    return Attended(*module.attention_forward(q, k, v, x.mask, scale=x.scale, **options))


def _backward(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    forward = module if hasattr(module, "attention_forward") else reference
    out, lse = forward.attention_forward(q, k, v, x.mask, scale=x.scale)
    options: dict[str, Any] = {"dlse": dlse if case.used in {"both", "lse"} else None}
    if case.variant == "part":
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2) - dlse
        options = {"delta": delta, "grad_dtype": accumulate_dtype(q.dtype)}
    grads = module.attention_backward(dout, q, k, v, out, lse, x.mask, scale=x.scale, method=case.method, **options)
    return Attended(None, None, *grads)


def _merge(module, case, q, k, v, dout, dlse, x, layout) -> Attended:
    """Two uneven parts of the keys, attended to by the reference in float32, put together by the module."""
    middle, n = x.mask.keys // 3, x.mask.keys
    parts: list[Tensor] = []
    for keys in (range(0, middle), range(middle, n)):
        some = (t[..., keys.start : keys.stop, :, :] for t in (k, v))
        parts += reference.attention_forward(
            q, *some, x.mask.crop(keys=keys), scale=x.scale, out_dtype=accumulate_dtype(q.dtype)
        )
    return Attended(*module.merge(*parts))


_RUNNERS = {"attention_forward": _forward, "attention_backward": _backward, "merge": _merge}
