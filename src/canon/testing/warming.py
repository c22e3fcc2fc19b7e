"""Compile the kernels of a check before it runs, in parallel processes, into Triton's disk cache.

    parent     `warm`: starts one process and shows its progress; the check continues if the process fails
    process    runs the module once on every case; each launch records the compilation that it needs, and launches nothing
    forks      one per core: each compiles the next recorded job

Ranks that are threads launch one kernel at a time, so a check with an empty cache would compile one kernel at a time. If
processes shared the cases, several would compile the same kernels, and the slowest process would decide. Jobs have
Triton's own key, so none is compiled twice, and every fork takes a job when it is free. A job holds live objects
(tensor descriptors, constants, Gluon layouts). Forks inherit them without pickling, and never use the GPU. The first
process is a new one, because the check must not keep handles of kernels that were not compiled.

Checks on several GPUs are collected as threads that share one GPU. Kernels of transports between GPUs compile when they
run.
"""

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from canon.testing import process_groups, record
from canon.testing.case_runner import CaseRunner

Job = Callable[[], Any]
PROCESS = [sys.executable, "-m", "canon.testing.warming"]
_jobs: list[Job] = []  # inherited by forks


def worth_it(device: str) -> bool:
    """Return True if the check compiles kernels and several cores can share this."""
    return device == "cuda" and (os.cpu_count() or 1) > 1 and "triton" in sys.modules and hasattr(os, "fork")


def warm(groups: Sequence[tuple[int, CaseRunner]]) -> str:
    """Compile the kernels of ``groups``, pairs (ranks, runner). Return a line for the user.

    A stamp file in Triton's cache marks a code, GPU and cases that are compiled already.
    """
    stamp = _stamp(groups)
    if stamp.exists():
        return "The kernels are compiled already."
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = {"cases": 0, "compiled": 0, "failed": 0, "of": 0}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with subprocess.Popen(PROCESS, **pipes, start_new_session=True) as child, progress:
        task = progress.add_task("kernels: collecting", total=sum(len(runner.cases) for _, runner in groups))
        try:
            with suppress(OSError, ValueError):  # the child has ended, or its output is not JSON
                child.stdin.write(pickle.dumps(list(groups)))
                child.stdin.close()
                for line in child.stdout or ():
                    done |= json.loads(line)
                    of = done["of"]
                    phase = {"description": "kernels: compiling", "total": of} if of else {}
                    progress.update(task, completed=done["compiled"] + done["failed"] if of else done["cases"], **phase)
                child.wait()
        finally:
            with suppress(ProcessLookupError):  # end its forks, too
                os.killpg(child.pid, signal.SIGKILL)
    left = done["of"] - done["compiled"]
    if child.returncode or not done["of"]:
        return f"Compilation ended early: {done['compiled']} kernels are ready, the others compile when they run."
    if not left:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return f"{done['compiled']} kernels compiled" + (f"; {left} others compile when they run." if left else ".")


def _stamp(groups: Sequence[tuple[int, CaseRunner]]) -> Path:
    import torch
    from triton import __version__, knobs

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    first = groups[0][1]
    names = [(ranks, case.name) for ranks, runner in groups for case in runner.cases]
    content = repr((record.source(first.module), gpu, __version__, first.backend, first.source, names))
    return Path(knobs.cache.dir) / f"canon-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


# ---------------------------------------------------------------------- in the process
def collect(
    groups: Sequence[tuple[int, CaseRunner]], progress: Callable[[int], None] = lambda cases: None
) -> list[Job]:
    """Return the distinct compilations of all cases, and call ``progress(cases)`` after each case.

    If a case raises, only its compilations before the error are returned.
    """
    done = 0
    with recorded_jobs() as jobs:
        for ranks, runner in groups:
            for case in runner.cases:
                with suppress(RuntimeError):  # the check will report it
                    process_groups.threads(replace(runner, cases=(case,)).rehearse, ranks)
                done += 1
                progress(done)
    return list(jobs.values())


@contextmanager
def recorded_jobs() -> Iterator[dict[Any, Job]]:
    """Within the block, collect Triton's distinct compilations in the dict. Nothing is compiled or launched."""
    from triton.runtime.jit import JITFunction

    jobs: dict[Any, Job] = {}
    do_compile = JITFunction._do_compile

    def record_job(self, key, *arguments):
        jobs.setdefault((id(self), key), partial(do_compile, self, key, *arguments))
        # returns None, so that Triton launches nothing

    JITFunction._do_compile = record_job
    try:
        yield jobs
    finally:
        JITFunction._do_compile = do_compile


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[bool]:
    """Run the jobs in forks. Yield True or False for the success of each job. If a fork dies, the remaining jobs fail."""
    _jobs[:] = jobs
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(_run, index) for index in range(len(jobs))]
        for future in as_completed(futures):
            try:
                future.result()
            except Exception:  # Triton's, or BrokenProcessPool
                yield False
            else:
                yield True


def _run(index: int) -> None:
    _jobs[index]()


def main() -> None:
    """Read pickled groups from standard input, compile their kernels, and print the progress as JSON lines."""

    def report(**counts: int) -> None:
        print(json.dumps(counts), flush=True)

    jobs = collect(pickle.load(sys.stdin.buffer), lambda cases: report(cases=cases))
    done = {True: 0, False: 0}
    report(of=len(jobs))
    for succeeded in compile_all(jobs, os.cpu_count() or 1):
        done[succeeded] += 1
        report(compiled=done[True], failed=done[False])


if __name__ == "__main__":
    main()
