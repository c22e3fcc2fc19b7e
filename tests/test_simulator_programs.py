"""The simulator of Gluon kernels: partitions, named barriers and several programs."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

from contextlib import nullcontext

import pytest
import torch
from interleavings import every_interleaving
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from canon import simulator

FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def named(KIND: gl.constexpr, ID: gl.constexpr):
    gl.inline_asm_elementwise(f"bar.{KIND} {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def alternate(log, count, W: gl.constexpr, HOW: gl.constexpr):
    if W == 1 and HOW != "no first":
        named("arrive", 8)
    for i in range(3):
        if HOW != "unordered":
            named("sync", 8 + W)
        gl.store(log + gl.atomic_add(count, 1), i * 2 + W)
        if HOW != "unordered":
            named("arrive", 9 - W)
    if W == 0 and HOW != "no last":
        named("sync" if HOW != "unknown" else "red", 8)
    gl.static_assert(W == 0 or HOW != "failing", "a worker fails")


@gluon.jit
def alternate_kernel(log, count, HOW: gl.constexpr):
    gl.warp_specialize([(alternate, (log, count, FIRST, HOW)), (alternate, (log, count, SECOND, HOW))], [4], [128])


def alternations(order, seed, how=""):
    log, count = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulator.simulated(order, seed):
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


def test_seeds_draw_interleavings_and_repeat_them():
    logs = [alternations("late", seed, "unordered") for seed in range(20)]
    assert logs == [alternations("late", seed, "unordered") for seed in range(20)]
    assert len({tuple(log) for log in logs}) > 5


@gluon.jit
def relay_kernel(baton, seen, FAULT: gl.constexpr):
    me = gl.program_id(0)
    holder = gl.load(baton, volatile=True)
    while holder != me:
        holder = gl.load(baton, volatile=True)
    gl.store(seen + me, holder)
    if FAULT != "lost" or me != 2:
        gl.store(baton, me + 1)


@pytest.mark.parametrize("seed", range(5))
def test_programs_may_wait_for_one_another(seed):
    baton, seen = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    with simulator.simulated(seed=seed):
        relay_kernel[(5,)](baton, seen, "")
    assert seen.tolist() == [0, 1, 2, 3, 4]
    with simulator.simulated(seed=seed), pytest.raises(simulator.Deadlock, match="has found 2 .* nobody changes it"):
        relay_kernel[(5,)](baton.zero_(), seen, "lost")


@gluon.jit
def send_numbers(number, full, free, FAULT: gl.constexpr):
    for i in range(3):
        mbarrier.wait(free, (i & 1) ^ 1)
        number.store(gl.full([1], i, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        if i == 1 and FAULT == "fails":
            gl.static_assert(False, "while others wait for their turn")
        mbarrier.arrive(full, count=1)


@gluon.jit
def receive_numbers(out, counter, number, full, free, FAULT: gl.constexpr):
    i = 0
    work_tile = gl.atomic_add(counter, 1) * 0
    while work_tile < 2:
        if FAULT != "no full wait":
            mbarrier.wait(full, i & 1)
        work_tile = gl.max(number.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        if FAULT != "early free":
            gl.store(out + work_tile, work_tile)
        mbarrier.arrive(free, count=1)
        if FAULT == "early free":
            gl.store(out + work_tile, gl.max(number.load(gl.BlockedLayout([1], [32], [4], [0])), 0))
        i += 1


@gluon.jit
def relay_numbers_kernel(out, counter, FAULT: gl.constexpr):
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(send_numbers, (number, full, free, FAULT)), (receive_numbers, (out, counter, number, full, free, FAULT))],
        [4],
        [24],
    )


@every_interleaving
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", None),
        ("no full wait", "no store has reached it|no barrier says that the store of send_numbers"),
        ("early free", "overwrites|no barrier says"),
    ],
)
def test_numbers_pass_through_shared_memory(fault, message, order, seed):
    out = torch.full((3,), -1, dtype=torch.int32)
    with (
        simulator.simulated(order, seed),
        nullcontext() if message is None else pytest.raises(simulator.Fault, match=message),
    ):
        relay_numbers_kernel[(2,)](out, torch.zeros(1, dtype=torch.int32), FAULT=fault)
    assert message or out.tolist() == [0, 1, 2]


@every_interleaving
def test_the_first_program_to_fail_ends_all(order, seed):
    with simulator.simulated(order, seed), pytest.raises(AssertionError, match="while others wait for their turn"):
        relay_numbers_kernel[(4,)](torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), FAULT="fails")


def test_inline_assembly_other_than_named_barriers_is_refused():
    with pytest.raises(NotImplementedError, match="inline assembly 'bar.red 8, 256.* is not simulated"):
        alternations("late", 0, "unknown")
