"""The simulator of Gluon kernels: right kernels give right numbers, and each planted fault is found, in every interleaving."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import math
from contextlib import nullcontext

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from canon.fast.kernels.gluon.ptx import wait_for_reductions
from canon.testing import simulator

INTERLEAVINGS = [(order, seed) for order in ("late", "early", "random") for seed in range(3)]
every_interleaving = pytest.mark.parametrize(("order", "seed"), INTERLEAVINGS)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


def box(x):
    return TensorDescriptor.from_tensor(x, [64, 64], gl.NVMMASharedLayout(128, 16, 2))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


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
    with simulator.simulated(order, seed):
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
        with simulator.simulated(order, seed):
            add_kernel[(1,)](box(x), x, found, waits)
        assert (x == 1).all(), "at the end at the latest"
        seen.add(found.item())
    assert seen == ({1.0} if waits else {0.0, 1.0})


FAULTS_OF_TMA = {
    "misaligned": "coordinate 3 is no multiple of 16 bytes, at copy_kernel",
    "stored": "TMA store of .* but there is no fence_async_shared after the store",
    "not waited for": "TMA load of .* overwrites .* but the TMA store .* is still under way",
}


@every_interleaving
@pytest.mark.parametrize("how", FAULTS_OF_TMA)
def test_faults_of_tma_are_found(how, order, seed):
    x, column = numbers(128, 64), 3 if how == "misaligned" else 0
    with simulator.simulated(order, seed), pytest.raises(simulator.Fault, match=FAULTS_OF_TMA[how]):
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
    with simulator.simulated(order, seed, log):
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
    ("no product wait", 2, "overwrites .* the wgmma .* is still under way"),
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
    with simulator.simulated():
        rash_kernel[(1,)](torch.zeros(64), 0)
        with pytest.raises(simulator.Fault, match="nobody has written there"):
            rash_kernel[(1,)](torch.zeros(64), 2)


@gluon.jit
def named(KIND: gl.constexpr, ID: gl.constexpr):
    gl.inline_asm_elementwise(f"bar.{KIND} {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turns(log, count, W: gl.constexpr, HOW: gl.constexpr):
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
def turns_kernel(log, count, HOW: gl.constexpr):
    gl.warp_specialize([(take_turns, (log, count, FIRST, HOW)), (take_turns, (log, count, SECOND, HOW))], [4], [128])


def turns(order, seed, how=""):
    log, count = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulator.simulated(order, seed):
        turns_kernel[(1,)](log, count, HOW=how)
    return log.tolist()


@every_interleaving
def test_named_barriers_order_partitions(order, seed):
    assert turns(order, seed) == list(range(6))
    unbalanced = r"named barrier 8 is out of balance: take_turns \[1\] has come"
    deadlock = r"waits for named barrier 8 \(128 of 256 threads have come\)"
    for how, message in (("no first", deadlock), ("no last", unbalanced)):
        with pytest.raises(simulator.Fault, match=message):
            turns(order, seed, how)


def test_seeds_draw_interleavings_and_repeat_them():
    logs = [turns("late", seed, "unordered") for seed in range(20)]
    assert logs == [turns("late", seed, "unordered") for seed in range(20)]
    assert len({tuple(log) for log in logs}) > 5


def test_a_failure_names_its_partition():
    with pytest.raises(AssertionError, match=r"(?s)a worker fails at take_turns.*in take_turns \[1\] of program"):
        turns("late", 0, "failing")


@gluon.jit
def claim_kernel(who, counter, number):
    item = gl.program_id(0)
    while item < number:
        gl.store(who + item, gl.program_id(0))
        item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


def claims(seed):
    who, counter = torch.full((20,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with simulator.simulated(seed=seed):
        claim_kernel[(3,)](who, counter, 20)
    assert counter == 20
    return who.tolist()


def test_programs_may_change_places_at_atomic_operations():
    found = [claims(seed) for seed in range(10)]
    assert found == [claims(seed) for seed in range(10)]
    assert all(who[:3] == [0, 1, 2] and min(who.count(p) for p in range(3)) > 1 for who in found)
    assert len({tuple(who) for who in found}) > 5


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
def tell_items(told, full, free, FAULT: gl.constexpr):
    for i in range(3):
        mbarrier.wait(free, (i & 1) ^ 1)
        told.store(gl.full([1], i, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        if i == 1 and FAULT == "fails":
            gl.static_assert(False, "while others wait for their turn")
        mbarrier.arrive(full, count=1)


@gluon.jit
def hear_items(out, counter, told, full, free, FAULT: gl.constexpr):
    i = 0
    item = gl.atomic_add(counter, 1) * 0
    while item < 2:
        if FAULT != "no full wait":
            mbarrier.wait(full, i & 1)
        item = gl.max(told.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        if FAULT != "early free":
            gl.store(out + item, item)
        mbarrier.arrive(free, count=1)
        if FAULT == "early free":
            gl.store(out + item, gl.max(told.load(gl.BlockedLayout([1], [32], [4], [0])), 0))
        i += 1


@gluon.jit
def tell_kernel(out, counter, FAULT: gl.constexpr):
    told = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(tell_items, (told, full, free, FAULT)), (hear_items, (out, counter, told, full, free, FAULT))], [4], [24]
    )


@every_interleaving
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", None),
        ("no full wait", "nobody has written there|no barrier says that the store of tell_items"),
        ("early free", "overwrites|no barrier says"),
    ],
)
def test_numbers_are_told_through_shared_memory(fault, message, order, seed):
    out = torch.full((3,), -1, dtype=torch.int32)
    with (
        simulator.simulated(order, seed),
        nullcontext() if message is None else pytest.raises(simulator.Fault, match=message),
    ):
        tell_kernel[(2,)](out, torch.zeros(1, dtype=torch.int32), FAULT=fault)
    assert message or out.tolist() == [0, 1, 2]


@every_interleaving
def test_the_first_program_to_fail_ends_all(order, seed):
    with simulator.simulated(order, seed), pytest.raises(AssertionError, match="while others wait for their turn"):
        tell_kernel[(4,)](torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), FAULT="fails")


@gluon.jit
def arithmetic_kernel(x, out, n, scale, N: gl.constexpr):
    i = gl.arange(0, N, gl.SliceLayout(1, BLOCKED))
    a = gl.load(x + i, mask=i < n, other=0.0)
    b = (a.to(gl.float32) * scale).to(gl.bfloat16)
    gl.store(out + i, b)
    gl.store(out + N + i, a * b + 1)
    gl.store(out + 2 * N + i, gl.where((i & ~1) >= n, float("-inf"), gl.exp2(a.to(gl.float32))))
    gl.store(out + 3 * N, gl.max(a, 0) + gl.sum(gl.maximum(a, 0.5).to(gl.float32), 0))


def test_arithmetic_is_that_of_tritons_types():
    x, out = numbers(32), torch.full((4, 32), math.nan, dtype=torch.bfloat16)
    with simulator.simulated():
        arithmetic_kernel[(1,)](x, out, 21, 0.3, N=32)
    a = torch.where(torch.arange(32) < 21, x, 0)
    powers = a.float().exp2().bfloat16().masked_fill(torch.arange(32) >= 22, -math.inf)
    assert torch.equal(out[:3], torch.stack([(a.float() * torch.tensor(0.3)).bfloat16(), a * out[0] + 1, powers]))
    assert out[3, 0] == (a.float().max() + a.clamp(min=0.5).float().sum()).bfloat16()


@gluon.jit
def bits_kernel(x, out, N: gl.constexpr):
    i = gl.arange(0, N, gl.SliceLayout(1, BLOCKED))
    bits = gl.load(x + i).to(gl.int32, bitcast=True)
    gl.store(out + i, (bits + (1 << 23)).to(gl.float32, bitcast=True))
    gl.store(out + N + i, (bits >> 23).to(gl.float32))


def test_bits_are_read_as_another_type():
    x, out = torch.linspace(-3, 40, 32), torch.zeros(2, 32)
    with simulator.simulated():
        bits_kernel[(1,)](x, out, 32)
    assert torch.equal(out[0], 2 * x)
    assert torch.equal(out[1], (x.view(torch.int32) >> 23).float())


def test_addresses_are_checked_where_they_are_not_masked():
    with simulator.simulated():
        for n, size, message in ((22, 97, "load of element 21 of 21"), (21, 96, "store of element 96 of 96")):
            with pytest.raises(simulator.Fault, match=f"{message}: out of bounds, at arithmetic_kernel"):
                arithmetic_kernel[(1,)](numbers(21), torch.zeros(size), n, 0.3, N=32)


@gluon.jit
def numbers_kernel(out, start, big):
    t = -3
    gl.store(out, t // 2)  # of constants
    for _ in range(1):
        gl.store(out + 1, t // 2 * 10 + t % 2)  # of values
        t += 1
    if start > 0:
        t = 7
    gl.store(out + 2, (start - t) // 2 + t.to(gl.int32) % 4 + min(start, 9))
    gl.store(out + 3, big + start)


def test_numbers_are_values_where_a_loop_or_a_branch_changes_them():
    out = torch.full((4,), -99, dtype=torch.int32)
    with simulator.simulated():
        numbers_kernel[(1,)](out, 4, 2**31 - 5)
        assert out.tolist() == [-2, -11, -1 + 3 + 4, 2**31 - 1]
        with pytest.raises(simulator.Fault, match="int32 overflow: add gives 2147483648, at numbers_kernel"):
            numbers_kernel[(1,)](out, 4, 2**31 - 4)


def test_what_is_not_simulated_is_said():
    with pytest.raises(NotImplementedError, match="inline assembly 'bar.red 8, 256.* is not simulated"):
        turns("late", 0, "unknown")
    with simulator.simulated(), pytest.raises(KeyError, match="no option.*num_wraps"):
        numbers_kernel[(1,)](torch.zeros(4), 1, 1, num_wraps=4)
