"""The predicted bytes of messages are those that are recorded at the messages of a call."""

import numpy as np
import pytest
import torch
from event_log import recording
from meshes import mesh
from sharded import CALLS, attending, on_this_rank, whole

from canon import Layout, Mask, fast
from canon.costs.schedule_costs import plan_of
from canon.costs.traffic import all_gather, group_cast, hop
from canon.testing import process_groups


@pytest.mark.parametrize(("call", "columns"), [
    *((call, 1) for call in ("ring", "strided, split", "magi", "magi keeps", "magi, one step")),
    ("ring", 2), ("ring", 4),
])  # fmt: skip
def test_bytes_are_those_that_ranks_receive(call, columns):
    tokens = 41 if columns == 1 else 40  # uneven, but in an exchange of heads
    mask, layout = Mask.window(tokens, 3, 3), Layout.contiguous(tokens, 4)
    tensors = whole(mask, h=16, g=4, dv=8, dtype=torch.bfloat16)

    def program():
        group = mesh(4 // columns, columns)
        with fast.backend("torch"):
            on_this_rank(attending(fast, call, mask, layout, group=group), layout, tensors)

    with recording() as log:
        process_groups.threads(program)
    received = [sum(event.nbytes for event in log.of(rank)) for rank in range(0, 4, columns)]
    name, options = CALLS[call]
    plan = plan_of(name, (16, 4), 8, 1, columns, mask=mask, layout=layout, **options)
    assert sum(one.messages[:, :, 0].sum((0, 1)) for one in plan[1:]).tolist() == received


def test_bytes_between_hosts():
    layout, hosts = Layout.contiguous(32, 8), np.arange(8) // 4
    gathered, exchanged = all_gather(layout, hosts)
    assert gathered[1].tolist() == [4] * 8  # it enters each host once
    assert exchanged[1].tolist() == [16] * 8
    assert hop(layout, hosts, 1)[1].tolist() == [4, 0, 0, 0] * 2
    cast = group_cast(Mask.causal(32), layout, hosts)
    assert cast.tolist() == [[28, 24, 20, 16, 16, 20, 24, 28], [16] * 8]
    given = {"mask": Mask.causal(8192), "layout": Layout.zigzag(8192, 16)}
    for columns in (1, 4):  # the formulas of paper/in_your_program.md
        plan = plan_of("ring_attention", (32, 8), 128, 4, columns, **given)
        sent = (1 - columns / 16) * 8192 / columns * 8 * 256  # elements of K and V
        assert plan.nic_bytes == sent * (2 + 2 + 4)
