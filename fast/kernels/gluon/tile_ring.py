"""mbarriers and TMA loads: how a loader fills shared memory and the warpgroups release it.

A ring of STAGES buffers counts its tiles t = 0, 1, ...: tile t is in buffer t % STAGES. Each buffer has two mbarriers:

    full    the tile has arrived: one arrival, by the loader (`mbarrier.expect`), and then all bytes, by TMA
    free    the tile has been read: one arrival from each warpgroup that reads it

`mbarrier.arrive` first synchronises the warps that execute it (bar.sync), so one arrival for all of them is enough.

For tile t, ``full`` and ``free`` of its buffer complete their phase number t // STAGES. A wait names the parity of a
phase, and returns once that phase is complete. A reader waits for phase t // STAGES of ``full``. A loader waits for
the previous phase of ``free``: the opposite parity. In a new mbarrier, a phase of parity 1 counts as complete, so the
first waits of a loader return at once.

Tiles are boxes of 4-D tensors (b, t, h, d): 1 batch, some tokens, PACK heads, all of d. A tile can therefore hold several
query heads of one group: row r is token r // PACK, head r % PACK. Strides are multiples of 16 bytes, the last one 1 element.
Tokens and columns outside the tensor arrive as 0. No load crosses into another sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate

aggregate = getattr(gluon, "aggregate", _aggregate)  # newer versions of Triton export it
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8


@aggregate
class Ring:
    """Buffers in shared memory (first axis: the buffer) and the mbarriers ``full`` and ``free`` of each one."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, free):
        self.tiles = tiles
        self.full = full
        self.free = free


@aggregate
class RingPosition:
    """Where a reader of a ring is: the slot of the previous tile, the slot of this one, and the parity of its phase.

    The numbers are counted up tile by tile. A division by STAGES would delay the first MMA of each tile.
    """

    previous: gl.tensor
    slot: gl.tensor
    parity: gl.tensor

    @gluon.constexpr_function
    def __init__(self, previous, slot, parity):
        self.previous = previous
        self.slot = slot
        self.parity = parity

    @gluon.jit
    def next(self, STAGES: gl.constexpr):
        """Return the position at the next tile."""
        wraps = self.slot == STAGES - 1
        return RingPosition(self.slot, gl.where(wraps, 0, self.slot + 1), gl.where(wraps, self.parity ^ 1, self.parity))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER mbarriers. Each completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def load_box(descriptor, batch, row, head, full, buffer):
    """Start a TMA load of the box at (batch, row, head). Its last byte completes a phase of ``full``."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, row, head, 0], full, buffer)
