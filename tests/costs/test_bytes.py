"""The predicted bytes of messages are those that are recorded at the messages of a call."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshes import mesh

from canon import Layout, Mask, fast
from canon.costs.schedule_costs import plan_of
from canon.costs.traffic import all_gather
from canon.testing import process_groups
from canon.testing.recording import recording

CAUSAL, WINDOW = Mask.causal(40), Mask.window(40, 3, 3)  # a rank sends as much as it receives
UNEVEN = Layout([[range(20)], [], [range(20, 21)], [range(21, 40)]], 40)


@pytest.mark.parametrize(("function", "mask", "layout", "columns", "options"), [
    ("ring", CAUSAL, UNEVEN, 1, {}),
    ("strided", CAUSAL, UNEVEN, 1, {"head_stride": 2}),
    ("magi", WINDOW, Layout.contiguous(40, 4), 1, {}),
    ("magi", WINDOW, Layout.contiguous(40, 4), 1, {"casts": 2, "keep_kv": True}),
    ("ring", CAUSAL, Layout.zigzag(40, 4), 2, {}),
    ("ring", CAUSAL, Layout.zigzag(40, 4), 4, {}),
])  # fmt: skip
def test_bytes_are_those_that_ranks_receive(function, mask, layout, columns, options):
    name = f"{function}_attention"

    def program():
        size, group = layout.size(dist.get_rank()), mesh(4 // columns, columns)
        new = lambda heads: torch.ones(1, size, heads, 8, dtype=torch.bfloat16, requires_grad=True)
        given = *map(new, (16, 4, 4)), mask, layout
        with fast.backend("torch"):
            getattr(fast, name)(*given, group=group, **options).sum().backward()

    with recording() as log:
        process_groups.threads(program)
    received = [sum(event.nbytes for event in log.of(rank)) for rank in range(0, 4, columns)]
    plan = plan_of(name, (16, 4), 8, 1, columns, mask=mask, layout=layout, **options)
    assert sum(one.messages[:, :, 0].sum((0, 1)) for one in plan[1:]).tolist() == received


def test_bytes_between_hosts_are_those_of_the_formulas():
    gathered, exchanged = all_gather(Layout.contiguous(32, 8), np.arange(8) // 4)
    assert gathered[1].tolist() == [4] * 8  # it enters each host once
    assert exchanged[1].tolist() == [16] * 8
    given = {"mask": Mask.causal(8192), "layout": Layout.zigzag(8192, 16)}
    for columns in (1, 4):
        plan = plan_of("ring_attention", (32, 8), 128, 4, columns, **given)
        sent = (1 - columns / 16) * 8192 / columns * 8 * 256  # elements of K and V
        assert plan.nic_bytes == sent * (2 + 2 + 4)
