"""The simulator of Gluon kernels: right kernels give right numbers, and each planted fault is
found, in every interleaving.
"""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

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
    pass  # `simulator.reduce_add` stands for it


simulator.register(add_box, simulator.reduce_add)


@gluon.jit
def copy_kernel(source, target, column, HOW: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    for i in range(2):
        mbarrier.expect(full, source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [64 * i, column], full, tile)
        mbarrier.wait(full, i & 1)
        if HOW == "stored":
            tile.store(tile.load(BLOCKED))
        add_box(target, [64 * i, 0], tile)
        if HOW != "not waited for":
            tma.store_wait(0)


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
    "stored": "TMA add of .* but there is no fence_async_shared after the store",
    "not waited for": "TMA load of .* overwrites .* but the TMA add .* is still in flight",
}


@every_interleaving
@pytest.mark.parametrize("how", FAULTS_OF_TMA)
def test_faults_of_tma_are_found(how, order, seed):
    x, column = numbers(128, 64), 3 if how == "misaligned" else 0
    with (
        simulated_kernels.simulated(order, seed),
        pytest.raises(simulator.Fault, match=FAULTS_OF_TMA[how]),
    ):
        copy_kernel[(1,)](box(x), box(x.clone()), column, HOW=how)


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
