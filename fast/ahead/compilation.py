"""Compile kernels before they run, in parallel processes, into the disk caches of Triton and CUDA.

    parent     `compile_ahead`: starts one process and reports its progress
    process    divides the functions that launch kernels into shares, a fork for each
    share      calls its functions; each launch records its compilation, and launches nothing
    forks      one per core: each compiles the next job of its share that no other one has claimed

The last forks inherit the jobs and never use the GPU. The first process is new, because a fork of a
process with threads may deadlock. Processes of one host take turns.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyright: ignore
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import canon
from canon.fast.kernels.cuda.kernel import collecting
from canon.fast.kernels.cuda.program import cache_folder
from canon.fast.replay import recordings as prepared
from canon.fast.replay.native import native_module
from canon.fast.tables.work_tables import native_tables

Job = Callable[[], Any]
PROCESS = [sys.executable, "-P", "-m", "canon.fast.ahead.compilation"]
_jobs: list[Job] = []  # inherited by forks


@dataclass(frozen=True)
class Outcome:
    """Counts of variants: ``of`` is 0 if all were compiled before."""

    compiled: int = 0
    failed: int = 0
    of: int = 0
    error: str = ""

    @property
    def complete(self) -> bool:
        return not self.error and self.compiled == self.of


def compile_ahead(
    collect: Sequence[Job],
    identities: Sequence[Any],
    *,
    processes: int | None = None,
    progress: bool = True,
) -> Outcome:
    """Compile the kernels that the functions ``collect``, picklable, launch.

    ``identities``: values with a stable repr that decide the work besides code and GPU. If each one
    has left a stamp, nothing is done. ``processes``: None is one per core.
    """
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "canon.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also if this process dies
        if are_stamped(identities):
            return Outcome()
        outcome = _in_process(collect, processes or len(os.sched_getaffinity(0)), progress)
        if outcome.complete:
            for identity in identities:
                _stamp(identity).touch()
    return outcome


def are_stamped(identities: Sequence[Any]) -> bool:
    """Return whether `compile_ahead` has completed all."""
    return all(_stamp(identity).exists() for identity in identities)


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {
        "PYTHONPATH": paths,
        "TRITON_CACHE_DIR": knobs.cache.dir,
        "CANON_COMPILE_AHEAD": "0",
    }


def _in_process(collect: Sequence[Callable[[], None]], processes: int, progress: bool) -> Outcome:
    done = {"compiled": 0, "failed": 0, "of": 0}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress)
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as claims:
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": errors,
            "env": _environment(),
        }
        with subprocess.Popen(PROCESS, **pipes, start_new_session=True) as child, bar:
            task = bar.add_task("kernels", total=None)
            try:
                # the child has ended, or its output is not JSON
                with suppress(OSError, ValueError):
                    child.stdin.write(pickle.dumps((collect, processes, Path(claims))))
                    child.stdin.close()
                    for line in child.stdout or ():
                        for name, count in json.loads(line).items():
                            done[name] += count
                        completed = done["compiled"] + done["failed"]
                        bar.update(task, completed=completed, total=done["of"])
                    child.wait()
            finally:
                with suppress(ProcessLookupError):  # end its forks, too
                    os.killpg(child.pid, signal.SIGKILL)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    error = (lines or [f"exit status {child.returncode}"])[-1]
    complete = not child.returncode and 0 < done["of"] == done["compiled"]
    return Outcome(**done, error="" if complete else error)


def _stamp(identity: Any) -> Path:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    content = repr(
        (_code(), gpu, triton.__version__, torch.__version__, str(cache_folder()), identity)
    )
    return Path(knobs.cache.dir) / f"canon-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


@lru_cache(maxsize=1)
def _code() -> str:
    total, package = hashlib.sha256(), Path(canon.__file__).resolve().parent
    rooms = [(package / room).resolve() for room in ("fast", "masks", "ranks", "route", "faces")]
    for file in sorted(x for room in rooms for x in room.rglob("*.[pc]*") if x.is_file()):
        if file.suffix in (".py", ".c", ".cu", ".cuh"):
            total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


@contextmanager
def recorded_jobs() -> Iterator[dict[Any, Job]]:
    """Within the block, collect distinct compilations in the dict; launch and replay nothing."""
    jobs: dict[Any, Job] = {}
    functions: Any = JITFunction
    do_compile, replayed = functions._do_compile, prepared.REPLAYED

    def record_job(self, key, *arguments):
        jobs.setdefault(
            (self.fn.__module__, self.fn.__name__, key),
            partial(_compile, do_compile, self, key, *arguments),
        )
        # None: Triton launches nothing

    functions._do_compile = record_job
    prepared.REPLAYED = {}  # a prepared pass needs compiled kernels
    try:
        with collecting(jobs):
            yield jobs
    finally:
        functions._do_compile, prepared.REPLAYED = do_compile, replayed


def _compile(do_compile: Callable, *arguments: Any) -> None:
    compiled = do_compile(*arguments)
    launcher = getattr(driver.active, "launcher_cls", None)  # not of a driver that only compiles
    if launcher is not None:
        launcher(compiled.src, compiled.metadata)  # older Triton compiles C code here


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[BaseException | None]:
    """Run the jobs in forks. Yield None or the error of each."""
    _jobs[:] = jobs
    fork, parent = multiprocessing.get_context("fork"), os.getpid()
    with ProcessPoolExecutor(processes, fork, _end_with, (parent,)) as pool:
        for future in as_completed([pool.submit(_run, index) for index in range(len(jobs))]):
            yield future.exception()  # Triton's, or BrokenProcessPool


def _end_with(parent: int) -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # it would hold the output open
    if os.getppid() != parent:
        os._exit(1)


def _run(index: int) -> None:
    _jobs[index]()


def main() -> None:
    """Compile the pickled work of the standard input, and print progress as JSON lines."""
    collect, processes, claims = pickle.load(sys.stdin.buffer)
    shares = min(len(collect), max(1, min(8, processes // 2)))  # each has a CUDA context
    forks = -(-processes // shares)
    work = [partial(_compile_share, collect[i::shares], forks, claims) for i in range(shares)]
    for error in compile_all(work, shares):
        if error is not None:
            raise error


def _compile_share(collect: Sequence[Job], processes: int, claims: Path) -> None:
    def report(**counts: int) -> None:
        print(f"{json.dumps(counts)}\n", end="", flush=True)  # in one write: shares run at once

    with recorded_jobs() as jobs:
        for function in collect:
            function()
    jobs = {"native replay": native_module, "native tables": native_tables, **jobs}
    report(of=len(jobs))
    work = [partial(_claim_and_run, claims, *job) for job in jobs.items()]
    for error in compile_all(work, processes):
        claimed = isinstance(error, FileExistsError)  # by another share
        report(**{"of": -1} if claimed else {"failed" if error else "compiled": 1})
        if error and not claimed:
            print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)


def _claim_and_run(claims: Path, key: Any, job: Job) -> None:
    (claims / hashlib.sha256(repr(key).encode()).hexdigest()).touch(exist_ok=False)
    job()


if __name__ == "__main__":
    main()
