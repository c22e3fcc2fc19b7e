"""The simulator of Gluon kernels: right kernels give right numbers, and each planted fault is found, in every interleaving."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import math

import pytest
import torch
from interleavings import BLOCKED, INTERLEAVINGS, every_interleaving, numbers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from canon import simulator
from canon.fast.kernels.gluon.ptx import wait_for_reductions
from canon.testing import simulated_kernels


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


def box(x):
    return TensorDescriptor.from_tensor(x, [64, 64], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def add_box(target, coordinates, tile):
    gl.static_assert(False, "what is registered stands for this")


simulator.register(add_box, simulator.reduce_add)


@gluon.jit
def copy_kernel(source, target, row, column, HOW: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    for i in range(2):
        mbarrier.expect(full, source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [row + 64 * i, column], full, tile)
        mbarrier.wait(full, i & 1)
        if HOW == "stored" or HOW == "stored and fenced":
            tile.store(tile.load(BLOCKED))
        if HOW == "stored and fenced":
            fence_async_shared()
        if HOW == "added":
            add_box(target, [64 * i, 0], tile)
        else:
            tma.async_copy_shared_to_global(target, [64 * i, 0], tile)
        if HOW != "not waited for":
            tma.store_wait(0)


@every_interleaving
@pytest.mark.parametrize("how", ["copied", "stored and fenced", "added"])
def test_tma_moves_boxes_with_zeros_around_the_tensor(how, order, seed):
    x, y = numbers(100, 3, 64)[:, 1], torch.full((110, 64), 1 if how == "added" else math.nan, dtype=torch.bfloat16)
    with simulated_kernels.simulated(order, seed):
        copy_kernel[(1,)](box(x), box(y), -10, 8, HOW=how, num_warps=4)
    assert torch.equal(y, torch.nn.functional.pad(x[:, 8:], (0, 8, 10, 0)) + (1 if how == "added" else 0))


@gluon.jit
def add_kernel(target, memory, found, AWAIT: gl.constexpr):
    tile = gl.allocate_shared_memory(target.dtype, target.block_type.shape, target.layout)
    tile.store(gl.full([64, 64], 1.0, gl.bfloat16, BLOCKED))
    fence_async_shared()
    add_box(target, [0, 0], tile)
    if AWAIT:
        wait_for_reductions()
    else:
        tma.store_wait(0)
    gl.store(found, gl.load(memory))


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_added_is_there_once_that_was_waited_for(waits):
    seen = set()
    for order, seed in INTERLEAVINGS:
        x, found = torch.zeros(64, 64, dtype=torch.bfloat16), torch.full((1,), 7.0).bfloat16()
        with simulated_kernels.simulated(order, seed):
            add_kernel[(1,)](box(x), x, found, waits)
        assert (x == 1).all(), "at the end at the latest"
        seen.add(found.item())
    assert seen == ({1.0} if waits else {0.0, 1.0})


FAULTS_OF_TMA = {
    "misaligned": "coordinate 3 is no multiple of 16 bytes, at copy_kernel",
    "stored": "TMA store of .* but there is no fence_async_shared after the store",
    "not waited for": "TMA load of .* overwrites .* but the TMA store .* is still in flight",
}


@every_interleaving
@pytest.mark.parametrize("how", FAULTS_OF_TMA)
def test_faults_of_tma_are_found(how, order, seed):
    x, column = numbers(128, 64), 3 if how == "misaligned" else 0
    with simulated_kernels.simulated(order, seed), pytest.raises(simulator.Fault, match=FAULTS_OF_TMA[how]):
        copy_kernel[(1,)](box(x), box(x.clone()), 0, column, HOW=how)


@gluon.jit
def load_tiles(a, b, io, steps, FAULT: gl.constexpr):
    ring_a, ring_b, full, free = io
    STAGES: gl.constexpr = ring_a.shape[0]
    BYTES: gl.constexpr = a.block_type.nbytes + (0 if FAULT == "too few bytes" else b.block_type.nbytes)
    for t in range(steps):
        slot = t % STAGES
        if FAULT != "no free wait":
            mbarrier.wait(free.index(slot), (t // STAGES & 1) ^ (0 if FAULT == "wrong parity" else 1))
        mbarrier.expect(full.index(slot), BYTES)
        tma.async_copy_global_to_shared(a, [0, t * 64], full.index(slot), ring_a.index(slot))
        tma.async_copy_global_to_shared(b, [t * 64, 0], full.index(slot), ring_b.index(slot))


@gluon.jit
def multiply(out, io, steps, FAULT: gl.constexpr):
    ring_a, ring_b, full, free = io
    STAGES: gl.constexpr = ring_a.shape[0]
    L: gl.constexpr = accumulator(64)
    acc = gl.zeros([64, 64], gl.float32, L)
    for t in range(steps):
        slot = t % STAGES
        if FAULT != "no full wait":
            mbarrier.wait(full.index(slot), t // STAGES & 1)
        acc = hopper.warpgroup_mma(ring_a.index(slot), ring_b.index(slot), acc, is_async=True)
        if FAULT == "early arrival":
            mbarrier.arrive(free.index(slot), count=1)
        if FAULT != "no product wait":
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        if FAULT != "early arrival":
            mbarrier.arrive(free.index(slot), count=2 if FAULT == "many arrivals" else 1)
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    gl.store(out + row * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0), acc)


@gluon.jit
def product_kernel(a, b, out, steps, STAGES: gl.constexpr, FAULT: gl.constexpr):
    ring_a = gl.allocate_shared_memory(a.dtype, [STAGES, 64, 64], a.layout)
    ring_b = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 64], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2 if FAULT == "high count" else 1)
    fence_async_shared()
    io = (ring_a, ring_b, full, free)
    gl.warp_specialize([(multiply, (out, io, steps, FAULT)), (load_tiles, (a, b, io, steps, FAULT))], [1], [24])


def product(order, seed, fault="", stages=2, steps=5, log=None):
    a, b, out = numbers(64, 64 * steps), numbers(64 * steps, 64), torch.full((64, 64), math.nan)
    with simulated_kernels.simulated(order, seed, log):
        product_kernel[(1,)](box(a), box(b), out, steps, STAGES=stages, FAULT=fault, num_warps=4)
    exact = a.double() @ b.double()
    assert (out - exact).norm() <= 1e-6 * exact.norm()  # sums of 320 products in float32


@every_interleaving
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_specialised_ring_multiplies(order, seed, stages):
    product(order, seed, stages=stages)


TOO_EARLY = "reads shared memory|overwrites shared memory|too many arrivals"
FAULTS = [  # and the number of buffers
    ("no full wait", 2, TOO_EARLY),
    ("no free wait", 2, TOO_EARLY),
    ("too few bytes", 2, TOO_EARLY),
    ("early arrival", 2, r"TMA load of load_tiles \[1\] .* overwrites .* the wgmma of multiply \[0\] at multiply"),
    ("no product wait", 2, "overwrites .* the wgmma .* is still in flight"),
    ("no product wait", 8, "used before warpgroup_mma_wait, at multiply .*: wgmma at multiply"),
    ("many arrivals", 2, r"too many arrivals: 2 more at barrier 3\[0\] of product_kernel"),
    ("wrong parity", 2, r"(?s)deadlock.*multiply \[0\] waits for parity 0 of barrier 2\[0\].*load_tiles \[1\] waits"),
    ("high count", 2, r"(?s)deadlock.*load_tiles \[1\] waits for parity 0 of barrier 3\[0\].* 1 of 2 arrivals missing"),
    ("too much memory", 16, "262144 bytes of shared memory, 232448 are there, at product_kernel"),
]


@every_interleaving
@pytest.mark.parametrize(("fault", "stages", "message"), FAULTS)
def test_faults_of_a_ring_are_found(fault, stages, message, order, seed):
    with pytest.raises(simulator.Fault, match=message):
        product(order, seed, fault, stages)


@every_interleaving
def test_a_log_holds_what_happens_in_order(order, seed):
    product(order, seed, log=(log := []))
    place = {id(event): i for i, event in enumerate(log)}
    ends = {id(event.of): event for event in log if event.kind == "done"}
    for kind, partition, number, size in (
        ("load", "load_tiles [1]", 10, 2 * 64**2),
        ("wgmma", "multiply [0]", 5, 2 * 64**3),
    ):
        events = [event for event in log if event.kind == kind]
        assert [(event.partition, event.size) for event in events] == [(partition, size)] * number
        assert all(place[id(event)] < place[id(ends[id(event)])] for event in events)
        assert kind == "load" or all("warpgroup_mma(ring_a" in event.place.source()[0] for event in events)
    waits = [(i, event.barrier) for i, event in enumerate(log) if event.kind == "wait" and event.barrier[1] >= 0]
    assert len(waits) == 5 + 3  # for five full buffers; for three to be free again, of two that are at first
    for i, barrier in waits:
        assert {event.kind for event in log[:i] if event.barrier == barrier} & {"arrive", "done"}


@gluon.jit
def rash_kernel(out, rows):
    L: gl.constexpr = accumulator(64)
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    x = hopper.warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, L), is_async=True)
    x = gl.max(hopper.warpgroup_mma_wait(0, deps=[x]), 1)
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    gl.store(out + row, x, mask=row < rows)


def test_what_is_read_too_early_may_be_dropped_but_not_stored():
    with simulated_kernels.simulated():
        rash_kernel[(1,)](torch.zeros(64), 0)
        with pytest.raises(simulator.Fault, match="no store has reached it"):
            rash_kernel[(1,)](torch.zeros(64), 2)
