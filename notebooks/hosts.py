"""Count the bytes that both passes of a ring send from each of two hosts to the other.

    python notebooks/hosts.py paper/data/hosts_cpu.json    # writes a record, in about a minute

A host is a network namespace of Linux, with half of the ranks as processes over gloo. Its only
link is one end of a virtual cable, whose bytes the system counts. All namespaces end with the
command. They need the commands `unshare` and `ip`, and root or a system that lets users make them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from canon import Layout, Mask, fast
from canon.costs.schedule_costs import plan_of
from canon.testing import record

TOKENS, HEADS, WIDTH = 4096, 4, 64  # bfloat16, as many key heads as query heads
RECORD = Path(__file__).parents[1] / "paper" / "data" / "hosts_cpu.json"
MESHES = {4: [(4, 1), (2, 2)], 8: [(8, 1), (4, 2), (2, 4)]}  # of the record, by ranks
Shape = tuple[int, int]  # rows and columns of a mesh
NAMES = "left", "right"
# Two hosts and a cable between them, then a command. /run has the names of namespaces.
CONNECTED = """
set -e
mount -t tmpfs canon /run
for host in left right; do ip netns add $host; ip netns exec $host true; done
ip link add cable netns left type veth peer name cable netns right
ip -n left addr add 10.78.0.1/24 dev cable
ip -n right addr add 10.78.0.2/24 dev cable
for host in left right; do ip -n $host link set lo up; ip -n $host link set cable up; done
exec "$@"
"""
LIMIT = 300  # seconds


def refusal() -> str:
    """Return the reason if this machine makes no network namespaces, "" if it does."""
    done = _between_hosts("true")
    return done.stderr.strip() or "unshare failed" if done.returncode else ""


def counted(meshes: Sequence[Shape]) -> dict[Shape, list[int]]:
    """Return the bytes that each host receives, by the rows and columns of the mesh. All meshes
    have equally many ranks.

    Raises RuntimeError with the output if a rank fails.
    """
    (ranks,) = {rows * columns for rows, columns in meshes}
    shapes = (f"{rows}x{columns}" for rows, columns in meshes)
    done = _between_hosts(sys.executable, __file__, str(ranks), *shapes)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(zip(meshes, json.loads(done.stdout), strict=True))


def predicted(rows: int, columns: int) -> int:
    """Return the bytes that each host receives, by the model of `canon plan`. In each column one
    rank of a host receives from the other host.
    """
    given = {"mask": Mask.causal(TOKENS), "layout": Layout.zigzag(TOKENS, rows * columns)}
    plan = plan_of("ring_attention", (HEADS, HEADS), WIDTH, 2, columns, **given)
    return columns * int(plan.nic_bytes)


def recorded() -> dict[Shape, list[int]]:
    """Return the bytes of the record, as `counted`."""
    found = json.loads(RECORD.read_text())["results"]
    return {(rows, columns): x["received"] for x in found for rows, columns in [x["mesh"]]}


def found(meshes: Sequence[Shape]) -> dict[Shape, list[int]]:
    """Return the result of `counted`, or that of the record without namespaces. Print which."""
    if not (reason := refusal()):
        print("Counted between two network namespaces of this machine.")
        return counted(meshes)
    print(f"These are recorded bytes, because this machine has no network namespaces: {reason}")
    return {mesh: recorded()[mesh] for mesh in meshes}


def _between_hosts(*command: str) -> subprocess.CompletedProcess:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshared = ["unshare", "--net", "--mount", *as_root, "sh", "-c", CONNECTED, "sh"]
    try:
        return subprocess.run([*unshared, *command], capture_output=True, text=True)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def launch(ranks: int, shapes: Sequence[str]) -> list[list[int]]:
    """Start the ranks of both hosts, from inside `CONNECTED`. Return the bytes as `counted`."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "cable",
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29517",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
    }
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", NAMES[2 * rank // ranks], sys.executable, __file__, *shapes],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=LIMIT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        sys.exit(1)
    first = [json.loads(printed[rank]) for rank in (0, ranks // 2)]
    return [list(hosts) for hosts in zip(*first, strict=True)]


def received(shape: str) -> int:
    """Return the bytes that the host of this rank receives in both passes of a call."""
    rows, columns = map(int, shape.split("x"))
    mesh = dist.init_device_mesh("cpu", (rows, columns), mesh_dim_names=("tokens", "heads"))
    ranks = rows * columns
    mask, layout = Mask.causal(TOKENS), Layout.zigzag(TOKENS, ranks)
    counter, found = Path("/sys/class/net/cable/statistics/rx_bytes"), []
    size = 1, TOKENS // ranks, HEADS, WIDTH
    for _ in range(2):  # the first call also connects the ranks, and compares arguments
        qkv = [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        dist.barrier()
        time.sleep(0.3)
        before = int(counter.read_text())
        dist.barrier()
        with fast.backend("torch"):
            fast.ring_attention(*qkv, mask, layout, group=mesh).sum().backward()
        dist.barrier()
        time.sleep(0.3)
        found.append(int(counter.read_text()) - before)
    return min(found)  # a packet that is sent again adds its bytes


def write(path: Path) -> None:
    """Write a record of four and eight ranks. Raise OSError without namespaces."""
    if reason := refusal():
        raise OSError(f"this machine has no network namespaces: {reason}")
    rows = [
        {"mesh": mesh, "received": of_hosts, "predicted": predicted(*mesh)}
        for meshes in MESHES.values()
        for mesh, of_hosts in counted(meshes).items()
    ]
    record.write(path, record.command("python", "notebooks/hosts.py", str(path)), rows)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        print(json.dumps(list(map(received, sys.argv[1:]))))
        dist.barrier()
    elif sys.argv[1].isdigit():
        print(json.dumps(launch(int(sys.argv[1]), sys.argv[2:])))
    else:
        write(Path(sys.argv[1]))
