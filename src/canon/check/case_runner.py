"""Run cases on all ranks of a process group.

    each rank   inputs -> shards -> module, twice or more; reference, once -> gather
    rank 0      gathered results -> judge -> one line of JSON into ``sink``, as soon as the case is
                done

An exception of the module ends all ranks, because the others may be waiting inside the module.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.check.case_calls import call, on_one_rank
from canon.check.cases import DTYPES, EXCHANGES, REPLICATED, Case, declined_by
from canon.check.causes import explained
from canon.check.exchanges import answers, compared, rows_that_differ, tables
from canon.check.inputs import FromDocuments, Inputs, with_projected_keys
from canon.check.places import worst_places
from canon.check.planted_values import exempted
from canon.check.random_source import RandomSource
from canon.reference import Layout
from canon.testing.judge import Attended, Measure, Results, agreement, relative

Source = FromDocuments | RandomSource  # inputs and expected results of the cases
_inputs_lock = threading.Lock()  # ranks that are threads share one cached set of inputs


class CaseFailed(Exception):
    """The name of a case that raised, and its exception as text."""

    def __str__(self) -> str:
        return self.args[1]


@dataclass(frozen=True)
class CaseRunner:
    """A picklable program for every rank: it runs ``cases`` on ``module``."""

    module: str
    cases: tuple[Case, ...]
    source: Source
    device: str
    sink: Path
    backend: str | None = None  # kernel backend of canon.fast
    runs: int = 2  # runs of the module for each case

    def __call__(self) -> None:
        module = import_module(self.module)
        with self._kernels():
            for case in self.cases:
                # it ends threads after an interrupt; cases on one rank have no other wait
                dist.barrier()
                try:
                    result = self._result(module, case)
                except (Exception, SystemExit) as error:
                    raise CaseFailed(case.name, f"{type(error).__name__}: {error}") from error
                if result is not None:
                    with self.sink.open("a") as lines:
                        # one write: another thread reads the lines meanwhile
                        lines.write(json.dumps(result) + "\n")

    def rehearse(self) -> None:
        """Run the module once on every case, without the reference and the judge."""
        module, rank = import_module(self.module), dist.get_rank()
        with self._kernels():
            for case in self.cases:
                if not (rank and not case.distributed) and not declined_by(self.backend, case):
                    self._program(case)[0](module)

    def _program(self, case: Case) -> tuple[Callable[[Any], Any], tuple]:
        """Return the function of a half that computes the case on this rank, and (mask, layout,
        inputs).
        """
        rank, mask, x = dist.get_rank(), self.source.mask(case), None
        if case.dtype:
            with _inputs_lock:
                x = self.source.inputs(case, self.device)
        layout = case.layout_of(mask, dist.get_world_size())
        if case.function in EXCHANGES:
            return lambda half: tables(half, case, mask, layout, x, rank), (mask, layout, x)
        return lambda half: call(half, case, x, layout, rank), (mask, layout, x)

    def _result(self, module: Any, case: Case) -> dict[str, Any] | None:
        """Run and judge a case. Return its result on rank 0."""
        if dist.get_rank() and not case.distributed:
            return None
        program, (mask, layout, x) = self._program(case)
        exchange = case.function in EXCHANGES
        first, unequal_runs, seconds = self._repeated(program, module, case, exchange)
        of_reference, reference_seconds = _timed(program, reference, case, self.device)
        if exchange:
            found = _judged_exchange(
                first, of_reference, answers(case, mask, layout, x, dist.get_rank()), unequal_runs
            )
        else:
            found = self._judged(module, case, layout, x, first, of_reference, unequal_runs)
        if dist.get_rank():
            return None
        verdict = (
            "disagrees"
            if found["faults"]
            else "not judged"
            if found.get("not_judged")
            else "agrees"
        )
        found["faults"] += found.pop("not_judged", [])
        shape = {"heads": case.shape.heads, "widths": case.shape.widths} if case.dtype else {}
        found |= {"seconds": seconds, "reference_seconds": [reference_seconds]}
        return {
            "case": case.name,
            **shape,
            "options": dict(case.options),
            "verdict": verdict,
            **found,
        }

    def _repeated(
        self, program: Callable[[Any], Any], module: Any, case: Case, exchange: bool
    ) -> tuple[Any, list[str], list[float]]:
        """Return the first result, the runs with other bits, and the seconds of the first and last
        run.
        """
        first, cold = _timed(program, module, case, self.device)
        unequal_runs, warm = [], cold
        for number in range(2, self.runs + 1):
            other, warm = _timed(program, module, case, self.device)
            if where := (_different_tables if exchange else _different_rows)(first, other):
                unequal_runs.append(f"run {number} gave other bits than the first, in {where}")
        return first, unequal_runs, [cold, warm]

    def _judged(
        self,
        module: Any,
        case: Case,
        layout: Layout,
        x: Inputs,
        first: Results,
        of_reference: Results,
        unequal_runs: list,
    ) -> dict[str, Any]:
        """Return faults, measures and same_bits on rank 0, {} on the other ranks. A collective of
        distributed cases.
        """
        unequal_ranks = _unequal_ranks(first) if case.function in REPLICATED else []
        if case.distributed:
            by_rank = enumerate(_gather_objects(unequal_runs))
            unequal_runs = [f"rank {number}: {text}" for number, texts in by_rank for text in texts]
        if case.distributed and case.function not in REPLICATED:
            first, of_reference = (_assembled(part, layout) for part in (first, of_reference))
        if dist.get_rank():
            return {}
        expected = self.source.expected(case, layout, self.device)
        exact, judged_by = expected.exact, (expected.exact, expected.honest, expected.roundings)
        spread = expected.spread if module.__name__.startswith("canon.") else expected.reach
        spread = None if case.function == "merge" else spread  # it has no sum over tokens
        verdict = agreement(first, *judged_by, spread)
        judged, exempt = (first, {}) if spread is None else exempted(first, exact, spread)
        reference_verdict = agreement(of_reference, *judged_by)
        x = with_projected_keys(x) if case.has_latents else x
        layout = layout if case.distributed and case.function not in REPLICATED else None
        causes = explained(verdict.faults, judged, exact, expected.honest, x)
        faults = _wrong_dtypes(case, first, exact) + causes
        faults += [*worst_places(verdict.faults, judged, exact, layout), *verdict.faults]
        faults += [f"the reference itself: {fault}" for fault in reference_verdict.faults]
        faults += unequal_ranks + _unlike_one_rank(module, case, x, first)
        # its atomics add dq in no fixed order
        if not (case.method == "fused" and self.device == "cuda"):
            faults += unequal_runs
        errors = {(m.tensor, m.norm): m.error for m in reference_verdict.measures}
        measures = [
            {
                **asdict(m),
                "ratio": m.ratio,
                "difference": _difference(m, first, of_reference, exact),
                "reference_error": errors.get((m.tensor, m.norm)),
            }
            for m in verdict.measures
        ]
        found = {"faults": faults, "measures": measures, "same_bits": not unequal_runs}
        if exempt:
            found["exempt"] = {name: count for name, (count, _) in exempt.items()}
            if all_of := ", ".join(name for name, (count, of) in exempt.items() if count == of):
                found["not_judged"] = [
                    f"every value of {all_of} is NaN or infinite, as the planted value allows"
                ]
        return found

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        if self.backend is None:
            yield
            return
        from canon import fast

        simulate = nullcontext
        if self.backend == "gluon" and self.device == "cpu":
            from canon.testing.simulated_kernels import simulated as simulate
        with fast.backend(self.backend), simulate():
            yield


def _judged_exchange(
    first: dict, of_reference: dict, expected: dict, unequal_runs: list[str]
) -> dict[str, Any]:
    """Return faults, measures and same_bits of all ranks. Every rank judges its own results."""
    measures, faults = compared(first, expected)
    faults += [f"the reference itself: {fault}" for fault in compared(of_reference, expected)[1]]
    by_rank = _gather_objects((measures, faults + unequal_runs, not unequal_runs))
    worst, ranks_of = {}, {}
    for m in sorted((m for measures, _, _ in by_rank for m in measures), key=lambda m: m.ratio):
        worst[m.tensor, m.norm] = asdict(m) | {"ratio": m.ratio}
    for number, (_, faults, _) in enumerate(by_rank):
        for fault in faults:
            ranks_of.setdefault(fault, []).append(str(number))
    faults = [f"rank {', '.join(ranks)}: {fault}" for fault, ranks in ranks_of.items()]
    return {
        "faults": faults,
        "measures": list(worst.values()),
        "same_bits": all(same for _, _, same in by_rank),
    }


def _different_rows(a: Results, b: Results) -> str:
    texts = []
    for name, x, y in zip(a._fields, a, b, strict=True):
        if x is not None and y is not None:
            differ = (x != y) & ~((x != x) & (y != y))  # a NaN equals a NaN
            rows = differ if name in {"lse", "dsink"} else differ.any(-1)
            if not rows.any():
                continue
            texts.append(f"{int(rows.sum())} of {rows.numel()} rows of {name}")
        elif (x is None) != (y is None):
            texts.append(f"{name}, which only one run returned")
    return ", ".join(texts)


def _unequal_ranks(mine: Results) -> list[str]:
    by_rank = _gather_objects(type(mine)(*(None if x is None else x.cpu() for x in mine)))
    differ = {number: _different_rows(by_rank[0], other) for number, other in enumerate(by_rank)}
    return [
        (f"rank {number} has other bits than rank 0, in {where}")
        for number, where in differ.items()
        if where
    ]


def _unlike_one_rank(module: Any, case: Case, x: Inputs, first: Results) -> list[str]:
    if not (
        case.distributed
        and dict(case.options).get("rank_invariant")
        and hasattr(module, "attention")
    ):
        return []
    one = call(module, on_one_rank(case), x, Layout.contiguous(x.q.shape[-3], 1), 0)
    # the check adds dsink over the ranks
    where = _different_rows(*(Attended(*part[:5]) for part in (one, first)))
    return (
        [f"other bits than attention(..., rank_invariant=True) on one rank, in {where}"]
        if where
        else []
    )


def _different_tables(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    differ = {name: len(rows_that_differ(a[name], b[name])) for name in a}
    return ", ".join(
        (f"{rows} of {len(a[name])} rows of {name}") for name, rows in differ.items() if rows
    )


def _timed(program: Callable[[Any], Any], half: Any, case: Case, device: str) -> tuple[Any, float]:
    _wait_for_all(case, device)
    start = time.perf_counter()
    result = program(half)
    _wait_for_all(case, device)
    return result, time.perf_counter() - start


def _wrong_dtypes(case: Case, got: Results, exact: Results) -> list[str]:
    """Return a fault for each result of the wrong dtype, or that was rounded to 16 bits on its way
    to float32.

    With a dout of ones, and one query that sees a key, dv is the rounded operand P itself: this is
    correct.
    """
    narrow, faults = DTYPES[case.dtype], []
    rounded = lambda x: torch.equal(x, x.to(narrow).to(x.dtype))
    for name, x, true in zip(got._fields, got, exact, strict=True):
        if x is None:
            continue
        wide = name in {"lse", "dsink"} or case.variant == "part" or case.function == "merge"
        expected = torch.promote_types(narrow, torch.float32) if wide else narrow
        may_be_rounded = (
            expected == narrow or (name == "dv" and case.used == "sum") or rounded(true.float())
        )
        if x.dtype != expected:
            faults.append(f"{name} is {x.dtype}, expected {expected}")
        elif not may_be_rounded and rounded(x):
            faults.append(f"{name} has dtype {x.dtype}, but was rounded to {narrow} before")
    return faults


def _difference(m: Measure, first: Results, of_reference: Results, exact: Results) -> float:
    a, b, true = (getattr(x, m.tensor).double() for x in (first, of_reference, exact))
    error = a - b
    missing = ~error.isfinite()
    return relative(m.tensor, m.norm, error.masked_fill(missing, 0), true.masked_fill(missing, 0))


def _wait_for_all(case: Case, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if case.distributed:
        dist.barrier()


def _gather_objects(mine: Any) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, mine)
    return objects


def _assembled(part: Results, layout: Layout) -> Results:
    """Join the shards of all ranks, and add those of dsink and dup_weight. `Layout.unshard` is
    under test: it is not used.
    """

    def assemble(name: str, local: Tensor | None) -> Tensor | None:
        if local is None:
            return None
        if name in ("dsink", "dup_weight"):
            parts = [torch.empty_like(local) for _ in range(layout.ranks)]
            dist.all_gather(parts, local)
            return torch.stack(parts).double().sum(0).to(local.dtype)
        dim = -1 if name == "lse" else -3
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

    return type(part)(*map(assemble, part._fields, part))
