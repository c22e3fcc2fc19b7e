"""Run `canon check --random N --seed S`: judge random cases, and write a compact record.

    {"module", "runs": [{"command", "source", ..., "cases": [[index, function, verdict, ratio],
                         ...], "failures": [...]}, ...]}

Results with equal `KEY` belong to the same run, so the same command continues it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import canon
from canon.check import contract, sources, warming
from canon.check.case_runner import CaseRunner
from canon.check.cases import accepts, covered, matches
from canon.check.check_report import NEITHER, fault, summary
from canon.check.draws import WEIGHTS, Drawn, Limits, drawn
from canon.check.random_source import RandomSource
from canon.check.run_cases import Interrupted, run_cases
from canon.testing import record
from canon.testing.judge import short

KEY = ("source", "machine", "seed", "table", "backend", "world", "ranks", "runs", "features")
BLOCK = 200  # cases between two writes of the record
RANKS = 8  # default for the largest number of ranks


def record_of(module: str) -> Path:
    """Return the default path of a module's record."""
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
    wanted = {x.index: x for x in cases if matches(f"{x.function} {x.mask}", only)}
    if not wanted:
        raise ValueError(f"--random: no function or mask of these cases has {only!r}")
    kept = _read(path, arguments.module)
    check = _RandomCheck(
        arguments, console, kind, _run_of(kept, _head(arguments, ranks, table, kind))
    )
    if arguments.fresh:
        run = check.run
        run["cases"] = [row for row in run["cases"] if row[0] not in wanted]
        run["failures"] = [x for x in run["failures"] if x["index"] not in wanted]
    left = [wanted[index] for index in sorted(wanted.keys() - {x[0] for x in check.run["cases"]})]
    if taken := len(wanted) - len(left):
        console.print(
            f"{taken} of {len(wanted)} cases are taken from {path}, which holds them for the same "
            "code and options; --fresh runs them again.",
            highlight=False,
        )
    settings = {"backend": arguments.backend, "runs": arguments.runs}
    runner = CaseRunner(arguments.module, (), RandomSource(), device, **settings)
    if left and warming.worth_it(device):
        groups = [(case.ranks, replace(runner, cases=(case,))) for case in left[:BLOCK]]
        console.print(warming.warm(groups), highlight=False)
    try:
        for start in range(0, len(left), BLOCK):
            check.run_block(runner, left[start : start + BLOCK], start, len(left))
            _write(path, kept)
    finally:
        _write(path, kept)
    rows = [row for row in check.run["cases"] if row[0] in wanted]
    return _report(console, path, kept, rows, taken)


def _limits(module: Any, words: frozenset[str]) -> Limits:
    functions = covered(module).tested
    if not WEIGHTS.keys() & set(functions):
        names = ", ".join(sorted(WEIGHTS))
        raise ValueError(
            f"{module.__name__} has none of the functions {names}; those that it imports from "
            "canon do not count"
        )

    def fit(case: Drawn) -> Drawn | None:
        case = contract.adapted(case, words)
        return case if case is not None and accepts(module, case) else None

    return Limits(functions, words, fit)


def _head(arguments: argparse.Namespace, ranks: int, table: str, kind: str) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("seed", "backend", "runs", "features")}
    return {
        "command": _command(arguments, arguments.random, arguments.first),
        "source": sources.digest(arguments.module),
        "canon": canon.__version__,
        "commit": record.commit(),
        "date": record.now(),
        "machine": record.machine(),
        "table": table,
        "world": kind,
        "ranks": ranks,
        **given,
    }


def _command(arguments: argparse.Namespace, count: int, first: int) -> str:
    module = [arguments.module] if arguments.module != "canon.fast" else []
    defaults = {"ranks": RANKS, "backend": None, "world": "auto", "runs": 2, "features": None}
    given = {name: getattr(arguments, name) for name in defaults}
    given = {name: value for name, value in given.items() if value != defaults[name]}
    given |= {"only": arguments.only} if count > 1 else {}
    numbers = {"random": count, "seed": arguments.seed, "first": first or None}
    return record.command("canon", "check", *module, **numbers, **given)


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
        """Add results to the run, and print the failures: the first one in full."""
        by_name = {case.name: case for case in cases}
        for result in results:
            case, verdict = by_name[result["case"]], result["verdict"]
            worst = max((m["ratio"] for m in result["measures"]), default=0.0)
            row = [case.index, case.function, verdict, float(f"{worst:.3g}")]
            self.run["cases"].append(row)
            if verdict not in ("agrees", *NEITHER):
                repeat = _command(self.arguments, 1, case.index)
                head = {"index": case.index, "repeat": repeat, "draws": case.draws}
                self.run["failures"].append(head | result)
                fault(result, self.console, in_full=not self.wrong)
                if not self.wrong:
                    _print_draws(case, repeat, self.console)
                self.wrong += 1
        self.run["cases"].sort(key=lambda row: row[0])


def _print_draws(case: Drawn, repeat: str, console: Console) -> None:
    shown = Table(show_header=False, box=None, padding=(0, 1))
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    for name, value in case.draws.items():
        shown.add_row(f" {name}", value)
    console.print(shown)
    console.print(f"  repeat: {repeat}", markup=False, highlight=False, soft_wrap=True)


def _read(path: Path, module: str) -> dict[str, Any]:
    """Return the record at ``path``, or an empty one. Raises ValueError for another file."""
    if not path.exists():
        return {"module": module, "runs": []}
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the record {path}: {error}") from error
    found = kept if isinstance(kept, dict) else {}
    if "runs" in found and found.get("module") == module:
        return found
    of = f"a record of {found['module']}" if "module" in found else "another file"
    raise ValueError(
        f"{path} is {of}, not of canon check --random with {module}; name a new file with --record"
    )


def _run_of(kept: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    for known in kept["runs"]:
        if all(known.get(name) == run[name] for name in KEY):
            return known
    kept["runs"].append({**run, "cases": [], "failures": []})
    return kept["runs"][-1]


def _write(path: Path, kept: dict[str, Any]) -> None:
    """Write the record, one line per case. An interrupted write leaves the old file."""
    runs = []
    for run in kept["runs"]:
        head = {name: value for name, value in run.items() if name not in ("cases", "failures")}
        lines = ",\n".join(json.dumps(record.finite(row)) for row in run["cases"])
        failures = json.dumps(record.finite(run["failures"]), indent=1)
        runs.append(
            f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}],\n "failures": {failures}}}'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(
        f'{{"module": {json.dumps(kept["module"])}, "runs": [\n' + ",\n".join(runs) + "]}\n"
    )
    part.replace(path)


def _report(console: Console, path: Path, kept: dict, rows: list[list], taken: int) -> bool:
    title = f"{kept['module']}, random cases"
    shown = Table("function", "cases", "agree", "largest ratio", title=title)
    for function in sorted({row[1] for row in rows}):
        verdicts = [(row[2], row[3]) for row in rows if row[1] == function]
        agree = [ratio for verdict, ratio in verdicts if verdict == "agrees"]
        largest = short(max(agree, default=0))
        shown.add_row(function, str(len(verdicts)), str(len(agree)), largest)
    console.print(shown)
    total = sum(len(run["cases"]) for run in kept["runs"])
    console.print(f"Record: {path}, {total} cases in total.", highlight=False)
    verdicts = [row[2] for row in rows]
    return not summary(verdicts, console, taken) and "agrees" in verdicts
