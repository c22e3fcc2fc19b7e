"""Run the cases of `canon check` on process groups, and continue after a failure.

Ranks that are threads share one core, so processes divide many cases.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from canon.check import warming
from canon.check.case_runner import CaseFailed, CaseRunner, show
from canon.check.cases import WHOLE, Case, declined_by
from canon.testing import process_groups

PART = 4  # cases of a process: neighbours share inputs
START = {"cpu": "fork", "cuda": "spawn"}  # forks cannot use CUDA
CORES, MEMORY = 4, 8 << 30  # of a process that uses a GPU
_RESTARTS = 5  # new groups of processes after failures
LIMITS = {  # part of an error: the word of --features
    "unexpected keyword argument 'return_lse'": "no-lse",
    "unexpected keyword argument": "no-options",
    "positional arguments but": "no-mask",
}


def run_groups(
    kind: str, groups: Sequence[tuple[int, CaseRunner]], console: Console
) -> tuple[list[dict[str, Any]], bool]:
    """Return the results of pairs (ranks, runner), and whether Ctrl-C came: then those of the
    finished cases. ``kind``: a function of `process_groups`.
    """
    results: dict[str, Any] = {}
    names = [case.name for _, runner in groups for case in runner.cases]
    inputs_of = lambda case: repr(case.of_inputs)  # neighbours share cached inputs and results
    groups = [
        (ranks, replace(runner, cases=tuple(sorted(runner.cases, key=inputs_of))))
        for ranks, runner in groups
    ]
    try:
        if warming.worth_it(groups[0][1]):
            console.print(warming.warm(groups), highlight=False)
        for ranks, runner in groups:
            number = _processes(runner) if kind == "threads" else 1
            if number > 1:
                _run_in_processes(number, ranks, runner, results)
            else:
                _run(kind, ranks, runner, results)
    except KeyboardInterrupt:
        console.print(f"[bold red]Interrupted: {len(results)} of {len(names)} cases have run.")
        return [results[name] for name in names if name in results], True
    return [results[name] for name in names], False


def _run(kind: str, ranks: int, runner: CaseRunner, results: dict[str, Any]) -> dict[str, Any]:
    for case in runner.cases:
        if reason := declined_by(runner.backend, case):
            results[case.name] = _without_run(case.name, "declined", reason)
    restarts = 0
    while left := [case for case in runner.cases if case.name not in results]:
        error = None
        with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
            rest = replace(runner, cases=tuple(left), sink=Path(folder) / "results")
            rest.sink.touch()
            try:
                process_groups.run(kind, rest, ranks, timeout=120 + 20 * len(left))
            except (RuntimeError, TimeoutError) as raised:
                error = raised
            finally:
                found = map(json.loads, rest.sink.read_text().splitlines())
                results.update((result["case"], result) for result in found)
        if error is None:
            break
        case = _failed_case(error, left, results)
        results[case.name] = _failure(case, error)
        show(results[case.name])
        restarts += kind != "threads"
        if restarts > _RESTARTS:
            for other in left:
                failure = _failure(other, "not run: too many failures")
                results.setdefault(other.name, failure)
    return results


def _processes(runner: CaseRunner) -> int:
    """Return the number of processes, 1 if so few cases would not gain."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if runner.device == "cuda":
        cores = min(cores // CORES, torch.cuda.mem_get_info()[0] // MEMORY)
    return min(cores, len(runner.cases) // (4 * PART))


def _run_in_processes(number: int, ranks: int, runner: CaseRunner, results: dict[str, Any]) -> None:
    """Do what `_run` does. The processes end at Ctrl-C."""
    starts = range(0, len(runner.cases), PART)
    parts = [replace(runner, cases=runner.cases[start : start + PART]) for start in starts]
    context = multiprocessing.get_context(START[runner.device])
    with ProcessPoolExecutor(number, context, _start) as pool:
        futures = {pool.submit(_run, "threads", ranks, part, {}): part for part in parts}
        try:
            for future in as_completed(futures):
                error, cases = future.exception(), futures[future].cases
                ended = isinstance(error, BrokenProcessPool)
                failed = {case.name: _failure(case, error) for case in cases} if ended else {}
                results |= failed or future.result()
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _start() -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
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
