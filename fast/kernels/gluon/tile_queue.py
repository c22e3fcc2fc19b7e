"""The tile queue of the Hopper kernels: how a CTA finds its work tiles and the spans that each one
visits.

One int32 tensor ``work`` (a single pointer saves registers) holds the schedule of `tile_scheduler`:

    header        8 numbers: the end of the work tiles, six zeros, start of the tickets
    work tiles    8 numbers each, FIRST_TOKEN to FIRST_COLUMN; HEAD is the first of packed ones
    spans         8 numbers each, COLUMN to HI; ROW_START to HI are the band, and ROW_STOP is 0 in a
                  full span. In a chained one (`key_order`) ROW_START is the offset of its bands,
                  and ROW_STOP minus their number
    tickets       of each span, only if dq is ordered: predecessor's ticket, own ticket

A work tile or span is identified by its offset in ``work``; 0 means none. In forward and dq, CTA i
starts with work tile i, and its first loads wait for no atomic. Later ones are claimed from an
atomic counter, as are all for dk and dv: no work tile waits for a CTA that starts late because
messages of other ranks hold SMs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from canon.fast.kernels.gluon.layouts import scalar_layout

WORK_TILE, SPAN = gl.constexpr(8), gl.constexpr(8)
WORK_TILES_END, TICKETS = gl.constexpr(0), gl.constexpr(7)
FIRST_TOKEN, STOP_TOKEN, BATCH, HEAD, FIRST_SPAN, SPANS_END, BATCH_HEAD, FIRST_COLUMN = map(
    gl.constexpr, range(8)
)
COLUMN, TILES, ROW_START, ROW_STOP, COLUMN_START, COLUMN_STOP, LO, HI = map(gl.constexpr, range(8))


@gluon.jit
def first_work_tile():
    """Return this CTA's first work tile."""
    return WORK_TILE * (1 + gl.program_id(0))


@gluon.jit
def claim_work_tile(work, counter):
    """Claim the next work tile after all first ones; 0 if none is left."""
    end = gl.load(work + WORK_TILES_END)
    work_tile = WORK_TILE * (1 + gl.num_programs(0))
    if work_tile < end:
        work_tile += gl.atomic_add(counter, WORK_TILE, sem="relaxed")
    return gl.where(work_tile < end, work_tile, 0)


@gluon.jit
def claim_any_work_tile(work, counter, FIRST: gl.constexpr, ORDERED: gl.constexpr):
    """Claim the next work tile, even this CTA's FIRST one; 0 if none is left. There is no counter
    if CTAs suffice and dq is not ORDERED.
    """
    end = gl.load(work + WORK_TILES_END)
    work_tile = WORK_TILE * (1 + gl.program_id(0)) if FIRST else end
    if ORDERED or WORK_TILE * (1 + gl.num_programs(0)) < end:
        work_tile = WORK_TILE + gl.atomic_add(counter, WORK_TILE, sem="relaxed")
    return gl.where(work_tile < end, work_tile, 0)


@gluon.jit
def allocate_published(NUMBER: gl.constexpr):
    """Allocate shared memory for NUMBER published work tiles."""
    return gl.allocate_shared_memory(gl.int32, [NUMBER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def publish(published, work_tile):
    """Publish a work tile. Every thread stores it, also the one that arrives."""
    published.store(gl.full([1], work_tile, gl.int32, scalar_layout(gl.num_warps())))


@gluon.jit
def publish_end(published, full, free, parity):
    """Publish 0 once the buffer is free, and arrive at ``full``: no load follows."""
    mbarrier.wait(free, parity)
    publish(published, 0)
    mbarrier.arrive(full, count=1)


@gluon.jit
def receive(published, full, parity):
    """Wait until a work tile is published, and return it."""
    mbarrier.wait(full, parity)
    # a reduction of one number compiles to a load
    return gl.max(published.load(scalar_layout(gl.num_warps())), 0)


@gluon.jit
def receive_after(published, full, done):
    """Wait for the work tile after ``done`` others."""
    BUFFERS: gl.constexpr = published.shape[0]
    b = done % BUFFERS
    return receive(published.index(b), full.index(b), done // BUFFERS & 1)


@gluon.jit
def position_of(work, work_tile):
    """Return (first token, stop token, batch, head) of a work tile."""
    return (
        gl.load(work + work_tile + FIRST_TOKEN),
        gl.load(work + work_tile + STOP_TOKEN),
        gl.load(work + work_tile + BATCH),
        gl.load(work + work_tile + HEAD),
    )


@gluon.jit
def spans_of(work, work_tile):
    """Return (first span, end of the spans) of a work tile."""
    return gl.load(work + work_tile + FIRST_SPAN), gl.load(work + work_tile + SPANS_END)


@gluon.jit
def batch_head_of(work, work_tile):
    """Return batch * heads + head of a work tile."""
    return gl.load(work + work_tile + BATCH_HEAD)


@gluon.jit
def columns_of(work, span, COLUMNS: gl.constexpr):
    """Return (first column, end of the last tile) of a span."""
    column = gl.load(work + span + COLUMN)
    return column, column + gl.load(work + span + TILES) * COLUMNS


@gluon.jit
def ticket_of(work, span):
    """Return (predecessor's ticket, own ticket) of a span. Ticket 0 means no predecessor."""
    at = work + gl.load(work + TICKETS) + (span - gl.load(work + WORK_TILES_END)) // (SPAN // 2)
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def is_partial(work, span):
    """Return whether a span needs its band's mask."""
    return gl.load(work + span + ROW_STOP) != 0


@gluon.jit
def first_tile(work, work_tile):
    """Return (span, end of the spans, column, tiles left in the span) at the first tile."""
    span, span_end = spans_of(work, work_tile)
    return span, span_end, gl.load(work + work_tile + FIRST_COLUMN), gl.load(work + span + TILES)


@gluon.jit
def next_tile(work, span, column, left, span_end, COLUMNS: gl.constexpr):
    """Return (span, column, tiles left in the span) at the next tile."""
    column += COLUMNS
    left -= 1
    if left == 0:
        span += SPAN
        if span < span_end:
            column, left = gl.load(work + span + COLUMN), gl.load(work + span + TILES)
    return span, column, left
