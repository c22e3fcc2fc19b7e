"""Run the cases of `canon check` on process groups, and continue after a failure.

Ranks that are threads on the CPU share one core, so forks, one for each core, divide many cases.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from canon.check.case_runner import CaseFailed, CaseRunner
from canon.check.cases import WHOLE, Case, declined_by
from canon.testing import process_groups

Show = Callable[[Iterable[dict[str, Any]]], None]
PART = 4  # cases of a fork: neighbours share inputs
_RESTARTS = 5  # new groups of processes after failures
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
LIMITS = {  # part of an error: the word of --features
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
    """Return the results of all cases, in order, from the function ``kind`` of `process_groups`.
    Raises Interrupted at Ctrl-C.
    """
    forks = _forks(len(runner.cases)) if kind == "threads" and runner.device == "cpu" else 1
    results: dict[str, Any] = {}
    try:
        with _progress(before, total or len(runner.cases), verbose) as show:
            if forks > 1:
                _run_in_forks(forks, ranks, runner, results, show)
            else:
                _run(kind, ranks, runner, results, show)
    except KeyboardInterrupt:
        raise Interrupted(_in_order(runner, results)) from None
    return _in_order(runner, results)


def _in_order(runner: CaseRunner, results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results[case.name] for case in runner.cases if case.name in results]


@contextmanager
def _progress(before: int, total: int, verbose: bool) -> Iterator[Show]:
    console, numbers = Console(stderr=True), count(before + 1)
    with Progress(
        *COLUMNS, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("checking", total=total, completed=before)

        def show(results: Iterable[dict[str, Any]]) -> None:
            for result, number in zip(results, numbers, strict=False):
                progress.update(task, completed=number)
                if verbose and not console.is_terminal:
                    line = f"{number}/{total} {result['case']} {result['verdict']}"
                    if result["verdict"] in ("disagrees", "failed"):  # a time limit may come next
                        line += f": {shorten(result['faults'][0], 300, placeholder=' ...')}"
                    print(line, file=sys.stderr, flush=True)

        yield show


def _run(kind: str, ranks: int, runner: CaseRunner, results: dict[str, Any], show: Show) -> None:
    reasons = {case.name: declined_by(runner.backend, case) for case in runner.cases}
    results |= {
        name: _without_run(name, "declined", reason) for name, reason in reasons.items() if reason
    }
    restarts = 0
    show(results.values())
    while left := [case for case in runner.cases if case.name not in results]:
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            rest = replace(runner, cases=tuple(left), sink=Path(folder) / "results")
            rest.sink.touch()
            error = None
            with _following(rest.sink, results, show):
                try:
                    process_groups.run(kind, rest, ranks, timeout=120 + 20 * len(left))
                except (RuntimeError, TimeoutError) as raised:
                    error = raised
        if error is None:
            break
        case = _failed_case(error, left, results)
        restarts += kind != "threads"
        found = [_failure(case, error)]
        if restarts > _RESTARTS:
            others = (x for x in left if x is not case and x.name not in results)
            found += [_failure(other, "not run: too many failures") for other in others]
        results |= {result["case"]: result for result in found}
        show(found)


@contextmanager
def _following(sink: Path, results: dict[str, Any], show: Show) -> Iterator[None]:
    ended = threading.Event()

    def follow() -> None:
        read, last = 0, False
        while not last:
            last = ended.wait(0.3)
            lines = sink.read_text().split("\n")[read:-1]
            found, read = [json.loads(line) for line in lines], read + len(lines)
            results.update((result["case"], result) for result in found)
            show(found)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _forks(cases: int) -> int:
    """Return the number of forks, 1 if so few cases would not gain."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(cores, cases // (4 * PART))


def _run_in_forks(
    forks: int, ranks: int, runner: CaseRunner, results: dict[str, Any], show: Show
) -> None:
    """Do what `_run` does. Forks inherit the imported modules, and end at Ctrl-C."""
    starts, fork = range(0, len(runner.cases), PART), multiprocessing.get_context("fork")
    parts = [replace(runner, cases=runner.cases[start : start + PART]) for start in starts]
    with ProcessPoolExecutor(forks, fork, _start_fork) as pool:
        submit = partial(pool.submit, run_cases, "threads", ranks, verbose=False)
        futures = {submit(part): part for part in parts}
        try:
            for future in as_completed(futures):
                error, cases = future.exception(), futures[future].cases
                ended = isinstance(error, BrokenProcessPool)
                found = [_failure(case, error) for case in cases] if ended else future.result()
                results |= {result["case"]: result for result in found}
                show(found)
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


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


def _failure(case: Case, error: Exception | str) -> dict[str, Any]:
    """Return the result of a case that raised. Some errors decline it."""
    cause = getattr(error, "__cause__", None)
    text = f"{str(error).split(':')[0]}: {cause}" if isinstance(cause, CaseFailed) else str(error)
    kinds = ("NotImplementedError", *(("ValueError", "TypeError") * (case.dtype == "float64")))
    verdict = "declined" if str(cause).startswith(kinds) else "failed"
    word = next((word for part, word in LIMITS.items() if part in text), None)
    if word is None:
        return _without_run(case.name, verdict, text)
    remedy = f"if {case.function} has no such argument, check the module with --features {word}"
    if case.function not in WHOLE:
        remedy = f"{case.function} must take the arguments of canon.reference; another function "
        remedy += "needs another name"
    return _without_run(case.name, verdict, text, remedy)


def _without_run(name: str, verdict: str, *reasons: str) -> dict[str, Any]:
    return {
        "case": name,
        "verdict": verdict,
        "faults": [*reasons],
        "measures": [],
        "same_bits": None,
    }
