"""The simulator runs kernels with aggregates."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon import simulator
from canon.fast.kernels.gluon.tile_ring import RingPosition, aggregate


@aggregate
class Counter:
    position: RingPosition
    total: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, position, total, STAGES):
        self.position = position
        self.total = total
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def add(self, number):
        return Counter(self.position.next(self.STAGES), self.total + number, self.STAGES)


@gluon.jit
def count_kernel(results, n, start):
    zero = gl.to_tensor(0)
    counter = Counter(RingPosition(zero, zero, zero), start, 3)
    for i in range(n):
        if i % 2 == 0:
            counter = counter.add(10)
        else:
            counter = counter.add(1)
    gl.store(results, counter.total)
    gl.store(results + 1, counter.position.slot)
    gl.store(results + 2, counter.position.parity)


@gluon.jit
def start_kernel(results, n):
    count_kernel(results, n, gl.to_tensor(0))


def test_aggregates_are_carried_through_loops_and_branches():
    results = torch.zeros(3, dtype=torch.int32)
    with simulator.simulated():
        start_kernel[(1,)](results, 5)  # pyright: ignore
    assert results.tolist() == [32, 2, 1]
