"""Run a program on processes as ranks, with a timeout. Ranks meet, and return results, in files."""

import faulthandler
import io
import os
import pickle
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

from canon.testing.rendezvous import print_by_rank, rank_error

STARTING = 120.0  # seconds in which the processes must start
GRACE = 3.0  # seconds in which the other ranks may end by themselves after a failure
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def run_processes(
    program: Callable[[], Any], ranks: int, backend: str, timeout: float
) -> list[Any]:
    """Return the results by rank. Raises as `process_groups.processes`."""
    try:
        packed = pickle.dumps(program)
    except _UNPICKLABLE as error:
        raise ValueError(
            "processes need a picklable program, a function of a module or a partial of one: "
            f"{error}"
        ) from error
    context = _starter(backend)
    with tempfile.TemporaryDirectory(prefix="canon-ranks-") as folder:
        where = Path(folder)
        environment = dict(os.environ)  # the fork server has the environment of its own start
        arguments = [
            (rank, ranks, backend, timeout, packed, folder, environment) for rank in range(ranks)
        ]
        children = [context.Process(target=_child, args=given, daemon=True) for given in arguments]
        try:
            for child in children:
                child.start()
            _until_started(children, where)
            _watch(children, where, time.monotonic() + timeout)
            paths = [where / f"rank{rank}" for rank in range(ranks)]
            reports = [
                torch.load(x, map_location="cpu", weights_only=False) if x.exists() else None
                for x in paths
            ]
            unfinished = [
                r for r, child in enumerate(children) if reports[r] is None and child.is_alive()
            ]
            stuck = {rank: _stack(where / f"stack{rank}") for rank in unfinished}
        finally:
            for child in children:
                child.kill()
                child.join()
    return _results(reports, stuck, [child.exitcode for child in children], timeout)


def _results(reports: list, stuck: dict[int, str], codes: list, timeout: float) -> list[Any]:
    print_by_rank([report["output"] if report else "" for report in reports])
    died = [rank for rank, report in enumerate(reports) if report is None and rank not in stuck]
    ended = "; ".join(f"rank {rank} ended with exit code {codes[rank]}" for rank in died)
    if any(codes[rank] == 0 for rank in died):  # the errors of others follow from this
        raise RuntimeError(ended)
    for _, rank in sorted(
        (report["time"], rank) for rank, report in enumerate(reports) if report and report["error"]
    ):
        raise rank_error(rank, reports[rank]["error"], reports[rank]["traceback"]) from reports[
            rank
        ]["error"]
    if died:
        raise RuntimeError(ended)
    if stuck:
        places = "".join(f"\nrank {rank} was at\n{stack}" for rank, stack in stuck.items())
        raise TimeoutError(
            f"after {timeout} s rank {', '.join(map(str, stuck))} had not finished{places}"
        )
    return [report["result"] for report in reports]


def _starter(backend: str):
    """On the CPU, a server with torch forks the ranks."""
    if backend == "nccl" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _until_started(children: list, where: Path) -> None:
    limit = time.monotonic() + STARTING
    while time.monotonic() < limit and all(child.is_alive() for child in children):
        if all((where / f"stack{rank}").exists() for rank in range(len(children))):
            return
        time.sleep(0.01)


def _watch(children: list, where: Path, deadline: float) -> None:
    alive = {child.sentinel: (rank, child) for rank, child in enumerate(children)}
    while alive and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait_for_any(list(alive), left):
            rank, child = alive.pop(sentinel)
            child.join()
            # a module may call os._exit(0)
            if child.exitcode != 0 or not (where / f"rank{rank}").exists():
                deadline = min(deadline, time.monotonic() + GRACE)


def _child(
    rank: int, ranks: int, backend: str, timeout: float, packed: bytes, folder: str, environment
) -> None:
    where = Path(folder)
    os.environ.clear()
    os.environ.update(environment)
    stack = open(where / f"stack{rank}", "w")  # noqa: SIM115  faulthandler writes into it
    faulthandler.dump_traceback_later(timeout, file=stack)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host's name
    store = dist.FileStore(str(where / "store"), ranks)
    report: dict[str, Any] = {"result": None, "error": None, "traceback": "", "time": 0.0}
    output = sys.stdout = io.StringIO()
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        # the parent's timeout ends first: its error shows the stacks
        limit = timedelta(seconds=timeout + 60)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=limit, device_id=device
        )
        report["result"] = pickle.loads(packed)()
    except BaseException as error:
        report |= {"error": error, "traceback": traceback.format_exc(), "time": time.time()}
    report["output"] = output.getvalue()
    _write(where / f"rank{rank}", report)
    if report["error"] is not None:
        os._exit(1)  # a normal exit would wait for collectives in flight
    store.add("finished", 1)
    # other ranks may still read from this rank's connections
    while store.add("finished", 0) < ranks:
        time.sleep(0.01)
    dist.destroy_process_group()


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        pickle.loads(pickle.dumps(report["error"]))
        torch.save(report, path.with_suffix(".part"))
    except _UNPICKLABLE as error:
        cause = report["error"] or error
        report |= {
            "result": None,
            "error": RuntimeError(f"{type(cause).__name__}: {cause}"),
            "time": time.time(),
        }
        torch.save(report, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _stack(path: Path) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    calls = [line for line in lines if line.startswith("  File")]
    end = next((i for i, line in enumerate(calls) if line.endswith("in _child")), len(calls))
    return "\n".join(calls[:end][:8]) or "  an unknown place"
