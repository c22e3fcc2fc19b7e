"""Run `canon check --random N --seed S`: judge random cases, and write a compact record.

{"module", "runs": [{"command", ..., "cases": [[index, function, verdict, ratio], ...],
                     "failures": [...]}]}
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from canon.check import contract, warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import accepts, covered, matches, nothing_to_check
from canon.check.check_report import NEITHER, command_of, fault, summary
from canon.check.draws import WEIGHTS, Drawn, Limits, drawn
from canon.check.random_source import RandomSource
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import record
from canon.testing.judge import short

BLOCK = 200  # cases between two writes of the record
RANKS = 8  # default for the largest number of ranks


def record_of(module: str) -> Path:
    """Return the default path of a record."""
    return Path(f"canon-check/random.{module}.json")


def run(
    arguments: argparse.Namespace, console: Console, kind: str, device: str, module: Any
) -> bool:
    """Return whether some cases agree, and none is wrong. Raises ValueError and Interrupted."""
    path, ranks = arguments.record or record_of(arguments.module), arguments.ranks or RANKS
    limits = _limits(module, contract.features(arguments.features or ""))
    limited = arguments.backend if arguments.backend in ("gluon", "cuda") else ""
    # a table of `draws`
    table = f"cuda {limited}".strip() if device == "cuda" else limited or "cpu"
    numbers = range(arguments.first, arguments.first + arguments.random)
    cases = (drawn(arguments.seed, number, table, ranks, limits) for number in numbers)
    only = arguments.only
    wanted = [x for x in cases if matches(f"{x.function} {x.mask}", only)]
    if not wanted:
        raise ValueError(f"--random: no function or mask of these cases has {only!r}")
    run = _head(arguments, ranks, table, kind) | {"cases": [], "failures": []}
    check = _RandomCheck(arguments, console, kind, run)
    settings = {"backend": arguments.backend, "runs": arguments.runs}
    runner = CaseRunner(arguments.module, (), RandomSource(), device, **settings)
    if warming.worth_it(device, module):
        groups = [(case.ranks, replace(runner, cases=(case,))) for case in wanted[:BLOCK]]
        console.print(warming.warm(groups), highlight=False)
    try:
        for start in range(0, len(wanted), BLOCK):
            check.run_block(runner, wanted[start : start + BLOCK], start, len(wanted))
            _write(path, arguments.module, run)
    finally:
        _write(path, arguments.module, run)
    return _report(console, path, arguments.module, run["cases"])


def _limits(module: Any, words: frozenset[str]) -> Limits:
    functions = covered(module).tested
    if not WEIGHTS.keys() & set(functions):
        raise nothing_to_check(module, WEIGHTS)

    def fit(case: Drawn) -> Drawn | None:
        case = contract.adapted(case, words)
        return case if case is not None and accepts(module, case) else None

    return Limits(functions, words, fit)


def _head(arguments: argparse.Namespace, ranks: int, table: str, kind: str) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("seed", "backend", "runs", "features")}
    head = record.head(command_of(arguments, first=arguments.first or None))
    return head | {"table": table, "world": kind, "ranks": ranks, **given}


@dataclass
class _RandomCheck:
    arguments: argparse.Namespace
    console: Console
    kind: str
    run: dict[str, Any]  # of the record
    wrong: int = 0  # cases of this command

    def run_block(self, runner: CaseRunner, cases: Sequence[Drawn], done: int, total: int) -> None:
        for ranks in sorted({case.ranks for case in cases}):
            group = tuple(case for case in cases if case.ranks == ranks)
            some = replace(runner, cases=group)
            try:
                results = run_cases(self.kind, ranks, some, done, total, verbose=False)
            except Interrupted as interrupted:
                self.add(group, interrupted.results)
                raise
            self.add(group, results)
            done += len(group)

    def add(self, cases: Sequence[Drawn], results: Sequence[dict[str, Any]]) -> None:
        by_name = {case.name: case for case in cases}
        for result in results:
            case, verdict = by_name[result["case"]], result["verdict"]
            worst = max((m["ratio"] for m in result["measures"]), default=0.0)
            row = [case.index, case.function, verdict, float(f"{worst:.3g}")]
            self.run["cases"].append(row)
            if verdict not in ("agrees", *NEITHER):
                repeat = command_of(self.arguments, random=1, first=case.index or None, only=None)
                head = {"index": case.index, "repeat": repeat, "draws": case.draws}
                self.run["failures"].append(head | result)
                fault(result, self.console, in_full=not self.wrong)
                if not self.wrong:
                    _print_draws(case, repeat, self.console)
                self.wrong += 1
        self.run["cases"].sort(key=lambda row: row[0])


def _print_draws(case: Drawn, repeat: str, console: Console) -> None:
    for name, value in {**case.draws, "repeat": repeat}.items():
        console.print(f"  {name}: {value}", markup=False, highlight=False, soft_wrap=True)


def _write(path: Path, module: str, run: dict[str, Any]) -> None:
    """An interrupted write leaves the old file."""
    head = {name: value for name, value in run.items() if name not in ("cases", "failures")}
    lines = ",\n".join(json.dumps(record.finite(row)) for row in run["cases"])
    failures = json.dumps(record.finite(run["failures"]), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(
        f'{{"module": {json.dumps(module)}, "runs": [\n{json.dumps(head, indent=1)[:-2]},\n'
        f' "cases": [\n{lines}],\n "failures": {failures}}}]}}\n'
    )
    part.replace(path)


def _report(console: Console, path: Path, module: str, rows: list[list]) -> bool:
    title = f"{module}, random cases"
    shown = Table("function", "cases", "agree", "largest ratio", title=title)
    for function in sorted({row[1] for row in rows}):
        verdicts = [(row[2], row[3]) for row in rows if row[1] == function]
        agree = [ratio for verdict, ratio in verdicts if verdict == "agrees"]
        largest = short(max(agree, default=0))
        shown.add_row(function, str(len(verdicts)), str(len(agree)), largest)
    console.print(shown)
    console.print(f"Record: {path}.", highlight=False)
    verdicts = [row[2] for row in rows]
    return not summary(verdicts, console) and "agrees" in verdicts
