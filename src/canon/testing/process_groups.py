"""Worlds: one program on every rank, as threads, as processes over gloo, or as one process per GPU over NCCL.

    process_groups.threads(program, ranks=4)      ranks are threads of this process: quick, prints in rank order
    process_groups.processes(program, ranks=4)    ranks are processes on the CPU: seconds, finds what buffered sends hide
    process_groups.gpus(program)                  ranks are processes, each with a GPU of its own

``program()`` takes no arguments, finds its rank by ``torch.distributed.get_rank()``, and may return anything; all three
return the results by rank. If a rank fails, RuntimeError names the first one that did, chained to its exception. None
hangs: threads that wait for one another are told so at once, processes end at a hard timeout that names who had
not finished and where it was. Programs for processes must be picklable: a function of a module, or
``functools.partial`` of one.
"""

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from canon.testing.rank_processes import run_processes
from canon.testing.rendezvous import Ended, Rendezvous, failed, tell
from canon.testing.thread_group import ThreadGroup

Program = Callable[[], Any]


def threads(program: Program, ranks: int = 4) -> list[Any]:
    """Results of ``program()`` by rank, the ranks being threads of this process; on the CPU or on one shared GPU.

    Prints what the ranks printed, in rank order. Backward passes run in the thread of their rank, on a GPU too, so
    collectives inside them find their group. Context variables are the caller's.
    Raises RuntimeError naming the first rank that failed, or every rank's wait if none can go on.
    """
    _check_ranks(ranks)
    if hasattr(_thread, "rank"):
        raise RuntimeError("a rank cannot start a world of threads inside its own")
    with _one_world:
        return _threads(program, ranks)


_one_world = threading.Lock()  # torch.distributed's state is swapped for the time of a world
_thread = threading.local()


def _threads(program: Program, ranks: int) -> list[Any]:
    meeting, store = Rendezvous(ranks), dist.HashStore()
    results: list[Any] = [None] * ranks
    failures: dict[int, BaseException] = {}
    voices = _Voices(sys.stdout, ranks)
    cores, gpu = torch.get_num_threads(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def main(rank: int) -> None:
        _thread.rank, _thread.meeting = rank, meeting
        voices.local.rank = rank
        try:
            torch.set_num_threads(max(1, cores // ranks))
            if gpu is not None:
                torch.cuda.set_device(gpu)
            dist.init_process_group("threads", rank=rank, world_size=ranks, store=store)
            # CUDA nodes of a backward pass would run in a thread of the device, which has no rank.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = program()
            meeting.leave(rank)
        except Ended:
            meeting.leave(rank)
        except BaseException as error:
            failures[rank] = error
            meeting.leave(rank, f"rank {rank} failed")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    contexts = [contextvars.copy_context() for _ in range(ranks)]
    workers = [threading.Thread(target=c.run, args=(main, rank), daemon=True) for rank, c in enumerate(contexts)]
    outside, dist.distributed_c10d._world = dist.distributed_c10d._world, _world_of_threads()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    sys.stdout = voices
    try:
        with _one_launch_at_a_time() if kernel_gpus() else nullcontext():
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    except BaseException:  # an interrupt: the ranks end at their next wait
        meeting.leave(ranks, "the caller was interrupted")
        raise
    finally:
        for worker in workers:
            worker.join()
        sys.stdout = voices.real
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        dist.distributed_c10d._world = outside
        torch.set_num_threads(cores)
    tell(["".join(said) for said in voices.said])
    for rank, error in failures.items():
        raise failed(rank, error) from error
    if meeting.ended:
        raise RuntimeError(meeting.ended)
    return results


@contextmanager
def _one_launch_at_a_time() -> Iterator[None]:
    """Threads that launch the same kernel for the first time would all compile it, each slowed down by the others."""
    from triton.runtime.jit import JITFunction

    lock, launch = threading.Lock(), JITFunction.run

    def run(self, *arguments, **options):
        with lock:
            return launch(self, *arguments, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def _world_of_threads() -> Any:
    """torch's state of torch.distributed for each thread; torch 2.11 forgot a field of it that it reads."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    world = ThreadLocalWorld()
    if not hasattr(ThreadLocalWorld, "comms"):
        world.comms = []  # of torchcomms, which no rank here has
    return world


def _thread_group(store, rank: int, size: int, timeout) -> ThreadGroup:
    return ThreadGroup(_thread.meeting, _thread.rank, rank, size)


dist.Backend.register_backend("threads", _thread_group, devices=["cpu", "cuda"])


class _Voices:
    """Standard output that keeps each rank's words apart; everyone else's go straight through."""

    def __init__(self, real, ranks: int):
        self.real, self.local = real, threading.local()
        self.said: list[list[str]] = [[] for _ in range(ranks)]

    def write(self, text: str) -> int:
        rank = getattr(self.local, "rank", None)
        if rank is None:
            return self.real.write(text)
        self.said[rank].append(text)
        return len(text)

    def __getattr__(self, name):
        return getattr(self.real, name)


def processes(program: Program, ranks: int = 4, *, timeout: float = 120) -> list[Any]:
    """Results of the picklable ``program()`` by rank, each rank a process on the CPU, over gloo.

    Raises RuntimeError naming the first rank that failed; TimeoutError ``timeout`` seconds after the processes have
    started, naming the ranks that had not finished and where they were. No process outlives the call.
    """
    _check_ranks(ranks)
    return run_processes(program, ranks, "gloo", timeout)


def gpus(program: Program, ranks: int | None = None, *, timeout: float = 600) -> list[Any]:
    """Results of the picklable ``program()`` by rank, each rank a process with its own GPU, over NCCL.

    ``ranks`` defaults to all GPUs; tensors come back on the CPU. Errors as for `processes`, and ValueError where
    there are fewer GPUs than ranks.
    """
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
    _check_ranks(ranks)
    return run_processes(program, ranks, "nccl", timeout)


def kernel_gpus() -> int:
    """Return the number of GPUs that Triton's kernels can run on: 0 if TRITON_INTERPRET keeps them on the CPU."""
    values = ("1", "true", "on", "yes", "y")  # Triton reads these as true
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in values
    return torch.cuda.device_count() if torch.cuda.is_available() and not interpreted else 0


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"a world needs at least one rank, got {ranks}")
