"""`canon bench links`: time messages between all pairs of ranks.

Two ranks exchange messages, both ways at once. The latency is the time of 8 bytes; the bandwidth is
that of `LARGE` bytes without it.

    canon bench links --ranks 4                                        # GPUs, or gloo on CPUs
    torchrun --nnodes 2 --nproc-per-node 8 ... -m canon bench links    # a cluster
"""

import os
import socket
from collections.abc import Iterator
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from canon.bench.schedules import meet
from canon.bench.timing import Run, eager, milliseconds, slowest, table
from canon.testing import process_groups

SMALL, LARGE = 8, 64 << 20  # bytes


def batches(ranks: int, times: int) -> Iterator[list[dict]]:
    """Yield the rows. Under torchrun, rank 0 alone yields them."""
    on_gpus = process_groups.kernel_gpus() > 0
    if "RANK" not in os.environ:
        run = process_groups.gpus if on_gpus else process_groups.processes
        yield run(partial(measure, times), ranks)[0]
        return
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rows = measure(times)
    if dist.get_rank() == 0:
        yield rows
    dist.destroy_process_group()


def measure(times: int) -> list[dict]:
    """Return a row for each pair. Raises RuntimeError for wrong bytes."""
    rank, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    device, rows = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"), []
    sent = torch.full((LARGE,), rank % 251, dtype=torch.uint8, device=device)
    for pair in combinations(range(len(hosts)), 2):
        other, received, ms = sum(pair) - rank, torch.full_like(sent, 255), []
        for nbytes in (SMALL, LARGE):
            run = partial(_exchange, other, sent[:nbytes], received[:nbytes])
            ms.append(_milliseconds(run if rank in pair else int, times, device))
        if rank in pair and (received != other % 251).any():
            raise RuntimeError(f"wrong bytes arrived from rank {other}")
        speed = {"us": round(1e3 * ms[0], 1), "gb_s": round(1e-6 * LARGE / (ms[1] - ms[0]), 2)}
        rows.append({"ranks": pair, "one_host": hosts[pair[0]] == hosts[pair[1]], **speed})
    return rows


def _milliseconds(run: Run, times: int, device: torch.device) -> float:
    """On a GPU, time a queue: a launch takes longer than a short message."""
    run()  # connects the two
    if device.type != "cuda":
        return eager(run, times, device)[0]
    queue = lambda: [run() for _ in range(times)]
    (taken,) = milliseconds(queue, 1, warm=0, before=partial(meet, device))
    return slowest(taken / times, device)


def _exchange(other, sent, received) -> None:
    both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def tables(rows: list[dict]) -> list:
    """Return a table of all pairs."""
    return [table("measured", list(rows[0]), [map(str, row.values()) for row in rows])]
