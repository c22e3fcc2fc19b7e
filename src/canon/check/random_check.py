"""Run `canon check --random N --seed S`: judge random cases, and write a compact record.

The cases of a block with the same number of ranks share one process group. The record is written after each block.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import canon
from canon import reference
from canon.check import random_record, warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import accepts, covered
from canon.check.draws import Drawn, drawn
from canon.check.options import RANDOM_RECORD
from canon.check.random_source import RandomSource
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import record

BLOCK = 200  # cases between two writes of the record
RANKS = 8  # default for the largest number of ranks


def table_of(device: str, backend: str | None) -> str:
    """Return the name of the table of `draws` for a device and a kernel backend."""
    limited = backend in ("gluon", "cuda")
    if device == "cuda":
        return f"cuda {backend}" if limited else "cuda"
    return str(backend) if limited else "cpu"


def run(arguments: argparse.Namespace, console: Console, kind: str, device: str, module: Any) -> int:
    """Check the cases, print failures, write the record. Return the number of wrong cases. Raises ValueError, Interrupted."""
    path, ranks = arguments.record or RANDOM_RECORD, arguments.ranks or RANKS
    functions = covered(module, reference)[0]
    table = table_of(device, arguments.backend)
    kept = random_record.read(path, arguments.module)
    this_run = random_record.run_of(kept, _head(arguments, ranks, table))
    known = {row[0] for row in this_run["cases"]}
    wanted = range(arguments.first, arguments.first + arguments.random)
    left = [index for index in wanted if index not in known]
    if len(left) < len(wanted):
        console.print(f"{len(wanted) - len(left)} of these cases are in {path} already.", highlight=False)

    def block(start: int) -> list[Drawn]:
        cases = [drawn(arguments.seed, index, table, ranks) for index in left[start : start + BLOCK]]
        return [case for case in cases if case.function in functions and accepts(module, case)]

    runner = CaseRunner(arguments.module, (), RandomSource(), device, Path(), arguments.backend, arguments.runs)
    if left and warming.worth_it(device):
        groups = [(case.ranks, replace(runner, cases=(case,))) for case in block(0)]
        console.print(warming.warm(groups), highlight=False)
    try:
        for start in range(0, len(left), BLOCK):
            _run_block(arguments, console, kind, runner, block(start), this_run, start, len(left))
            random_record.write(path, kept)
    finally:
        random_record.write(path, kept)
    return _report(console, path, kept, this_run, wanted)


def _head(arguments: argparse.Namespace, ranks: int, table: str) -> dict[str, Any]:
    return {
        "command": command(arguments, ranks, arguments.random, arguments.first),
        "source": record.source(arguments.module),
        "canon": canon.__version__,
        "commit": record.commit(),
        "date": record.now(),
        "machine": record.machine(),
        "seed": arguments.seed,
        "table": table,
        "ranks": ranks,
        "runs": arguments.runs,
    }


def _run_block(
    arguments, console, kind: str, runner: CaseRunner, cases: list[Drawn], this_run: dict, done: int, total: int
) -> None:
    by_ranks: dict[int, list[Drawn]] = defaultdict(list)
    for case in cases:
        by_ranks[case.ranks].append(case)
    for ranks, group in sorted(by_ranks.items()):
        try:
            results = run_cases(kind, ranks, replace(runner, cases=tuple(group)), done, total, verbose=False)
        except Interrupted as interrupted:
            _add(arguments, console, this_run, group, interrupted.results)
            raise
        _add(arguments, console, this_run, group, results)
        done += len(group)


def _add(
    arguments, console: Console, this_run: dict, cases: Sequence[Drawn], results: Sequence[dict[str, Any]]
) -> None:
    by_name = {case.name: case for case in cases}
    rows, failures = [], []
    for result in results:
        case = by_name[result["case"]]
        worst = max((m["ratio"] for m in result["measures"]), default=0.0)
        rows.append([case.index, case.function, result["verdict"], float(f"{worst:.3g}")])
        if result["verdict"] not in {"agrees", "declined"}:
            repeat = command(arguments, arguments.ranks or RANKS, 1, case.index)
            failures.append({"index": case.index, "repeat": repeat, "draws": case.draws, **result})
            _print_failure(console, failures[-1])
    random_record.add(this_run, rows, failures)


def _print_failure(console: Console, failure: dict[str, Any]) -> None:
    console.print(f"[red]{failure['case']} {failure['verdict']}[/]")
    for fault in failure["faults"]:
        console.print(f"  {fault}", markup=False, highlight=False)
    shown = Table(show_header=False, box=None, padding=(0, 1))
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for name, value in failure["draws"].items():
        shown.add_row(f" {name}", value)
    console.print(shown)
    console.print(f"  repeat: {failure['repeat']}", markup=False, highlight=False, soft_wrap=True)


def _report(console: Console, path: Path, kept: dict, this_run: dict, wanted: range) -> int:
    rows = [row for row in this_run["cases"] if row[0] in wanted]
    by_function: dict[str, list] = defaultdict(list)
    for row in rows:
        by_function[row[1]].append(row)
    shown = Table("function", "cases", "agree", "largest ratio", title=f"{kept['module']}, random cases")
    for function, its_rows in sorted(by_function.items()):
        agree = [row for row in its_rows if row[2] == "agrees"]
        largest = max((row[3] for row in agree), default=0)
        shown.add_row(function, str(len(its_rows)), str(len(agree)), f"{largest:.2f}")
    console.print(shown)
    verdicts = [row[2] for row in rows]
    wrong = len(rows) - verdicts.count("agrees") - verdicts.count("declined")
    console.print(f"Record: {path}, {sum(random_record.counts(kept).values())} cases in total.", highlight=False)
    declined = f", {verdicts.count('declined')} declined" if "declined" in verdicts else ""
    line = f"{verdicts.count('agrees')} of {len(rows)} cases agree{declined}"
    console.print(f"[bold red]{line}, {wrong} do not." if wrong else f"[bold green]{line}.")
    return wrong


def command(arguments: argparse.Namespace, ranks: int, count: int, first: int) -> str:
    """Return the command that runs ``count`` cases, starting with case ``first``."""
    words = ["canon check"] + ([arguments.module] if arguments.module != "canon.fast" else [])
    words += [f"--random {count} --seed {arguments.seed}"] + ([f"--first {first}"] if first else [])
    words += [f"--ranks {ranks}"] if ranks != RANKS else []
    words += [f"--backend {arguments.backend}"] if arguments.backend else []
    words += [f"--world {arguments.world}"] if arguments.world != "auto" else []
    words += [f"--runs {arguments.runs}"] if arguments.runs != 2 else []
    return " ".join(words)
