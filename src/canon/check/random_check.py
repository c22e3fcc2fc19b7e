"""Run `canon check --random N --seed S`: judge random cases, and write a compact record.

{"module", "runs": [{"command", ..., "cases": [[index, function, verdict, ratio], ...],
                     "failures": [...]}]}
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from canon.check import check_report, contract
from canon.check.case_runner import CaseRunner
from canon.check.cases import accepts, covered, matches, nothing_to_check
from canon.check.check_report import AGREES, DISAGREES, INTERRUPTED, command_of
from canon.check.draws import WEIGHTS, Drawn, Limits, drawn
from canon.check.run_cases import run_groups
from canon.testing import record
from canon.testing.judge import short

RANKS = 8  # at most, by default


def record_of(module: str) -> Path:
    """Return the default path of a record."""
    return Path(f"canon-check/random.{module}.json")


def run(
    arguments: argparse.Namespace, console: Console, kind: str, device: str, module: Any
) -> int:
    """Return the exit status. Raises ValueError."""
    name, ranks, only = arguments.module, arguments.ranks or RANKS, arguments.only
    limits = limits_of(module, contract.features(arguments.features or ""))
    limited = arguments.backend if arguments.backend in ("gluon", "cuda") else ""
    # a table of `draws`
    table = f"cuda {limited}".strip() if device == "cuda" else limited or "cpu"
    numbers = range(arguments.first, arguments.first + arguments.random)
    cases = (drawn(arguments.seed, number, table, ranks, limits) for number in numbers)
    wanted = {x.name: x for x in cases if matches(f"{x.function} {x.mask}", only)}
    if not wanted:
        raise ValueError(f"--random: no function or mask of these cases has {only!r}")
    runner = CaseRunner(name, (), device, backend=arguments.backend, runs=arguments.runs)
    groups = [
        (count, replace(runner, cases=tuple(x for x in wanted.values() if x.ranks == count)))
        for count in sorted({case.ranks for case in wanted.values()})
    ]
    results, interrupted = run_groups(kind, groups, console)
    check_report.faults(results, console)
    rows, failures = [], []
    for result in results:
        case = wanted[result["case"]]
        worst = max((m["ratio"] for m in result["measures"]), default=0.0)
        rows.append([case.index, case.function, result["verdict"], float(f"{worst:.3g}")])
        if result["verdict"] not in ("agrees", "declined"):
            repeat = command_of(arguments, random=1, first=case.index or None, only=None)
            more = {"index": case.index, "repeat": repeat, "draws": case.draws}
            failures.append(more | result)
    if failures:
        for field, value in {**failures[0]["draws"], "repeat": failures[0]["repeat"]}.items():
            console.print(f"  {field}: {value}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(name, rows))
    head = {"table": table, "world": kind, "ranks": ranks, "cases": sorted(rows)}
    _write(arguments, head | {"failures": failures})
    console.print(f"Record: {arguments.record}.", highlight=False)
    agree = check_report.summary([row[2] for row in rows], console)
    return INTERRUPTED if interrupted else AGREES if agree else DISAGREES


def limits_of(module: Any, words: frozenset[str]) -> Limits:
    """Return what a module can do, with the words of ``--features``."""
    functions = covered(module).tested
    if not WEIGHTS.keys() & set(functions):
        raise nothing_to_check(module, WEIGHTS)

    def fit(case: Drawn) -> Drawn | None:
        case = contract.adapted(case, words)
        return case if case is not None and accepts(module, case) else None

    return Limits(functions, words, fit)


def _table(module: str, rows: list[list]) -> Table:
    shown = Table("function", "cases", "agree", "largest ratio", title=f"{module}, random cases")
    for function in sorted({row[1] for row in rows}):
        verdicts = [(row[2], row[3]) for row in rows if row[1] == function]
        agree = [ratio for verdict, ratio in verdicts if verdict == "agrees"]
        largest = short(max(agree, default=0))
        shown.add_row(function, str(len(verdicts)), str(len(agree)), largest)
    return shown


def _write(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    given = {name: getattr(arguments, name) for name in ("seed", "backend", "runs", "features")}
    head = record.head(command_of(arguments, first=arguments.first or None))
    kept = {"module": arguments.module, "runs": [head | given | results]}
    path = arguments.record
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record.finite(kept)) + "\n")
