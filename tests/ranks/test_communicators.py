"""The communicators of attention end with their group."""

import pytest
import torch
import torch.distributed as dist

from canon import Layout, fast
from canon.testing import process_groups

TOKENS = 24
FUNCTIONS = fast.ring_attention, fast.strided_attention, fast.magi_attention


def both_passes(function, group=None):
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    q, k, v = (
        torch.randn(1, TOKENS // 2, heads, 8, device=device, requires_grad=True)
        for heads in (4, 2, 2)
    )
    function(q, k, v, None, Layout.zigzag(TOKENS, 2), group=group).sum().backward()


def ends_with_groups():
    for function in FUNCTIONS:
        both_passes(function)
    known = dist.distributed_c10d._world.pg_map
    before, of_reductions = len(known), dist.get_backend() == "nccl"
    for _ in range(4):
        group = dist.new_group([0, 1])
        for function in FUNCTIONS:
            both_passes(function, group)
        assert len(known) == before + 1 + of_reductions
        dist.destroy_process_group(group)
        del group
        assert len(known) == before, "nothing keeps the group, and its communicators end with it"


def test_groups_made_and_destroyed_leave_as_many_as_before():
    process_groups.processes(ends_with_groups, 2)


@pytest.mark.gpus(2)
def test_groups_made_and_destroyed_on_gpus_leave_as_many_as_before():
    process_groups.gpus(ends_with_groups, 2, timeout=200)
