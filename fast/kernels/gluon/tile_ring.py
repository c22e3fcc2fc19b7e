"""mbarriers and TMA loads: how a loader warp fills shared memory and the warpgroups release it.

A ring of STAGES buffers counts its tiles t = 0, 1, ...: tile t is in buffer t % STAGES. Each buffer has two mbarriers:

    full    the tile has arrived: one arrival, by the TMA unit
    free    the tile has been read: one arrival from each warpgroup that reads it

Both complete phase t // STAGES for tile t. A wait names the parity of that phase. A loader waits for the opposite parity, so
its first waits return at once.

Tiles are boxes of 4-D tensors (b, t, h, d): 1 batch, ROWS / PACK tokens, PACK heads, all of d. A tile can therefore hold
several query heads of one group: row r is token r // PACK, head r % PACK. Any strides work. Rows after the last token and
columns after the last column arrive as 0. No load crosses into another sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER mbarriers. Each completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def load_box(descriptor, batch, row, head, full, buffer):
    """Start a TMA load of the box at (batch, row, head). Its arrival completes a phase of ``full``."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, row, head, 0], full, buffer)
