"""Run the cases of `canon check` on a process group, show the progress, and continue after a failure."""

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

from canon.check.case_runner import CaseFailed, CaseRunner
from canon.check.cases import ATTEND, REPLICATED, Case, declined_by
from canon.testing import process_groups

_RESTARTS = 5  # new process groups after failures; there is no limit for threads
LIMITS = {  # part of an error: the word of --features for a module that raises it
    "unexpected keyword argument 'return_lse'": "no-lse",
    "unexpected keyword argument": "no-options",
    "positional arguments but": "no-mask",
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the results of the finished cases."""

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.args[0]


def run_cases(
    kind: str, ranks: int, runner: CaseRunner, before: int = 0, total: int = 0, verbose: bool = True
) -> list[dict[str, Any]]:
    """Return the results of all cases, in order. ``kind`` names a function of `process_groups`.

    After an exception a new process group runs the other cases. The progress starts at ``before`` of ``total``. Without a
    terminal, ``verbose`` prints a line for each case. Raises Interrupted at Ctrl-C.
    """
    reasons = {case.name: declined_by(runner.backend, case) for case in runner.cases}
    results = {name: _without_run(name, "declined", reason) for name, reason in reasons.items() if reason}
    restarts, total = 0, total or len(runner.cases)
    while left := [case for case in runner.cases if case.name not in results]:
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            rest = replace(runner, cases=tuple(left), sink=Path(folder) / "results")
            rest.sink.touch()
            start = partial(process_groups.run, kind, rest, ranks, timeout=120 + 20 * len(left))
            try:
                error = _run_with_progress(start, rest.sink, before + len(results), total, verbose)
            except KeyboardInterrupt:
                results |= _finished(rest.sink)
                raise Interrupted([results[case.name] for case in runner.cases if case.name in results]) from None
            results |= _finished(rest.sink)
        if error is None:
            break
        case = _failed_case(error, left, results)
        results[case.name] = _failure(case, error)
        restarts += kind != "threads"
        if restarts > _RESTARTS:
            results |= {c.name: _failure(c, "not run: too many failures") for c in left if c.name not in results}
    return [results[case.name] for case in runner.cases]


def _failed_case(error: Exception, left: list[Case], results: dict[str, Any]) -> Case:
    cause = error.__cause__
    name = cause.args[0] if isinstance(cause, CaseFailed) else None
    for case in left:
        if case.name == name or (not name and case.name not in results):
            return case
    raise error


def _finished(sink: Path) -> dict[str, dict[str, Any]]:
    return {result["case"]: result for result in map(json.loads, _lines(sink))}


def _failure(case: Case, error: Exception | str) -> dict[str, Any]:
    """Return the result of a case that raised. NotImplementedError declines it. In float64 ValueError and TypeError do, too."""
    cause = getattr(error, "__cause__", None)
    text = f"{str(error).split(':')[0]}: {cause}" if isinstance(cause, CaseFailed) else str(error)
    kinds = ("NotImplementedError", *(("ValueError", "TypeError") if case.dtype == "float64" else ()))
    word = next((word for part, word in LIMITS.items() if part in text), None)
    if case.function in {*ATTEND, *REPLICATED, "prepare"}:
        remedy = f"if {case.function} has no such argument, check the module with --features {word}"
    else:
        remedy = f"{case.function} must take the arguments of canon.reference; another function needs another name"
    hint = [remedy] if word else []
    return _without_run(case.name, "declined" if str(cause).startswith(kinds) else "failed", text, *hint)


def _without_run(name: str, verdict: str, *reasons: str) -> dict[str, Any]:
    result = {"case": name, "verdict": verdict, "faults": [*reasons], "measures": [], "same_bits": None}
    return result | {"seconds": [], "reference_seconds": []}


def _lines(sink: Path) -> list[str]:
    return sink.read_text().split("\n")[:-1]


def _run_with_progress(start: Callable[[], Any], sink: Path, done: int, total: int, verbose: bool) -> Exception | None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, ended = Console(stderr=True), threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=total, completed=done)

        def follow() -> None:
            printed, last = 0, False
            while not last:
                last = ended.wait(0.3)
                finished = _lines(sink)
                progress.update(task, completed=done + len(finished))
                if verbose and not console.is_terminal:
                    for number, line in enumerate(finished[printed:], done + printed + 1):
                        result = json.loads(line)
                        print(f"{number}/{total} {result['case']} {result['verdict']}", file=sys.stderr, flush=True)
                printed = len(finished)

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
