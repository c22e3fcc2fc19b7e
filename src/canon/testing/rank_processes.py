"""Ranks as processes: started together, watched to a hard timeout, and what each of them said and gave, read back.

    parent    starts the ranks, waits for all, or for the first that fails and a moment more, or for the timeout
    child     joins the group through a file (no ports), runs the program, leaves result, prints and error in a file

A rank that has finished lingers until all have: closing its connections early would fail those who still read.
"""

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import tempfile
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

from canon.testing.rendezvous import failed, tell

STARTING = 120.0  # seconds that processes get to start
GRACE = 3.0  # seconds that the other ranks get to end by themselves once one has failed
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def run_processes(program: Callable[[], Any], ranks: int, backend: str, timeout: float) -> list[Any]:
    """Results of ``program()`` by rank; `process_groups.processes` and `process_groups.gpus` say what it raises."""
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
            _until_started(children, where)
            _watch(children, time.monotonic() + timeout)
            told = [_read(where / f"rank{rank}") for rank in range(ranks)]
            unfinished = [r for r, child in enumerate(children) if told[r] is None and child.is_alive()]
            stuck = {rank: _stack(where / f"stack{rank}", children[rank].pid) for rank in unfinished}
        finally:
            for child in children:
                child.kill()
                child.join()
    return _results(told, stuck, [child.exitcode for child in children], timeout)


def _results(told: list, stuck: dict[int, str], codes: list, timeout: float) -> list[Any]:
    """What the ranks gave, or the error that tells how they ended."""
    tell([said["prints"] if said else "" for said in told])
    for _, rank in sorted((said["time"], rank) for rank, said in enumerate(told) if said and said["error"]):
        raise failed(rank, told[rank]["error"], told[rank]["traceback"]) from told[rank]["error"]
    died = [
        f"rank {r} ended with exit code {codes[r]}" for r, said in enumerate(told) if said is None and r not in stuck
    ]
    if died:
        raise RuntimeError("; ".join(died))
    if stuck:
        places = "".join(f"\nrank {rank} was at\n{stack}" for rank, stack in stuck.items())
        raise TimeoutError(f"after {timeout} s rank {', '.join(map(str, stuck))} had not finished{places}")
    return [said["result"] for said in told]


def _starter(backend: str):
    """How processes start: for the CPU forked off a server that has imported torch, which saves seconds a world."""
    if backend == "nccl" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _until_started(children: list, where: Path) -> None:
    """Importing torch takes seconds, many on a busy machine: the timeout is the program's alone."""
    limit = time.monotonic() + STARTING
    while time.monotonic() < limit and all(child.is_alive() for child in children):
        if all((where / f"stack{rank}").exists() for rank in range(len(children))):
            return
        time.sleep(0.01)


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
    stack = open(where / f"stack{rank}", "w")  # noqa: SIM115  open to the end
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack)
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
    if path.exists() and hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
    lines = path.read_text().splitlines() if path.exists() else []
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    end = next((i for i, line in enumerate(lines) if line.endswith("in _child")), len(lines))
    return "\n".join(lines[start + 1 : end][:8]) or "  a place unknown"
