"""`canon check --random N --seed S`: random cases (`canon.testing.draws`), judged like all others, into a compact record.

    canon check --random 1000 --seed 7                 cases 0 to 999 of seed 7; given again, the command continues
    canon check --random 1 --seed 7 --first 123        case 123 alone, as a failure's report suggests
    canon check --merge a.json b.json --record c.json  one record of several

Cases run in blocks. In a block all cases with the same number of ranks share one world. The record is written after each block.
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
from canon.testing import random_record, record, warming
from canon.testing.case_runner import CaseRunner
from canon.testing.draws import Drawn, drawn
from canon.testing.options import RANDOM_RECORD
from canon.testing.random_source import RandomSource
from canon.testing.run_cases import Interrupted, run_cases

BLOCK = 200  # cases between two writes of the record
RANKS = 8  # of the largest world, if nothing else is asked for


def table_of(device: str, backend: str | None) -> str:
    """The name of the table of `draws` for a device and a kernel backend."""
    gluon = " gluon" if backend == "gluon" else ""
    return "cuda" + gluon if device == "cuda" else gluon.strip() or "cpu"


def run(arguments: argparse.Namespace, console: Console, kind: str, device: str, functions: Sequence[str]) -> int:
    """Check the cases, show failures, keep the record. Returns the number of cases that do not agree.

    Raises ValueError for a record that is something else, Interrupted at Ctrl-C, when all that finished is kept.
    """
    path, ranks = arguments.record or RANDOM_RECORD, arguments.ranks or RANKS
    table = table_of(device, arguments.backend)
    kept = random_record.read(path, arguments.module)
    head = {
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
    mine = random_record.run_of(kept, head)
    known = {row[0] for row in mine["cases"]}
    wanted = range(arguments.first, arguments.first + arguments.random)
    left = [index for index in wanted if index not in known]
    if len(left) < len(wanted):
        console.print(f"{len(wanted) - len(left)} of these cases are in {path} already.", highlight=False)
    trial = CaseRunner(arguments.module, (), RandomSource(), device, Path(), arguments.backend, arguments.runs)
    if left and warming.worth_it(device):
        some = [drawn(arguments.seed, index, table, ranks) for index in left[:BLOCK]]
        worlds = [(case.ranks, replace(trial, cases=(case,))) for case in some if case.function in functions]
        console.print(warming.warm(worlds), highlight=False)
    try:
        for start in range(0, len(left), BLOCK):
            cases = [drawn(arguments.seed, index, table, ranks) for index in left[start : start + BLOCK]]
            cases = [case for case in cases if case.function in functions]
            _block(arguments, console, kind, trial, cases, mine, start, len(left))
            random_record.write(path, kept)
    finally:
        random_record.write(path, kept)
    return _shown(console, path, kept, mine, wanted)


def _block(
    arguments, console, kind: str, trial: CaseRunner, cases: list[Drawn], mine: dict, done: int, total: int
) -> None:
    """Run the cases, worlds of few ranks first, and add their results to the run ``mine``."""
    worlds: dict[int, list[Drawn]] = defaultdict(list)
    for case in cases:
        worlds[case.ranks].append(case)
    for ranks, some in sorted(worlds.items()):
        try:
            results = run_cases(kind, ranks, replace(trial, cases=tuple(some)), done, total, aloud=False)
        except Interrupted as interrupted:
            _add(arguments, console, mine, some, interrupted.results)
            raise
        _add(arguments, console, mine, some, results)
        done += len(some)


def _add(arguments, console: Console, mine: dict, cases: Sequence[Drawn], results: Sequence[dict[str, Any]]) -> None:
    by_name = {case.name: case for case in cases}
    rows, failures = [], []
    for result in results:
        case = by_name[result["case"]]
        worst = max((m["ratio"] for m in result["measures"]), default=0.0)
        rows.append([case.index, case.function, result["verdict"], float(f"{worst:.3g}")])
        if result["verdict"] not in {"agrees", "declined"}:
            again = command(arguments, arguments.ranks or RANKS, 1, case.index)
            failures.append({"index": case.index, "repeat": again, "draws": case.draws, **result})
            _tell(console, failures[-1])
    random_record.add(mine, rows, failures)


def _tell(console: Console, failure: dict[str, Any]) -> None:
    """Show a failure: what is wrong, what each argument drew, and the command that repeats it."""
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


def _shown(console: Console, path: Path, kept: dict, mine: dict, wanted: range) -> int:
    """Print a line per function and the verdict; return how many of the wanted cases do not agree."""
    rows = [row for row in mine["cases"] if row[0] in wanted]
    by_function: dict[str, list] = defaultdict(list)
    for row in rows:
        by_function[row[1]].append(row)
    shown = Table("function", "cases", "agree", "largest ratio", title=f"{kept['module']}, random cases")
    for function, some in sorted(by_function.items()):
        agree = [row for row in some if row[2] == "agrees"]
        shown.add_row(function, str(len(some)), str(len(agree)), f"{max((row[3] for row in agree), default=0):.2f}")
    console.print(shown)
    verdicts = [row[2] for row in rows]
    wrong = len(rows) - verdicts.count("agrees") - verdicts.count("declined")
    console.print(f"Record: {path}, {sum(random_record.counts(kept).values())} cases in all.", highlight=False)
    declined = f", {verdicts.count('declined')} declined" if "declined" in verdicts else ""
    line = f"{verdicts.count('agrees')} of {len(rows)} cases agree{declined}"
    console.print(f"[bold red]{line}, {wrong} do not." if wrong else f"[bold green]{line}.")
    return wrong


def command(arguments: argparse.Namespace, ranks: int, count: int, first: int) -> str:
    """The command that runs ``count`` cases from ``first`` on."""
    words = ["canon check"] + ([arguments.module] if arguments.module != "canon.fast" else [])
    words += [f"--random {count} --seed {arguments.seed}"] + ([f"--first {first}"] if first else [])
    words += [f"--ranks {ranks}"] if ranks != RANKS else []
    words += [f"--backend {arguments.backend}"] if arguments.backend else []
    words += [f"--world {arguments.world}"] if arguments.world != "auto" else []
    words += [f"--runs {arguments.runs}"] if arguments.runs != 2 else []
    return " ".join(words)
