"""The simulator of Gluon kernels: partitions, named barriers and several programs."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import pytest
import torch
from interleavings import every_interleaving
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon import simulator
from canon.fast.kernels.gluon.ptx import load_acquire, named_barrier
from canon.testing import simulated_kernels

FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def alternate(log, count, W: gl.constexpr, HOW: gl.constexpr):
    if W == 1 and HOW != "no first":
        named_barrier("arrive", 8)
    for i in range(3):
        if HOW != "unordered":
            named_barrier("sync", 8 + W)
        gl.store(log + gl.atomic_add(count, 1), i * 2 + W)
        if HOW != "unordered":
            named_barrier("arrive", 9 - W)
    if W == 0 and HOW != "no last":
        named_barrier("sync", 8)
    if W == 1 and HOW == "failing":
        gl.store(log + 6, 0)


@gluon.jit
def alternate_kernel(log, count, HOW: gl.constexpr):
    gl.warp_specialize(
        [(alternate, (log, count, FIRST, HOW)), (alternate, (log, count, SECOND, HOW))], [4], [128]
    )


def alternations(order, seed, how=""):
    log, count = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulated_kernels.simulated(order, seed):
        alternate_kernel[(1,)](log, count, HOW=how)
    return log.tolist()


@every_interleaving
def test_named_barriers_order_partitions(order, seed):
    assert alternations(order, seed) == list(range(6))
    unbalanced = r"named barrier 8 is out of balance: alternate \[1\] has come"
    deadlock = r"waits for named barrier 8 \(128 of 256 threads have come\)"
    for how, message in (("no first", deadlock), ("no last", unbalanced)):
        with pytest.raises(simulator.Fault, match=message):
            alternations(order, seed, how)


def test_partitions_run_in_the_inference_mode_of_their_launch():
    with torch.inference_mode():
        assert alternations("late", 0) == list(range(6))


def test_seeds_draw_interleavings_and_repeat_them():
    logs = [alternations("late", seed, "unordered") for seed in range(20)]
    assert logs == [alternations("late", seed, "unordered") for seed in range(20)]
    assert len({tuple(log) for log in logs}) > 5


@gluon.jit
def relay_kernel(baton, seen, FAULT: gl.constexpr):
    me = gl.program_id(0)
    holder = load_acquire(baton)
    while holder != me:
        holder = load_acquire(baton)
    gl.store(seen + me, holder)
    if FAULT != "lost" or me != 2:
        gl.store(baton, me + 1)


@pytest.mark.parametrize("seed", range(5))
def test_programs_may_wait_for_one_another(seed):
    baton, seen = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    with simulated_kernels.simulated(seed=seed):
        relay_kernel[(5,)](baton, seen, "")
    assert seen.tolist() == [0, 1, 2, 3, 4]
    with (
        simulated_kernels.simulated(seed=seed),
        pytest.raises(simulator.Deadlock, match="has found 2 .* nobody changes it"),
    ):
        relay_kernel[(5,)](baton.zero_(), seen, "lost")


@every_interleaving
def test_a_partition_that_fails_ends_all(order, seed):
    with pytest.raises(simulator.Fault, match="store of element 6 of 6"):
        alternations(order, seed, "failing")
