"""Run the cases of `canon check` on a process group, show the progress, and continue after a
failure.

Ranks that are threads on the CPU share one core. So many cases are divided among forks, one for
each core.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from canon.check.case_runner import CaseFailed, CaseRunner
from canon.check.cases import ATTEND, REPLICATED, Case, declined_by
from canon.testing import process_groups

PART = 4  # cases that a fork takes at once: neighbours often have the same inputs
_RESTARTS = 5  # new process groups after failures; there is no limit for threads
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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

    After an exception a new process group runs the other cases. The progress starts at ``before``
    of ``total``. Without a terminal, ``verbose`` prints a line for each case. Raises Interrupted at
    Ctrl-C.
    """
    total = total or len(runner.cases)
    if kind == "threads" and runner.device == "cpu" and (forks := _forks(len(runner.cases))) > 1:
        return _run_in_forks(forks, ranks, runner, before, total, verbose)
    reasons = {case.name: declined_by(runner.backend, case) for case in runner.cases}
    results = {
        name: _without_run(name, "declined", reason) for name, reason in reasons.items() if reason
    }
    restarts = 0
    while left := [case for case in runner.cases if case.name not in results]:
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            rest = replace(runner, cases=tuple(left), sink=Path(folder) / "results")
            rest.sink.touch()
            start = partial(process_groups.run, kind, rest, ranks, timeout=120 + 20 * len(left))
            try:
                error = _run_with_progress(start, rest.sink, before + len(results), total, verbose)
            except KeyboardInterrupt:
                results |= _finished(rest.sink)
                raise Interrupted(
                    [results[case.name] for case in runner.cases if case.name in results]
                ) from None
            results |= _finished(rest.sink)
        if error is None:
            break
        case = _failed_case(error, left, results)
        results[case.name] = _failure(case, error)
        restarts += kind != "threads"
        if restarts > _RESTARTS:
            results |= {
                c.name: _failure(c, "not run: too many failures")
                for c in left
                if c.name not in results
            }
    return [results[case.name] for case in runner.cases]


def _forks(cases: int) -> int:
    """Return the number of forks for so many cases:
    1 if they take less time than the forks save.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(cores, cases // (4 * PART))


def _run_in_forks(
    forks: int, ranks: int, runner: CaseRunner, before: int, total: int, verbose: bool
) -> list[dict]:
    """Return what `run_cases` returns. Forks inherit the imported modules, and end at Ctrl-C."""
    cases, results = runner.cases, {}
    parts = [
        replace(runner, cases=cases[start : start + PART]) for start in range(0, len(cases), PART)
    ]
    console, fork = Console(stderr=True), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(forks, fork, _start_fork) as pool:
        futures = {
            pool.submit(run_cases, "threads", ranks, part, verbose=False): part for part in parts
        }
        with Progress(
            *COLUMNS, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("checking", total=total, completed=before)
            try:
                for future in as_completed(futures):
                    for result in _results_of_fork(future, futures[future]):
                        results[result["case"]] = result
                        if verbose and not console.is_terminal:
                            _print_line(before + len(results), total, result)
                    progress.update(task, completed=before + len(results))
            except KeyboardInterrupt:
                for child in multiprocessing.active_children():
                    child.terminate()
                raise Interrupted(
                    [results[case.name] for case in cases if case.name in results]
                ) from None
    return [results[case.name] for case in cases]


def _results_of_fork(future: Future, part: CaseRunner) -> list[dict[str, Any]]:
    if isinstance(error := future.exception(), BrokenProcessPool):
        return [_failure(case, error) for case in part.cases]
    return future.result()


def _start_fork() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
    """Return the result of a case that raised. NotImplementedError declines it. In float64
    ValueError and TypeError do, too.
    """
    cause = getattr(error, "__cause__", None)
    text = f"{str(error).split(':')[0]}: {cause}" if isinstance(cause, CaseFailed) else str(error)
    kinds = (
        "NotImplementedError",
        *(("ValueError", "TypeError") if case.dtype == "float64" else ()),
    )
    word = next((word for part, word in LIMITS.items() if part in text), None)
    if case.function in {*ATTEND, *REPLICATED, "prepare"}:
        remedy = f"if {case.function} has no such argument, check the module with --features {word}"
    else:
        remedy = (
            f"{case.function} must take the arguments of canon.reference; another function "
            "needs another name"
        )
    hint = [remedy] if word else []
    return _without_run(
        case.name, "declined" if str(cause).startswith(kinds) else "failed", text, *hint
    )


def _without_run(name: str, verdict: str, *reasons: str) -> dict[str, Any]:
    result = {
        "case": name,
        "verdict": verdict,
        "faults": [*reasons],
        "measures": [],
        "same_bits": None,
    }
    return result | {"seconds": []}


def _lines(sink: Path) -> list[str]:
    return sink.read_text().split("\n")[:-1]


def _print_line(number: int, total: int, result: dict[str, Any]) -> None:
    print(f"{number}/{total} {result['case']} {result['verdict']}", file=sys.stderr, flush=True)


def _run_with_progress(
    start: Callable[[], Any], sink: Path, done: int, total: int, verbose: bool
) -> Exception | None:
    console, ended = Console(stderr=True), threading.Event()
    with Progress(
        *COLUMNS, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("checking", total=total, completed=done)

        def follow() -> None:
            printed, last = 0, False
            while not last:
                last = ended.wait(0.3)
                finished = _lines(sink)
                progress.update(task, completed=done + len(finished))
                if verbose and not console.is_terminal:
                    for number, line in enumerate(finished[printed:], done + printed + 1):
                        _print_line(number, total, json.loads(line))
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
