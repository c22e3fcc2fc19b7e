"""Claims about `own_communicators`: they change no bit, carry all messages of attention, and end with their group."""

import pytest
import torch
import torch.distributed as dist

from canon import Layout, fast
from canon.bench import communicator_time, shapes
from canon.fast import messages
from canon.ranks.agreement import group_state
from canon.testing import process_groups

TOKENS = 24
FUNCTIONS = fast.ring_attention, fast.strided_attention, fast.magi_attention


def both_passes(function, group=None):
    """Return out, dq, dk and dv of this rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    new = lambda heads: torch.randn(1, TOKENS // 2, heads, 8, generator=draw, device=device, requires_grad=True)
    q, k, v = map(new, (4, 2, 2))
    out = function(q, k, v, None, Layout.zigzag(TOKENS, 2), group=group)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def used():
    """Return the groups that carry messages, in both passes of all functions."""
    found, hop = [], messages.BlockRing._hop

    def noted_hop(ring, *blocks):
        found.append(ring.group)
        return hop(ring, *blocks)

    def noted(send):
        return lambda *given, group, **options: found.append(group) or send(*given, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.BlockRing, "_hop", noted_hop)
        for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, noted(getattr(dist, name)))
        results = [both_passes(function) for function in FUNCTIONS]
    return found, results


def separates():
    before, results = used()
    assert set(before) == {dist.group.WORLD}
    for _ in range(2):
        fast.own_communicators()
    own = group_state(None).aborted
    assert len(own) == 2, "a second call makes none"
    after, again = used()
    assert len(after) == len(before)
    assert set(after) == set(own), "one for keys, one for sums, none is the group"
    for mine, theirs in zip(results, again, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_own_communicators_carry_all_messages_and_change_no_bit():
    process_groups.processes(separates, 2)


def ends_with_groups():
    fast.own_communicators()
    known = dist.distributed_c10d._world.pg_map
    before = len(known)
    for _ in range(20):
        group = dist.new_group([0, 1])
        fast.own_communicators(group)
        for function in FUNCTIONS[:2]:
            both_passes(function, group)
        assert len(known) == before + 3
        dist.destroy_process_group(group)
        del group
        assert len(known) == before, "nothing keeps the group, and its communicators end with it"


def test_20_groups_made_and_destroyed_leave_as_many_as_before():
    process_groups.processes(ends_with_groups, 2)


@pytest.mark.gpus(2)
def test_20_groups_made_and_destroyed_on_gpus_leave_as_many_as_before():
    process_groups.gpus(ends_with_groups, 2, timeout=200)


def test_a_process_alone_needs_none():
    fast.own_communicators()


def test_the_bench_compares_both_ways_beside_ddp():
    shape = shapes.shape_of("1,64,4,2,16,causal")
    rows, _ = process_groups.processes(communicator_time.Bench((shape,), torch.float32, "ring|magi", "cpu", steps=2), 2)
    assert [(row["schedule"], row["own"]) for row in rows] == [
        (f"{name}_attention", own) for name in ("ring", "magi") for own in (False, True)
    ]
    assert all(len(row["step_wall_ms"]) == len(row["both_wall_ms"]) == 1 and "failed" not in row for row in rows)
    assert communicator_time.tables(rows)[0].row_count == len(rows)
