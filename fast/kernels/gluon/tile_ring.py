"""mbarriers and TMA loads: how a loader fills shared memory and the warpgroups release it.

Tile t = 0, 1, ... of a ring is in buffer t % STAGES, which has two mbarriers:

    full    the tile has arrived: one arrival, by the loader (`mbarrier.expect`), and all bytes
    free    the tile has been read: one arrival from each warpgroup that reads it

For tile t both complete phase t // STAGES. A reader waits for the parity of this phase of ``full``,
a loader for that of the previous phase of ``free``: at once in a new mbarrier. `mbarrier.arrive`
first synchronises its warps, so one arrival is enough for all of them.

Tiles are boxes of (b, t, h, d): 1 batch, some tokens, PACK query heads of a group, all of d; 0
outside the tensor."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate

# renamed in Triton 3.8
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def aggregate(declared: type) -> type:
    """Decorate an aggregate. Without a constructor, it takes all fields in order."""
    fields = list(declared.__annotations__)  # part of the hash by which Triton caches kernels
    constants = [kind is gl.constexpr for kind in declared.__annotations__.values()]

    def __init__(self, *values):
        for field, is_constant, value in zip(fields, constants, values, strict=True):
            setattr(self, field, gl.constexpr(value) if is_constant else value)

    if "__init__" not in vars(declared):
        declared.__init__ = gluon.constexpr_function(__init__)
    return getattr(gluon, "aggregate", _aggregate)(declared)  # exported by newer Triton


@aggregate
class Ring:
    """Buffers in shared memory (first axis) and their mbarriers ``full`` and ``free``."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def operand(self, slot):
        """Return a buffer as a matrix (rows, d). Row r is token r // PACK, head r % PACK."""
        ROWS: gl.constexpr = self.tiles.shape[2] * self.tiles.shape[3]
        return self.tiles.index(slot).reshape([ROWS, self.tiles.shape[4]])


@aggregate
class RingPosition:
    """A reader's previous and own slot, and the parity of its phase."""

    previous: gl.tensor
    slot: gl.tensor
    parity: gl.tensor

    @gluon.jit
    def next(self, STAGES: gl.constexpr):
        wraps = self.slot == STAGES - 1
        return RingPosition(
            self.slot,
            gl.where(wraps, 0, self.slot + 1),
            gl.where(wraps, self.parity ^ 1, self.parity),
        )


@gluon.jit
def first_position():
    """Return the position before the first tile is read."""
    return RingPosition(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER mbarriers. Each completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def allocate_tiles(descriptor, NUMBER: gl.constexpr):
    """Allocate buffers for NUMBER boxes of a descriptor."""
    BOX: gl.constexpr = descriptor.block_type.shape
    return gl.allocate_shared_memory(
        descriptor.dtype, [NUMBER, BOX[0], BOX[1], BOX[2], BOX[3]], descriptor.layout
    )


@gluon.jit
def load_box(descriptor, batch, row, head, full, buffer):
    """Start a TMA load of the box at (batch, row, head); its last byte completes ``full``."""
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, row, head, 0], full, buffer)


@gluon.jit
def load_tile(descriptor, batch, row, head, ring, slot):
    """Start a TMA load of the box at (batch, row, head) to a buffer of a ring."""
    load_box(descriptor, batch, row, head, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def issue_contraction(a, b, zeros, WIDTH: gl.constexpr):
    """Issue a b^T over the first WIDTH columns: all, or three quarters. The others are 0."""
    HALF: gl.constexpr = a.shape[1] // 2
    if a.shape[1] == WIDTH:
        return hopper.warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    left, right = a.slice(0, HALF, dim=1), b.slice(0, HALF, dim=1)
    acc = hopper.warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    left, right = a.slice(HALF, WIDTH - HALF, dim=1), b.slice(HALF, WIDTH - HALF, dim=1)
    return hopper.warpgroup_mma(left, right.permute((1, 0)), acc, is_async=True)
