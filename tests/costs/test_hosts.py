"""Two hosts, each a network namespace with two ranks: a mesh sends the predicted bytes between
them, and no others.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from canon import Layout, Mask
from canon.costs.schedule_costs import plan_of

MOST = 1.08  # bytes on the wire for each byte of a message: headers of TCP and of Gloo
# A rank: it prints the bytes that its host has received during both passes of a call.
RANK = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from canon import Layout, Mask, fast

rank, columns = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("10.78.0.1", 29517, 4, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
names = ("tokens", "heads")
mesh = dist.init_device_mesh("cpu", (4 // columns, columns), mesh_dim_names=names)
mask, layout = Mask.causal(4096), Layout.zigzag(4096, 4)
received = Path("/sys/class/net/canon/statistics/rx_bytes")
options = dict(dtype=torch.bfloat16, requires_grad=True)
for run in range(2):  # the first one connects the ranks, and compares arguments
    q, k, v = (torch.randn(1, 1024, heads, 64, **options) for heads in (4, 4, 4))
    dist.barrier()
    time.sleep(0.3)
    before = int(received.read_text())
    dist.barrier()
    with fast.backend("torch"):
        fast.ring_attention(q, k, v, mask, layout, group=mesh).sum().backward()
    dist.barrier()
    time.sleep(0.3)
    print(json.dumps(int(received.read_text()) - before), flush=True)
    dist.barrier()
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Yield two namespaces with a link between them."""
    names = [f"canon{os.getpid()}{x}" for x in "ab"]
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the command ip")
    try:
        try:
            connect(*names)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def connect(*names):
    for name in names:
        ip("netns", "add", name)
        ip("netns", "exec", name, "true")
    link = "link", "add", "canon", "netns", names[0], "type", "veth"
    ip(*link, "peer", "name", "canon", "netns", names[1])
    for number, name in enumerate(names, 1):
        ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "canon")
        for device in ("lo", "canon"):
            ip("-n", name, "link", "set", device, "up")


@pytest.mark.parametrize(("columns", "share"), [(1, 0.75), (2, 0.5)])
def test_a_mesh_sends_the_predicted_bytes_between_hosts(hosts, columns, share):
    """A rank receives (1 - columns / 4) of K and V in either pass, and of dk and dv. ``share``: of
    all tokens of a key head, in one of these, for both ranks of a host, from the other host.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "canon", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", hosts[rank // 2]),
                *(sys.executable, "-c", RANK, str(rank), str(columns)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), printed
    elements = share * 4096 * 4 * (64 + 64)
    expected = elements * (2 + 2 + 4)  # K and V twice in bfloat16, dk and dv in float32
    given = {"mask": Mask.causal(4096), "layout": Layout.zigzag(4096, 4)}
    plan = plan_of("ring_attention", (4, 4), 64, 2, columns, **given)
    assert columns * plan.nic_bytes == expected  # so many ranks of a host have another host's keys
    for received, _ in printed[::2]:
        measured = json.loads(received.splitlines()[-1])
        assert expected < measured < MOST * expected
