"""Run cases on all ranks of a process group.

    each rank   inputs -> shards -> module, twice or more (`repetition`); reference -> gather
    rank 0      gathered results -> judge -> a line of JSON into ``sink``, a line of text to stderr

An exception of the module ends all ranks: others may wait inside the module.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.check.case_calls import call, merged_keys, on_one_rank
from canon.check.cases import DTYPES, EXCHANGES, REPLICATED, Case, declined_by
from canon.check.causes import explained
from canon.check.exchanges import Exchange, compared, differs
from canon.check.inputs import Inputs, expected, inputs, with_projected_keys
from canon.check.places import worst_places
from canon.check.planted_values import exempted, reach, spread
from canon.check.repetition import RUNS, SWITCH, Repeated, repeated
from canon.reference import Layout
from canon.route.checks import accumulate_dtype
from canon.testing.bit_patterns import digest
from canon.testing.judge import Attended, Measure, Results, agreement

DIGITS = 12  # of the digest of results with rank_invariant=True
_inputs_lock = threading.Lock()  # ranks that are threads share cached inputs


class CaseFailed(Exception):
    """The name of a case that raised, and its exception."""

    def __str__(self) -> str:
        return self.args[1]


@dataclass(frozen=True)
class CaseRunner:
    """A picklable program for every rank: it runs ``cases``."""

    module: str
    cases: tuple[Case, ...]
    device: str
    sink: Path = Path()  # gets a line of JSON for each case
    backend: str | None = None  # kernel backend of canon.fast
    runs: int | None = None  # of the module for each case; None: `RUNS`

    def __call__(self) -> None:
        module = import_module(self.module)
        if self.device == "cpu":  # several threads may divide sums by the shape of a product
            torch.set_num_threads(1)
        with self._kernels():
            for case in self.cases:
                # ends threads after an interrupt, also of cases on one rank
                dist.barrier()
                try:
                    result = self._result(module, case)
                except (Exception, SystemExit) as error:
                    raise CaseFailed(case.name, f"{type(error).__name__}: {error}") from error
                if result is not None:
                    with self.sink.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")
                    show(result)

    def rehearse(self) -> None:
        """Run the module once on every case, without the judge."""
        module, rank = import_module(self.module), dist.get_rank()
        with self._kernels():
            for case in self.cases:
                if not (rank and not case.distributed) and not declined_by(self.backend, case):
                    self._program(module, case)[0](module)

    def _program(self, module: Any, case: Case) -> tuple[Callable, Callable]:
        """Return the function of a half that gives results, and their judge."""
        rank, x = dist.get_rank(), None
        if case.dtype:
            with _inputs_lock:
                x = inputs(case, self.device)
        layout = case.layout_of(dist.get_world_size())
        if x is None or case.function in EXCHANGES:
            exchange = Exchange(case, layout, x, rank)
            return exchange.tables, partial(_judged_exchange, exchange)
        judge = partial(self._judged, module, case, layout, x)
        return lambda half: call(half, case, x, layout, rank), judge

    def _result(self, module: Any, case: Case) -> dict[str, Any] | None:
        if dist.get_rank() and not case.distributed:
            return None
        program, judge = self._program(module, case)
        first, second, unequal_runs = self._repeated(program, module, case)
        of_reference = program(reference)
        found = judge(first, of_reference, unequal_runs)
        also = {} if second is None else judge(second, of_reference, [])
        if dist.get_rank():
            return None
        found["faults"] += [f"under {SWITCH}: {fault}" for fault in also.get("faults", ())]
        shape = {"heads": case.shape.heads, "widths": case.shape.widths} if case.dtype else {}
        verdict = "disagrees" if found["faults"] else "agrees"
        head = {"case": case.name, **shape, "options": dict(case.options), "verdict": verdict}
        return head | found

    def _repeated(self, program: Callable[[Any], Any], module: Any, case: Case) -> Repeated:
        on_some_rank = lambda x: any(_gather_objects(x)) if case.distributed else x
        switched = case.method != "fused"  # it adds dq in any order, or warns
        runs = self.runs or RUNS[self.device]
        found = repeated(lambda: program(module), _different, on_some_rank, runs, switched)
        if case.distributed:
            dist.barrier()  # ranks that are threads share the switch: all have left it now
        return found

    def _judged(
        self,
        module: Any,
        case: Case,
        layout: Layout,
        x: Inputs,
        first: Results,
        of_reference: Results,
        unequal_runs: list[str],
    ) -> dict[str, Any]:
        """Return the findings on rank 0. A collective."""
        unequal_ranks, held_by, squares = [], None, None
        if case.function in REPLICATED:
            by_rank = _gather_objects(type(first)(*(x if x is None else x.cpu() for x in first)))
            others = {rank: _different(by_rank[0], other) for rank, other in enumerate(by_rank)}
            text = "rank {} has other bits than rank 0, in {}"
            unequal_ranks = [text.format(rank, where) for rank, where in others.items() if where]
        elif case.distributed:
            held_by = layout
            if (part := getattr(of_reference, "dup_weight", None)) is not None:
                squares = _gather(part).double().square().sum(0)
            first, of_reference = (assembled(part, layout) for part in (first, of_reference))
        if case.distributed:
            by_rank = enumerate(_gather_objects(unequal_runs))
            unequal_runs = [f"rank {number}: {text}" for number, texts in by_rank for text in texts]
        if dist.get_rank():
            return {}
        wanted = expected(case, self.device)
        exact, honest = wanted.exact, wanted.honest
        reduced = DTYPES[dict(case.options).get("reduce_dtype", "float64")]
        if reduced.itemsize == 2:  # sums travel in 16 bits, and own parts may
            sums = zip(exact._fields[3:5], exact[3:5], strict=True)
            rounded = exact._replace(**{name: y.to(reduced).double() for name, y in sums})
            honest = [*honest, of_reference, rounded]
        if squares is not None:
            # Each rank has rounded its part once: independent errors add as u sqrt(sum part^2).
            # Where parts cancel, that is more than one rounding of their sum.
            beyond = (squares - exact.dup_weight**2).relu().sqrt()
            off = exact.dup_weight + torch.finfo(x.q.dtype).eps / 2 * beyond
            honest = [*honest, exact._replace(dup_weight=off)]
        places = None
        if case.planted and case.function != "merge":  # merge has no sum over tokens
            share = x.q.shape[-2] // x.k.shape[-2]
            in_canon = module.__name__.startswith("canon.")
            places = (spread if in_canon else reach)(case.planted, exact, share, x.mask)
        got = first if places is None else exempted(first, exact, places)
        verdict = agreement(got, exact, honest, wanted.roundings)
        x = with_projected_keys(x) if case.has_latents else x
        faults = _wrong_dtypes(case, got, exact)
        parts = merged_keys(x) if case.function == "merge" else ()
        faults += explained(verdict.faults, got, exact, honest, x, parts)
        faults += [*worst_places(verdict.faults, got, exact, held_by), *verdict.faults]
        of_reference = agreement(of_reference, exact, honest, wanted.roundings)
        faults += [f"the reference itself: {fault}" for fault in of_reference.faults]
        faults += unequal_ranks + _unlike_one_rank(module, case, x, first)
        # its atomics add dq in no fixed order
        if not (case.method == "fused" and self.device == "cuda"):
            faults += unequal_runs
        found = {"faults": faults, "measures": _as_rows(verdict.measures)}
        found["same_bits"] = not unequal_runs
        if case.rank_invariant:
            digests = "".join(digest(x) for x in first[:5] if x is not None)
            found["digest"] = sha256(digests.encode()).hexdigest()[:DIGITS]
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


def show(result: dict[str, Any]) -> None:
    """Print a line: a time limit may come before the report."""
    line = f"{result['case']} {result['verdict']}"
    if result["faults"]:
        line += f": {shorten(result['faults'][0], 300, placeholder=' ...')}"
    print(line, file=sys.stderr, flush=True)


def _as_rows(measures: Iterable[Measure]) -> list[dict[str, Any]]:
    return [asdict(m) | {"ratio": m.ratio} for m in measures]


def _judged_exchange(
    exchange: Exchange, got: Any, of_reference: Any, unequal_runs: list[str]
) -> dict[str, Any]:
    answers = exchange.answers()
    measures, faults = compared(got, answers)
    faults += [f"the reference itself: {fault}" for fault in compared(of_reference, answers)[1]]
    by_rank = _gather_objects((measures, faults + unequal_runs, not unequal_runs))
    ranks_of: dict[str, list[str]] = {}
    for number, (_, faults, _) in enumerate(by_rank):
        for fault in faults:
            ranks_of.setdefault(fault, []).append(str(number))
    every = sorted((m for measures, _, _ in by_rank for m in measures), key=lambda m: m.ratio)
    return {
        "faults": [f"rank {', '.join(ranks)}: {fault}" for fault, ranks in ranks_of.items()],
        "measures": _as_rows({(m.tensor, m.norm): m for m in every}.values()),  # the largest ratios
        "same_bits": all(same for _, _, same in by_rank),
    }


def _rows(results: Any) -> dict[str, Tensor | None]:
    if isinstance(results, dict):  # tables
        return {name: table.flatten(1) for name, table in results.items()}
    vectors = {"lse", "dsink"}
    return {
        name: x[..., None] if name in vectors and x is not None else x
        for name, x in results._asdict().items()
    }


def _different(a: Any, b: Any) -> str:
    texts, others = [], _rows(b)
    for name, x in _rows(a).items():
        y = others[name]
        if x is None or y is None:
            texts += [f"{name}, which only one run returned"] * ((x is None) != (y is None))
        elif (rows := differs(x, y).any(-1)).any():
            texts.append(f"{int(rows.sum())} of {rows.numel()} rows of {name}")
    return ", ".join(texts)


def _unlike_one_rank(module: Any, case: Case, x: Inputs, first: Results) -> list[str]:
    if not (case.distributed and case.rank_invariant and hasattr(module, "attention")):
        return []
    one = call(module, on_one_rank(case), x, Layout.contiguous(x.q.shape[-3], 1), 0)
    # the check adds dsink over the ranks
    where = _different(*(Attended(*part[:5]) for part in (one, first)))
    text = "other bits than attention(..., rank_invariant=True) on one rank, in"
    return [f"{text} {where}"] if where else []


def _wrong_dtypes(case: Case, got: Results, exact: Results) -> list[str]:
    narrow, faults = DTYPES[case.dtype], []
    rounded = lambda x: torch.equal(x, x.to(narrow).to(x.dtype))
    for name, x, true in zip(got._fields, got, exact, strict=True):
        if x is None:
            continue
        wide = name in {"lse", "dsink"} or case.variant == "part" or case.function == "merge"
        expected = accumulate_dtype(narrow) if wide else narrow
        may_be_rounded = (
            expected == narrow or (name == "dv" and case.used == "sum") or rounded(true.float())
        )
        if x.dtype != expected:
            faults.append(f"{name} is {x.dtype}, expected {expected}")
        elif not may_be_rounded and rounded(x):
            faults.append(f"{name} has dtype {x.dtype}, but was rounded to {narrow} before")
    return faults


def _gather_objects(mine: Any) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, mine)
    return objects


def _gather(mine: Tensor) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts)


def assembled(part: Results, layout: Layout) -> Results:
    """Join the shards of all ranks without `Layout.unshard`."""

    def assemble(name: str, local: Tensor | None) -> Tensor | None:
        if local is None:
            return None
        if name in ("dsink", "dup_weight"):
            return _gather(local).double().sum(0).to(local.dtype)
        dim = -1 if name == "lse" else -3
        rows = local.movedim(dim, 0).contiguous()
        places = [layout.positions(rank).to(rows.device) for rank in range(layout.ranks)]
        padded = rows.new_zeros(max(map(len, places)), *rows.shape[1:])
        if len(rows) != (own := layout.size(dist.get_rank())):
            raise ValueError(f"{name} has {len(rows)} tokens, not {own}")
        padded[: len(rows)] = rows
        full = rows.new_empty(layout.tokens, *rows.shape[1:])
        for place, shard in zip(places, _gather(padded), strict=True):
            full[place] = shard[: len(place)]
        return full.movedim(0, dim)

    return type(part)(*map(assemble, part._fields, part))
