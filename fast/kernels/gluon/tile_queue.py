"""The tile queue of the Hopper kernels: how a CTA finds its work tiles and the spans of tiles that each one visits.

One int32 tensor, ``work``, holds the whole schedule (written by `canon.fast.kernels.gluon.tile_scheduler`). A single
pointer saves registers. Its parts, in order:

    header        [end of the work tiles, six zeros, start of the tickets]
    work tiles    8 numbers each: first token, stop token, batch, head (the first one if heads are packed), first span, end
                  of the spans, batch * heads + head, first column of the first span
    spans         8 numbers each: first column, tiles, row start, row stop, column start, column stop, lo, hi
                  (see `canon.fast.kernels.work_tables`)
    tickets       2 numbers for each span, only if dq is reduced in a fixed order: predecessor's ticket, own ticket

A work tile is identified by its offset in ``work``; the first one is 8. Offset 0 means "no work tile". A tile
of rows that sees no key is not a work tile: the launch writes its rows of the results.

The grid has one CTA for each SM, or for each work tile if there are fewer. In the forward and dq kernels CTA i starts with
work tile i. So its first TMA loads wait for no atomic operation, only for its record in ``work``. Each further work tile
is claimed with an atomic counter that all CTAs share; the launch sets it to 0. The loader claims after it has issued all
loads of the current work tile. In long work tiles the ring is then usually full, so the claim delays no load.

The kernels for dk and dv also claim the first work tile of each CTA, if there are more work tiles than CTAs. The
reason: messages of other ranks can hold SMs, so that some CTAs start late. No work tile waits for such a CTA, because
others have claimed them all. In the other kernels the last CTAs begin with short work tiles (`tile_scheduler`). With
ordered dq, CTAs wait for each other, and a CTA must never wait for one that cannot run yet. So there every work tile
is claimed, however few there are.

The loader publishes a work tile in shared memory, for the warpgroups and for the adder of dq. It does so before it loads Q of
the work tile (K, for dk and dv). The barriers of Q or K also guard the published number. After the last work tile the loader
publishes 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from canon.fast.kernels.gluon.layouts import scalar_layout

WORK_TILE = gl.constexpr(8)  # numbers in ``work`` for each work tile
SPAN = gl.constexpr(8)  # numbers in ``work`` for each span


# ------------------------------------------------------------------ claim work tiles
@gluon.jit
def first_work_tile():
    """Return this CTA's first work tile."""
    return WORK_TILE * (1 + gl.program_id(0))


@gluon.jit
def claim_work_tile(work, counter):
    """Claim the next work tile after the first ones of all CTAs. Return 0 if none is left.

    The atomic is relaxed because a claim carries no data. ``work`` does not change during the kernel, so plain loads
    suffice.
    """
    end = gl.load(work)
    work_tile = WORK_TILE * (1 + gl.num_programs(0))
    if work_tile < end:
        work_tile += gl.atomic_add(counter, WORK_TILE, sem="relaxed")
    return gl.where(work_tile < end, work_tile, 0)


@gluon.jit
def claim_any_work_tile(work, counter, FIRST: gl.constexpr, ORDERED: gl.constexpr):
    """Claim the next work tile, even if it is this CTA's FIRST one. Return 0 if none is left.

    If there are no more work tiles than CTAs, there is no counter unless ORDERED, and each CTA has the work tile of its
    number.
    """
    end = gl.load(work)
    work_tile = WORK_TILE * (1 + gl.program_id(0)) if FIRST else end
    if ORDERED or WORK_TILE * (1 + gl.num_programs(0)) < end:
        work_tile = WORK_TILE + gl.atomic_add(counter, WORK_TILE, sem="relaxed")
    return gl.where(work_tile < end, work_tile, 0)


# ------------------------------------------------------------------ publish them to the warpgroups
@gluon.jit
def allocate_published(NUMBER: gl.constexpr):
    """Allocate shared memory for NUMBER published work tiles."""
    return gl.allocate_shared_memory(gl.int32, [NUMBER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def publish(published, work_tile):
    """Publish a work tile. Every thread stores the number, so the one that arrives at ``full`` has stored it before.

    A slower warp may store it again later; this is harmless, as the number is the same.
    """
    published.store(gl.full([1], work_tile, gl.int32, scalar_layout(gl.num_warps())))


@gluon.jit
def publish_end(published, full, free, parity):
    """Publish 0 once the buffer is free again. The loader arrives at ``full`` itself, as no load follows."""
    mbarrier.wait(free, parity)
    publish(published, 0)
    mbarrier.arrive(full, count=1)


@gluon.jit
def receive(published, full, parity):
    """Wait until a work tile is published, and return it."""
    mbarrier.wait(full, parity)
    return gl.max(published.load(scalar_layout(gl.num_warps())), 0)  # the maximum of one number: compiles to a load


# ------------------------------------------------------------------ read a work tile and its spans
@gluon.jit
def position_of(work, work_tile):
    """Return (first token, stop token, batch, head) of a work tile."""
    return (
        gl.load(work + work_tile),
        gl.load(work + work_tile + 1),
        gl.load(work + work_tile + 2),
        gl.load(work + work_tile + 3),
    )


@gluon.jit
def spans_of(work, work_tile):
    """Return (first span, end of the spans) of a work tile."""
    return gl.load(work + work_tile + 4), gl.load(work + work_tile + 5)


@gluon.jit
def batch_head_of(work, work_tile):
    """Return batch * heads + head of a work tile."""
    return gl.load(work + work_tile + 6)


@gluon.jit
def columns_of(work, span, COLUMNS: gl.constexpr):
    """Return (first column, end of the last tile) of a span."""
    column = gl.load(work + span)
    return column, column + gl.load(work + span + 1) * COLUMNS


@gluon.jit
def ticket_of(work, span):
    """Return (predecessor's ticket, own ticket) of a span. Ticket 0 means no predecessor."""
    at = work + gl.load(work + 7) + (span - gl.load(work)) // (SPAN // 2)
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def is_partial(work, span):
    """Return whether the tiles of a span must be masked by its band. A full span has row stop 0."""
    return gl.load(work + span + 3) > 0


# ------------------------------------------------------------------ iterate over the tiles of a work tile
@gluon.jit
def first_tile(work, work_tile):
    """Return (span, end of the spans, column, tiles left in the span) at the first visited tile of a work tile."""
    span, span_end = spans_of(work, work_tile)
    return span, span_end, gl.load(work + work_tile + 7), gl.load(work + span + 1)


@gluon.jit
def next_tile(work, span, column, left, span_end, COLUMNS: gl.constexpr):
    """Return (span, column, tiles left in the span) at the next visited tile. After the last one, span equals ``span_end``."""
    column += COLUMNS
    left -= 1
    if left == 0:
        span += SPAN
        if span < span_end:
            column, left = gl.load(work + span), gl.load(work + span + 1)
    return span, column, left
