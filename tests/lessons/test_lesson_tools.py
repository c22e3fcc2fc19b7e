"""Claims about the instrumentation of the notebooks: claims of SMs, events of a kernel, parts of a
ring, and kernels without a line.
"""

import re
from pathlib import Path

import forward_runs
import pytest
import torch
import torch.distributed as dist
from event_log import recording

from canon import Layout, Mask, reference
from canon.fast.kernels.gluon import forward_plain
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted


def ring_of_three():
    q, k, v = (torch.ones(1, 2, 1, 4, dtype=torch.bfloat16) for _ in range(3))
    reference.ring_attention(q, k, v, Mask.full(6), Layout.contiguous(6, 3))
    return dist.get_rank()


def test_a_recording_times_computations_and_messages_up_to_their_wait():
    with recording(reference.ring) as log:
        process_groups.threads(ring_of_three, 3)
    spans = [(str(event), start, stop) for event, start, stop in log.spans if event.rank == 1]
    times = {name: (start, stop) for name, start, stop in spans}
    steps = [times[f"computed forward {step}"] for step in range(3)]
    hops = [times[f"posted hop {step}"] for step in range(2)]
    assert len(times) == len(spans) == 5
    for step, (posted, waited) in enumerate(hops):
        assert posted < steps[step][0] < steps[step][1] < waited < steps[step + 1][0]


def test_the_simulator_explains_the_absence_of_each_wait_and_arrival_of_the_plain_forward():
    source = Path(forward_plain.__file__).read_text()
    waits = r"^ +((?:mbarrier\.|ping_pong_|.*warpgroup_mma_wait).*?)(?:  #.*)?$"
    lines = re.findall(waits, source, re.MULTILINE)
    tensors = [torch.randn(1, tokens, 1, 64).bfloat16() for tokens in (128, 320, 320)]
    for line in dict.fromkeys(lines):
        message = forward_runs.fault_without(line, *tensors)
        assert message.startswith(("Fault: ", "Deadlock: ")), line
        assert ".py:" not in message
    assert len(set(lines)) == 13
    page = Path(forward_runs.__file__).with_name("10_overlap_on_hopper.md").read_text()
    shown = re.search(r"\*\*1\.\*\* .*?: `(.*?)`\..*?```\n(.*?)\n```", page, re.DOTALL)
    line, message = shown.groups()
    assert forward_runs.fault_without(line, *tensors) == message
    # new barriers are visible at once here
    assert not forward_runs.fault_without("fence_async_shared()", *tensors)
