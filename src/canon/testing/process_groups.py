"""Run one program on every rank of a process group.

    process_groups.threads(program, ranks=4)      threads of this process: fast
    process_groups.processes(program, ranks=4)    processes on the CPU, over gloo: takes seconds
    process_groups.gpus(program)                  processes with a GPU each, over NCCL

Results and output are in rank order. RuntimeError names the first rank that fails. Threads that all
wait for each other raise at once. Processes end at a timeout, with their stacks.
"""

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from canon.ranks.group import GATHERING
from canon.testing.rank_processes import run_processes
from canon.testing.rendezvous import Ended, Rendezvous, print_by_rank, rank_error
from canon.testing.thread_group import ThreadGroup

Program = Callable[[], Any]


def threads(program: Program, ranks: int = 4) -> list[Any]:
    """Run ``program()`` on threads, with the caller's context variables. Raises RuntimeError."""
    _check_ranks(ranks)
    if hasattr(_thread, "rank"):
        raise RuntimeError("a rank cannot start a group of threads inside its own group")
    with _one_group:
        return _Threads(program, ranks).run()


_one_group = threading.Lock()  # a group of threads replaces the state of torch.distributed
_thread = threading.local()


class _Threads:
    def __init__(self, program: Program, ranks: int):
        self.program, self.ranks = program, ranks
        self.rendezvous, self.store = Rendezvous(ranks), dist.HashStore()
        self.output = _OutputByRank(sys.stdout, ranks)
        self.results: list[Any] = [None] * ranks
        self.failures: dict[int, BaseException] = {}
        # in Python 3.11, an interrupt during Thread.join marks a running thread as ended
        self.ended = [threading.Event() for _ in range(ranks)]
        self.cores = torch.get_num_threads()
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> list[Any]:
        contexts = [contextvars.copy_context() for _ in range(self.ranks)]
        workers = [
            threading.Thread(target=context.run, args=(self._run_rank, rank), daemon=True)
            for rank, context in enumerate(contexts)
        ]
        with _state_per_thread(self.output):
            try:
                with _one_launch_at_a_time() if kernel_gpus() else nullcontext():
                    for worker in workers:
                        worker.start()
                    for ended in self.ended:
                        ended.wait()
            except BaseException:  # an interrupt: the ranks end at their next wait
                self.rendezvous.leave(self.ranks, "the caller was interrupted")
                raise
            finally:
                for worker, ended in zip(workers, self.ended, strict=True):
                    if worker.ident is not None:  # it was started
                        ended.wait()
                        worker.join()
                        _await_exit(worker)
        print_by_rank(["".join(texts) for texts in self.output.texts])
        for rank, error in self.failures.items():
            raise rank_error(rank, error) from error
        if self.rendezvous.ended:
            raise RuntimeError(self.rendezvous.ended)
        return self.results

    def _run_rank(self, rank: int) -> None:
        _thread.rank, _thread.rendezvous = rank, self.rendezvous
        self.output.local.rank = rank
        try:
            torch.set_num_threads(max(1, self.cores // self.ranks))
            if self.gpu is not None:
                torch.cuda.set_device(self.gpu)
            dist.init_process_group("threads", rank=rank, world_size=self.ranks, store=self.store)
            # CUDA nodes of a backward pass would run in a thread of the device, which has no rank.
            with torch.autograd.set_multithreading_enabled(False):
                self.results[rank] = self.program()
            self.rendezvous.leave(rank)
        except Ended:
            self.rendezvous.leave(rank)
        except BaseException as error:
            self.failures[rank] = error
            self.rendezvous.leave(rank, f"rank {rank} failed")
        finally:
            try:
                if dist.is_initialized():
                    dist.destroy_process_group()
            finally:
                self.ended[rank].set()


def _await_exit(worker: threading.Thread) -> None:
    """Wait until Linux has ended a joined thread. Before Python 3.13 `join` returns earlier: a fork
    would inherit the locks of its last C code, such as MKL's.
    """
    task, start = Path(f"/proc/self/task/{worker.native_id}"), time.monotonic()
    while task.exists() and time.monotonic() - start < 60:
        time.sleep(0.001)


@contextmanager
def _state_per_thread(output: "_OutputByRank") -> Iterator[None]:
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    cores, shared = torch.get_num_threads(), dist.distributed_c10d._world
    dist.distributed_c10d._world = world = ThreadLocalWorld()
    if not hasattr(ThreadLocalWorld, "comms"):
        world.comms = []  # torchcomms communicators; no rank here has one
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    sys.stdout = output
    try:
        yield
    finally:
        sys.stdout = output.real
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        dist.distributed_c10d._world = shared
        torch.set_num_threads(cores)


@contextmanager
def _one_launch_at_a_time() -> Iterator[None]:
    """All threads would compile a kernel at their first launch."""
    from triton.runtime.jit import JITFunction

    lock, launch = threading.Lock(), JITFunction.run

    def run(self, *arguments, **options):
        with lock:
            return launch(self, *arguments, **options)

    with mock.patch.object(JITFunction, "run", run):
        yield


dist.Backend.register_backend(
    "threads",
    lambda store, rank, size, timeout: ThreadGroup(_thread.rendezvous, _thread.rank, rank, size),
    devices=["cpu", "cuda"],
)
GATHERING.add("threads")


class _OutputByRank:
    def __init__(self, real, ranks: int):
        self.real, self.local = real, threading.local()
        self.texts: list[list[str]] = [[] for _ in range(ranks)]

    def write(self, text: str) -> int:
        rank = getattr(self.local, "rank", None)
        if rank is None:
            return self.real.write(text)
        self.texts[rank].append(text)
        return len(text)

    def __getattr__(self, name):
        return getattr(self.real, name)


def processes(program: Program, ranks: int = 4, *, timeout: float = 120) -> list[Any]:
    """Run the picklable ``program()`` on processes on the CPU. ``timeout``: seconds after all have
    started. Raises as `threads`, and TimeoutError.
    """
    _check_ranks(ranks)
    return run_processes(program, ranks, "gloo", timeout)


def gpus(program: Program, ranks: int | None = None, *, timeout: float = 600) -> list[Any]:
    """Run it on processes with a GPU each. Results come to the CPU. Raises as `processes`, and
    ValueError for too few GPUs.
    """
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if ranks > torch.cuda.device_count():
        raise ValueError(
            f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}"
        )
    _check_ranks(ranks)
    return run_processes(program, ranks, "nccl", timeout)


def run(kind: str, program: Program, ranks: int, timeout: float) -> list[Any]:
    """Run the program by the function ``kind``."""
    if kind == "threads":
        return threads(program, ranks)
    return {"processes": processes, "gpus": gpus}[kind](program, ranks, timeout=timeout)


def kernel_gpus() -> int:
    """Return the number of GPUs, 0 with TRITON_INTERPRET."""
    values = ("1", "true", "on", "yes", "y")  # Triton reads these as true
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in values
    return torch.cuda.device_count() if torch.cuda.is_available() and not interpreted else 0


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"a process group needs at least one rank, got {ranks}")
