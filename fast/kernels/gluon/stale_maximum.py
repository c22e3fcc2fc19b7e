"""The forward kernel's variant with a stale maximum: P is computed with the old row maximum, and
verified afterwards (paper/stale_maximum.md).

Far into a row the maximum seldom rises. The sums of P by lane, needed anyway, show how large P is,
so the maximum and its exchange are saved. The warpgroup votes on the sums once in a tile:

    a lane's sum of P in one tile              consequence
    at most the whole row's sum so far         none: P is as accurate as with the row maximum
    larger                                     add the rounding error of this lane's P to ``excess``
    over 65504 (float16) or 2^32 (bfloat16)    compute S and P again; such rows take their maximum

Second case: a key may weigh more than half, so O's divisor counts P as rounded: l - excess. lse
uses l. In bfloat16 a row's sum is at most 2^58 over 2^30 keys: values up to 1e21 give a finite o.

K and Q stay until the sums are verified, which delays loads. A row's m, l and excess follow from
its own scores alone: a vote of other rows repeats the tile with the row's m as it is."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from canon.fast.kernels.gluon.forward_pipeline import (
    issue_output,
    issue_scores,
    release_operands,
    visible_scores,
)
from canon.fast.kernels.gluon.layouts import lane_sum_layout, per_row_layout
from canon.fast.kernels.gluon.ptx import add_rounding_excess, any_above
from canon.fast.kernels.gluon.softcap import factor_of_capped
from canon.fast.kernels.gluon.softmax import (
    SoftmaxState,
    exponentials,
    finite_or_zero,
    rescale_output,
    rescale_sums,
    row_maximum,
)

LOWEST = gl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the lowest float32


@gluon.constexpr_function
def largest_sum(dtype):
    """Return the largest sum of P of a lane in one tile: more could overflow."""
    return 65504.0 if dtype == gl.float16 else 2.0**32


@gluon.jit
def sum_so_far(l, like):
    """Return the row's sum so far, at most `largest_sum`, for each lane."""
    return gl.expand_dims(gl.minimum(gl.sum(l, 1), largest_sum(like.dtype)), 1) + gl.zeros_like(l)


@gluon.jit
def visit_span_stale(state, wg, ring, tile, partial):
    """Add the tiles of a span, as `forward.visit_span`."""
    column = tile.column
    while column < tile.stop:
        if partial:
            state, ring, column, above, sums = try_tiles(state, wg, ring, tile.at(column), True)
        else:
            state, ring, column, above, sums = try_tiles(state, wg, ring, tile.at(column), False)
        if above != 0:
            here = tile.at(column)
            state = repeat_tile(state, wg, ring, here, sums, partial)
            release_operands(wg, ring, here, here.is_last(wg.BN))
            ring = ring.next(wg.STAGES)
            column += wg.BN
    return state, ring


@gluon.jit
def try_tiles(state, wg, ring, tile, PARTIAL: gl.constexpr):
    """Add tiles with the maximum as it is, from ``tile`` on, until the span ends or a sum is too
    large.

    Return the state; ring position and column of the first tile not yet added; ``above``, not 0 if
    that tile failed; and the sums of P of the last tile tried. For a failed tile, l and o hold the
    tiles before it, its K is not released, and its V has been waited for."""
    P_AFTER_O: gl.constexpr = wg.c.WARPGROUPS == 3
    o, p, m, l, excess = state.o, state.p, state.m, state.l, state.excess
    column, above, sums = tile.column, 0, l
    while (column < tile.stop) & (above == 0):
        # S of this tile and O += P V of the one before
        s = issue_scores(wg, ring, tile)
        o = issue_output(o, p, wg, ring)
        limit = sum_so_far(l, wg.q.tiles)
        s, o = hopper.warpgroup_mma_wait(1, deps=[s, o])
        if P_AFTER_O:
            mbarrier.wait(wg.v.full.index(ring.slot), ring.parity)
            o = hopper.warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(wg.v.free.index(ring.previous), count=1)
        s = visible_scores(s, wg, tile.at(column), PARTIAL)
        p, sums = exponentials(s, gl.maximum(m, LOWEST), wg, True)
        if not P_AFTER_O:
            mbarrier.wait(wg.v.full.index(ring.slot), ring.parity)
            o = hopper.warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(wg.v.free.index(ring.previous), count=1)
        # is a sum larger than the row's so far, or too large?
        above = any_above(sums, limit, wg.INDEX)
        if above != 0:
            above = any_above(sums, gl.full_like(sums, largest_sum(wg.q.tiles.dtype)), wg.INDEX)
            if above == 0:
                excess = add_rounding_excess(excess, p, sums, limit, wg.INDEX)
        if above == 0:
            l += sums
            release_operands(wg, ring, tile, tile.at(column).is_last(wg.BN))
            ring = ring.next(wg.STAGES)
            column += wg.BN
    return SoftmaxState(o, p, m, l, excess, state.shrink), ring, column, above, sums


@gluon.jit
def repeat_tile(state, wg, ring, tile, sums, partial):
    """Add the failed tile, with the row maximum in rows whose sum was too large."""
    s = hopper.warpgroup_mma_wait(0, deps=[issue_scores(wg, ring, tile, False)])
    s = visible_scores(s, wg, tile, partial)
    raised = gl.convert_layout(
        gl.max(sums, 1) > largest_sum(wg.q.tiles.dtype), per_row_layout(wg.BN)
    )
    m = gl.where(
        raised,
        gl.maximum(state.m, row_maximum(s) * factor_of_capped(wg.scale_log2, wg.c.SOFTCAP)),
        state.m,
    )
    m_finite = finite_or_zero(m)
    shrink = gl.exp2(state.m - m_finite)
    p, sums = exponentials(s, m_finite, wg, True)
    l, excess = rescale_sums(state.l, shrink), rescale_sums(state.excess, shrink)
    o = rescale_output(state.o, shrink)
    limit = sum_so_far(l, wg.q.tiles)
    # the bits of a row may not depend on where in a work tile its keys begin: as in a first tile
    if wg.c.KEY_ORDER:
        unseen = gl.convert_layout(state.m == float("-inf"), gl.SliceLayout(1, lane_sum_layout()))
        limit = gl.where(gl.expand_dims(unseen, 1), float("inf"), limit)
    excess = add_rounding_excess(excess, p, sums, limit, wg.INDEX)
    return SoftmaxState(o, p, m, l + sums, excess, state.shrink)
