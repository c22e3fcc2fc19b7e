"""Worlds: one program on every rank, as threads, as processes over gloo, or as one process per GPU over NCCL.

    world.threads(program, ranks=4)      ranks are threads of this process: about 10 ms, prints in rank order
    world.processes(program, ranks=4)    ranks are processes on the CPU: seconds, finds what buffered sends hide
    world.gpus(program)                  ranks are processes, each with a GPU of its own

``program()`` takes no arguments, finds its rank by ``torch.distributed.get_rank()``, and may return anything; all three
return the results by rank. If a rank fails, RuntimeError names the first one that did, chained to its exception. None
hangs: threads that wait for one another are told so at once, processes end at a hard timeout that names who had
not finished and where it was. Programs for processes must be picklable: a function of a module, or
``functools.partial`` of one.
"""

import contextlib
import contextvars
import faulthandler
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from canon.testing.thread_group import Ended, Meeting, ThreadGroup

Program = Callable[[], Any]
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
GRACE = 3.0  # seconds that the other ranks get to end by themselves once one has failed


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
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    meeting, store = Meeting(ranks), dist.HashStore()
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
    outside, dist.distributed_c10d._world = dist.distributed_c10d._world, ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    sys.stdout = voices
    try:
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
    _tell(["".join(said) for said in voices.said])
    for rank, error in failures.items():
        raise _failed(rank, error) from error
    if meeting.ended:
        raise RuntimeError(meeting.ended)
    return results


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

    Raises RuntimeError naming the first rank that failed; TimeoutError after ``timeout`` seconds, naming the ranks
    that had not finished and where they were. No process outlives the call.
    """
    return _processes(program, ranks, "gloo", timeout)


def gpus(program: Program, ranks: int | None = None, *, timeout: float = 600) -> list[Any]:
    """Results of the picklable ``program()`` by rank, each rank a process with its own GPU, over NCCL.

    ``ranks`` defaults to all GPUs; tensors come back on the CPU. Errors as for `processes`, and ValueError where
    there are fewer GPUs than ranks.
    """
    ranks = torch.cuda.device_count() if ranks is None else ranks
    if ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
    return _processes(program, ranks, "nccl", timeout)


def _processes(program: Program, ranks: int, backend: str, timeout: float) -> list[Any]:
    _check_ranks(ranks)
    try:
        packed = pickle.dumps(program)
    except _UNPICKLABLE as error:
        raise ValueError(
            f"ranks as processes need a picklable program, a function of a module or a partial of one: {error}"
        ) from error
    context = _starter(backend)
    with tempfile.TemporaryDirectory(prefix="canon-world-") as folder:
        where = Path(folder)
        environment = dict(os.environ)  # a server keeps the one it was started with
        arguments = [(rank, ranks, backend, timeout, packed, folder, environment) for rank in range(ranks)]
        children = [context.Process(target=_child, args=given, daemon=True) for given in arguments]
        try:
            for child in children:
                child.start()
            _watch(children, time.monotonic() + timeout)
            told = [_read(where / f"rank{rank}") for rank in range(ranks)]
            unfinished = [r for r, child in enumerate(children) if told[r] is None and child.is_alive()]
            stuck = {rank: _stack(where / f"stack{rank}", children[rank].pid) for rank in unfinished}
        finally:
            for child in children:
                child.kill()
                child.join()
    _tell([said["prints"] if said else "" for said in told])
    failed = [(said["time"], rank) for rank, said in enumerate(told) if said and said["error"]]
    for _, rank in sorted(failed):
        raise _failed(rank, told[rank]["error"], told[rank]["traceback"]) from told[rank]["error"]
    codes = {rank: child.exitcode for rank, child in enumerate(children) if told[rank] is None and rank not in stuck}
    if codes:
        raise RuntimeError("; ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items()))
    if stuck:
        where_told = "".join(f"\nrank {rank} was at\n{stack}" for rank, stack in stuck.items())
        raise TimeoutError(f"after {timeout} s rank {', '.join(map(str, stuck))} had not finished{where_told}")
    return [said["result"] for said in told]


def _starter(backend: str):
    """How processes start: for the CPU forked off a server that has imported torch, which saves seconds a world."""
    if backend == "nccl" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _watch(children: list, deadline: float) -> None:
    """Return when all children have ended, at the deadline, or a moment after the first one that failed."""
    alive = {child.sentinel: child for child in children}
    while alive and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait_for_any(list(alive), left):
            child = alive.pop(sentinel)
            child.join()
            if child.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE)


def _child(rank: int, ranks: int, backend: str, timeout: float, packed: bytes, folder: str, environment) -> None:
    where = Path(folder)
    os.environ.clear()
    os.environ.update(environment)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(where / f"stack{rank}", "w"))  # noqa: SIM115  open to the end
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the host need not resolve
    store = dist.FileStore(str(where / "store"), ranks)
    said: dict[str, Any] = {"result": None, "error": None, "traceback": "", "time": 0.0}
    prints = sys.stdout = io.StringIO()
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        limit = timedelta(seconds=timeout + 60)  # the watcher, who can say where each rank is, comes first
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit, device_id=device)
        said["result"] = pickle.loads(packed)()
    except BaseException as error:
        said |= {"error": error, "traceback": traceback.format_exc(), "time": time.time()}
    said["prints"] = prints.getvalue()
    _write(where / f"rank{rank}", said)
    if said["error"] is not None:
        os._exit(1)  # collectives that others are in would hold up an orderly end
    store.add("finished", 1)
    while store.add("finished", 0) < ranks:  # who ends early closes the connections that others still read from
        time.sleep(0.01)
    dist.destroy_process_group()


def _write(path: Path, said: dict[str, Any]) -> None:
    try:
        pickle.loads(pickle.dumps(said["error"]))
        torch.save(said, path.with_suffix(".part"))
    except _UNPICKLABLE as error:
        told = said["error"] or error
        said |= {"result": None, "error": RuntimeError(f"{type(told).__name__}: {told}"), "time": time.time()}
        torch.save(said, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    return torch.load(path, map_location="cpu", weights_only=False) if path.exists() else None


def _stack(path: Path, pid: int) -> str:
    """Where a process that has not finished is, innermost call first."""
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
    lines = path.read_text().splitlines() if path.exists() else []
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    end = next((i for i, line in enumerate(lines) if line.endswith("in _child")), len(lines))
    return "\n".join(lines[start + 1 : end][:8]) or "  a place unknown"


def _failed(rank: int, error: BaseException, told: str = "") -> RuntimeError:
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}" + (f"\n{told}" if told else ""))


def _tell(said: list[str]) -> None:
    for rank, text in enumerate(said):
        for line in text.splitlines():
            print(f"rank {rank} │ {line}")


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"a world needs at least one rank, got {ranks}")
