"""Compile the kernels of a check before it runs, in parallel processes, into Triton's disk cache.

    parent     `warm`: starts one process, shows how far it is; whatever goes wrong in it is not fatal
    process    runs the module's half of every case once; a launch notes the compilation that it needs, and runs nothing
    its forks  one per core: each takes the next note, and compiles it

Ranks that are threads launch one kernel at a time, so a check on an empty cache would compile one kernel after another. A
partition of the cases over processes would compile common kernels several times, and its slowest part would decide. Notes are
distinct by Triton's own key, so nothing is compiled twice, and forks balance themselves. A note holds live objects (tensor
descriptors, constants, layouts of Gluon). Forks inherit them, so none has to be pickled, and a fork never uses the GPU.
The first process is a new one, because the check itself must not keep handles of kernels that were noted only.

Worlds of several GPUs are noted as threads that share one. Kernels that only their transports use compile when they run.
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
    """Whether kernels are compiled at all, and there are cores to share that."""
    return device == "cuda" and (os.cpu_count() or 1) > 1 and "triton" in sys.modules and hasattr(os, "fork")


def warm(worlds: Sequence[tuple[int, CaseRunner]]) -> str:
    """Compile what the worlds need; return a line about it. ``worlds``: pairs of ranks and a trial.

    Once done for the same code, GPU and cases, it is not done again: a stamp in Triton's cache says so.
    """
    stamp = _stamp(worlds)
    if stamp.exists():
        return "Kernels were compiled before."
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = {"cases": 0, "compiled": 0, "failed": 0, "of": 0}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with subprocess.Popen(PROCESS, **pipes, start_new_session=True) as child, progress:
        task = progress.add_task("kernels: collecting", total=sum(len(trial.cases) for _, trial in worlds))
        try:
            with suppress(OSError, ValueError):  # it has ended, or printed something else
                child.stdin.write(pickle.dumps(list(worlds)))
                child.stdin.close()
                for line in child.stdout or ():
                    done |= json.loads(line)
                    of = done["of"]
                    place = {"description": "kernels: compiling", "total": of} if of else {}
                    progress.update(task, completed=done["compiled"] + done["failed"] if of else done["cases"], **place)
                child.wait()
        finally:
            with suppress(ProcessLookupError):  # its forks must not outlive it
                os.killpg(child.pid, signal.SIGKILL)
    left = done["of"] - done["compiled"]
    if child.returncode or not done["of"]:
        return f"Compiling ahead ended early, {done['compiled']} kernels are ready: the others compile when they run."
    if not left:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return f"{done['compiled']} kernels compiled ahead" + (f", {left} left to compile when they run." if left else ".")


def _stamp(worlds: Sequence[tuple[int, CaseRunner]]) -> Path:
    import torch
    from triton import __version__, knobs

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    first = worlds[0][1]
    names = [(ranks, case.name) for ranks, trial in worlds for case in trial.cases]
    content = repr((record.source(first.module), gpu, __version__, first.backend, first.source, names))
    return Path(knobs.cache.dir) / f"canon-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


# ---------------------------------------------------------------------- in the process
def collect(worlds: Sequence[tuple[int, CaseRunner]], told: Callable[[int], None] = lambda cases: None) -> list[Job]:
    """Return the distinct compilations of the worlds' cases. A case that raises has noted what it needed until then."""
    done = 0
    with noting() as jobs:
        for ranks, trial in worlds:
            for case in trial.cases:
                with suppress(RuntimeError):  # the check will report it
                    process_groups.threads(replace(trial, cases=(case,)).rehearse, ranks)
                done += 1
                told(done)
    return list(jobs.values())


@contextmanager
def noting() -> Iterator[dict[Any, Job]]:
    """Within the block, Triton compiles nothing and launches nothing: the dict fills with its distinct compilations."""
    from triton.runtime.jit import JITFunction

    jobs: dict[Any, Job] = {}
    compiling = JITFunction._do_compile

    def note(self, key, *arguments):
        jobs.setdefault((id(self), key), partial(compiling, self, key, *arguments))
        # it returns None: then nothing is launched

    JITFunction._do_compile = note
    try:
        yield jobs
    finally:
        JITFunction._do_compile = compiling


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[bool]:
    """Run the jobs in forks; yield, for each one that ends, whether it succeeded. A fork that dies ends all of them."""
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
    """Collect and compile for the worlds that come, pickled, on standard input; print JSON lines."""

    def say(**counts: int) -> None:
        print(json.dumps(counts), flush=True)

    jobs = collect(pickle.load(sys.stdin.buffer), lambda cases: say(cases=cases))
    done = {True: 0, False: 0}
    say(of=len(jobs))
    for succeeded in compile_all(jobs, os.cpu_count() or 1):
        done[succeeded] += 1
        say(compiled=done[True], failed=done[False])


if __name__ == "__main__":
    main()
