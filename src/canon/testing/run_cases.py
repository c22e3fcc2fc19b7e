"""Run the cases of `canon check` in worlds: progress while they run, a fresh world after a failure, an end at Ctrl-C.

run_cases     results of all cases, in order; a case that ends its world has failed, and a fresh world runs the others
Interrupted   Ctrl-C: holds the results of the cases that had finished
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from canon.testing import process_groups
from canon.testing.case_runner import CaseFailed, CaseRunner
from canon.testing.cases import Case

_RESTARTS = 5  # of worlds made of processes, after failures


class Interrupted(KeyboardInterrupt):
    """``Interrupted(results)``: the results of the cases that had finished."""

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.args[0]


def run_cases(
    kind: str, ranks: int, trial: CaseRunner, before: int = 0, total: int = 0, aloud: bool = True
) -> list[dict[str, Any]]:
    """Return a result for every case, in order. Raises Interrupted at Ctrl-C.

    ``before`` of ``total`` cases have run elsewhere: the progress counts them. ``aloud``: where there is no terminal, a
    line is printed for every case.
    """
    results: dict[str, dict[str, Any]] = {}
    restarts = 0
    while left := [case for case in trial.cases if case.name not in results]:
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            some = replace(trial, cases=tuple(left), sink=Path(folder) / "results")
            some.sink.touch()
            done = before + len(results)
            try:
                error = _go(
                    partial(_start(kind, len(left)), some, ranks), some.sink, done, total or len(trial.cases), aloud
                )
            except KeyboardInterrupt:
                results |= _written(some.sink)
                raise Interrupted([results[case.name] for case in trial.cases if case.name in results]) from None
            results |= _written(some.sink)
        if error is None:
            break
        cause = error.__cause__
        named = cause.args[0] if isinstance(cause, CaseFailed) else None
        case = next((case for case in left if case.name == named or (not named and case.name not in results)), None)
        if case is None:
            raise error
        results[case.name] = _failed(case, error)
        restarts += kind != "threads"
        if restarts > _RESTARTS:
            results |= {c.name: _failed(c, "not run: too many failures") for c in left if c.name not in results}
    return [results[case.name] for case in trial.cases]


def _written(sink: Path) -> dict[str, dict[str, Any]]:
    return {result["case"]: result for result in map(json.loads, _lines(sink))}


def _start(kind: str, cases: int) -> Callable:
    return (
        partial(getattr(process_groups, kind), timeout=120 + 20 * cases)
        if kind != "threads"
        else process_groups.threads
    )


def _failed(case: Case, error: Exception | str) -> dict[str, Any]:
    """float64 is an offer: hardware kernels may decline it. NotImplementedError always declines. All else must run."""
    cause = getattr(error, "__cause__", None)
    text = f"{str(error).split(':')[0]}: {cause}" if isinstance(cause, CaseFailed) else str(error)
    kinds = ("NotImplementedError", *(("ValueError", "TypeError") if case.dtype == "float64" else ()))
    return {
        "case": case.name,
        "verdict": "declined" if str(cause).startswith(kinds) else "failed",
        "faults": [text],
        "measures": [],
        "same_bits": None,
        "seconds": [],
        "reference_seconds": [],
    }


def _lines(sink: Path) -> list[str]:
    """The lines that are there in full."""
    return sink.read_text().split("\n")[:-1]


def _go(start: Callable[[], Any], sink: Path, done: int, total: int, aloud: bool) -> Exception | None:
    """Run a world and return its error. Show the progress as a bar, or as lines where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, ended = Console(stderr=True), threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=total, completed=done)

        def follow() -> None:
            told, last = 0, False
            while not last:
                last = ended.wait(0.3)
                finished = _lines(sink)
                progress.update(task, completed=done + len(finished))
                if aloud and not console.is_terminal:
                    for number, line in enumerate(finished[told:], done + told + 1):
                        result = json.loads(line)
                        print(f"{number}/{total} {result['case']} {result['verdict']}", file=sys.stderr, flush=True)
                told = len(finished)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            start()
        except (RuntimeError, TimeoutError) as error:
            return error
        finally:
            ended.set()
            follower.join()
    return None
