"""dq of the fused backward: warpgroups compute parts, and an adder warp adds them to float32 dq in
global memory.

    warpgroups    dS (keys x queries) to shared memory   -> ds_full
                  dQ^T = K^T dS; dQ to shared memory     -> dq_full
    adder         wait for dq_full, add to dq            -> dq_free     (two adders if ORDERED)

With D = 128 each warpgroup computes 64 columns of dQ, with D = 64 all columns of every second tile.

**The dq semaphore** (ORDERED), an int32 for each tile of dq, fixes the order of additions by
tickets (`dq_order`). For each tile an adder does (if not ORDERED, only 3 to 5):

    1. poll the semaphore (`load_acquire`) until it holds the predecessor's ticket
    2. `fence_async_global`: the acquire alone does not order TMA
    3. wait for dq_full
    4. start the addition of each part by TMA (`tma_reduce_add`)
    5. once TMA has read shared memory, arrive at dq_free
    6. `wait_for_reductions`: step 7 may not publish an addition in flight
    7. write its own ticket (`store_release`)

This takes about as long as the MMAs of a tile, so two adders take turns, each with one buffer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from canon.fast.kernels.gluon.layouts import mma_layout, shared_operand_layout
from canon.fast.kernels.gluon.ptx import (
    back_off,
    fence_async_global,
    load_acquire,
    store_release,
    tma_reduce_add,
    wait_for_reductions,
)
from canon.fast.kernels.gluon.tile_queue import (
    SPAN,
    batch_head_of,
    columns_of,
    position_of,
    receive_after,
    spans_of,
    ticket_of,
)
from canon.fast.kernels.gluon.tile_ring import aggregate, make_barriers


@aggregate
class DqExchange:
    """dS and dQ in shared memory, two buffers each, and their barriers. dQ has D_PAD / 64 parts.

    dS needs no barrier ``free``: every MMA that reads dS of tile t - 2 is complete before a
    warpgroup overwrites it.

        D_PAD = 128    Both read it, and arrive at ds_full of tile t - 1 after this MMA.
        D_PAD = 64     One reads it. It completes this MMA before it arrives at ds_full of tile
                       t - 1, where the other one waits."""

    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_free: gl.shared_memory_descriptor


@gluon.jit
def make_exchange(dtype: gl.constexpr, dq_desc, c):
    """Allocate the buffers and barriers."""
    PARTS: gl.constexpr = c.D_PAD // 64
    LAYOUT: gl.constexpr = shared_operand_layout(c.COLUMNS)
    ds = gl.allocate_shared_memory(dtype, [2, c.ROWS, c.COLUMNS], LAYOUT)
    dq = gl.allocate_shared_memory(gl.float32, [2 * PARTS, 1, c.COLUMNS, 1, 64], dq_desc.layout)
    return DqExchange(ds, dq, make_barriers(2, 2), make_barriers(2, PARTS), make_barriers(2, 1))


@gluon.jit
def share_ds(ds, exchange, t, W: gl.constexpr):
    """Write this warpgroup's rows of dS to shared memory."""
    exchange.ds.index(t % 2).slice(W * ds.shape[0], ds.shape[0], dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(exchange.ds_full.index(t % 2), count=1)


@gluon.jit
def issue_dq(k, column, exchange, t):
    """Issue the MMA of 64 columns of dQ (rows of dQ^T), from ``column`` on."""
    BN: gl.constexpr = exchange.ds.shape[2]
    mbarrier.wait(exchange.ds_full.index(t % 2), t // 2 & 1)
    zeros = gl.zeros([64, BN], gl.float32, mma_layout(BN))
    k_columns = k.slice(column, 64, dim=1)
    return hopper.warpgroup_mma(
        k_columns.permute((1, 0)), exchange.ds.index(t % 2), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def pass_dq(dq, exchange, t, PART: gl.constexpr, PARTS: gl.constexpr):
    """Write 64 columns of dQ to shared memory, transposed: without bank conflicts."""
    mbarrier.wait(exchange.dq_free.index(t % 2), (t // 2 & 1) ^ 1)
    exchange.dq.index(t % 2 * PARTS + PART).reshape([dq.shape[1], 64]).permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(exchange.dq_full.index(t % 2), count=1)


@gluon.jit
def wait_for_ticket(semaphore, predecessor):
    """Wait for the predecessor's ticket. Later TMA operations follow its addition."""
    while load_acquire(semaphore) != predecessor:
        back_off()
    fence_async_global()


@gluon.jit
def publish_ticket(semaphore, ticket):
    """Wait until this CTA's addition is complete, then write its ticket."""
    wait_for_reductions()
    store_release(semaphore, ticket)


@gluon.constexpr_function
def adders(ordered):
    """Return the number of adder warps."""
    return 2 if ordered else 1


@gluon.jit
def add_dq(dq_desc, buffers, exchange, work, semaphores, dq_tiles, heads, c, ADDER: gl.constexpr):
    """Add the tiles ADDER + n ADDERS of dQ to global memory (an adder warp)."""
    ADDERS: gl.constexpr = adders(c.ORDERED)
    PARTS: gl.constexpr = exchange.dq.shape[0] // 2
    t, before, done = ADDER, 0, 0  # the next tile to add, tiles of earlier spans, work tiles done
    work_tile = receive_after(buffers.published, buffers.k.full, 0)
    while work_tile > 0:
        mbarrier.arrive(buffers.k.free.index(done % c.BUFFERS), count=1)
        _, _, batch, owner = position_of(work, work_tile)
        batch_owner = batch_head_of(work, work_tile)
        span_first, span_end = spans_of(work, work_tile)
        each_head = (span_end - span_first) // heads
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(work, span, c.COLUMNS)
            head = (span - span_first) // each_head
            # behind ``stop`` if the other adder has the only tile
            first = column + (t - before) * c.COLUMNS
            if c.ORDERED:
                predecessor, ticket = ticket_of(work, span)
                semaphore = semaphores + (batch_owner * heads + head) * dq_tiles
                semaphore += first // c.COLUMNS
            for i in range(first, stop, ADDERS * c.COLUMNS):
                if c.ORDERED:
                    wait_for_ticket(semaphore, predecessor)  # while the warpgroups compute dQ
                mbarrier.wait(exchange.dq_full.index(t % 2), t // 2 & 1)
                for part in gl.static_range(PARTS):
                    source = exchange.dq.index(t % 2 * PARTS + part)
                    tma_reduce_add(dq_desc, [batch, i, owner * heads + head, 64 * part], source)
                tma.store_wait(0)  # shared memory has been read
                mbarrier.arrive(exchange.dq_free.index(t % 2), count=1)
                if c.ORDERED:
                    publish_ticket(semaphore, ticket)
                    semaphore += ADDERS
                t += ADDERS
            before += (stop - column) // c.COLUMNS
        done += 1
        work_tile = receive_after(buffers.published, buffers.k.full, done)
