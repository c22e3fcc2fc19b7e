"""The online softmax of the forward kernel.

Scores are in base 2. The four lanes of a quad share a row and exchange its maximum m. The sum l
stays four partial sums. Any m gives the same result up to rounding, unless P overflows or
underflows. A row keeps its m while the largest P is at most 2^8 and at most the row's sum so far: a
key whose P is rounded then has at most half the weight of its row, as with the true maximum."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.layouts import (
    lane_sum_layout,
    mma_layout,
    operand_layout,
    per_row_layout,
)
from canon.fast.kernels.gluon.ptx import rescale_rows, round_and_keep
from canon.fast.kernels.gluon.softcap import factor_of_capped
from canon.fast.kernels.gluon.tile_ring import aggregate
from canon.fast.kernels.triton.blocks import LN2


@aggregate
class SoftmaxState:
    """The state of a warpgroup's rows between two tiles.

    o (M, DV_PAD)   sum of P V over all tiles but the last; o * shrink is relative to m
    p (M, BN)       P of the last tile, as an MMA operand
    m (M)           row maximum of the scores in base 2, or an older one
    l (M, 4)        sums of P, by lane
    excess (M, 4)   sums of P minus rounded P (`stale_maximum`), or a scalar 0
    shrink (M)      factor that o still needs because m rose in the last tile"""

    o: gl.tensor
    p: gl.tensor
    m: gl.tensor
    l: gl.tensor
    excess: gl.tensor
    shrink: gl.tensor


@gluon.jit
def empty_state(wg):
    """Return the state before the first work tile."""
    return SoftmaxState(
        gl.zeros([wg.M, wg.DV_PAD], gl.float32, mma_layout(wg.DV_PAD)),
        gl.zeros([wg.M, wg.BN], wg.q.tiles.dtype, operand_layout(wg.DV_PAD)),
        gl.zeros([wg.M], gl.float32, per_row_layout(wg.BN)),
        gl.zeros([wg.M, 4], gl.float32, lane_sum_layout()),
        gl.zeros([wg.M, 4], gl.float32, lane_sum_layout())
        if wg.c.STALE_MAXIMUM
        else gl.to_tensor(0.0),
        gl.full([wg.M], 1.0, gl.float32, per_row_layout(wg.BN)),
    )


@gluon.jit
def split_by_lane(x):
    """Reshape (M, N) to (M, 2, N / 16, 4, 2). Axis 3 is the lane of the quad."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 16, 4, 2])


@gluon.jit
def row_maximum(x):
    """Return the maximum of each row, by four independent chains in a lane."""
    chains = gl.max(split_by_lane(x), 2)
    return gl.convert_layout(gl.max(gl.max(gl.max(chains, 1), 2), 1), per_row_layout(x.shape[1]))


@gluon.jit
def finite_or_zero(m):
    """Return m with 0 for -inf (no visible key): -inf - -inf is NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def highest_kept(m, l, BN: gl.constexpr):
    """Return the largest new maximum with which a row keeps its m."""
    total = gl.convert_layout(gl.sum(l, 1), per_row_layout(BN))
    # floor(log2(total)): put its exponent bits into the mantissa of 2^23, subtract 2^23 and the
    # bias 127. A log2 would occupy the unit for exponentials.
    power = (total.to(gl.int32, bitcast=True) >> 23 | 0x4B000000).to(gl.float32, bitcast=True) - (
        2.0**23 + 127.0
    )
    return gl.maximum(m, m + gl.minimum(power, 8.0))


@gluon.jit
def powers(s, m, scale_log2, SOFTCAP: gl.constexpr):
    """Return P = 2^(s scale_log2 - m)."""
    return gl.exp2(s * factor_of_capped(scale_log2, SOFTCAP) - gl.expand_dims(m, 1))


@gluon.jit
def lane_sum(x):
    """Return the sums by lane (M, 4), by four independent chains."""
    chains = gl.sum(split_by_lane(x), 2)
    return gl.convert_layout(gl.sum(gl.sum(chains, 1), 2), lane_sum_layout())


@gluon.jit
def exponentials(s, m, wg, KEEP: gl.constexpr = False):
    """Return P as an MMA operand, and its sums by lane. KEEP: `round_and_keep`."""
    p = powers(s, m, wg.scale_log2, wg.c.SOFTCAP)
    sums = lane_sum(p)
    if KEEP:
        p = round_and_keep(p, wg.q.tiles, wg.INDEX)
    else:
        p = p.to(wg.q.tiles.dtype)
    return gl.convert_layout(p, operand_layout(wg.DV_PAD)), sums


@gluon.jit
def rescale_sums(l, shrink):
    """Return l (M, 4) with its rows multiplied by ``shrink`` (M)."""
    return l * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, lane_sum_layout())), 1)


@gluon.jit
def rescale_output(o, shrink):
    """Return o with its rows multiplied by ``shrink`` (M)."""
    return rescale_rows(o, gl.expand_dims(gl.convert_layout(shrink, per_row_layout(o.shape[1])), 1))


# m is rounded to float32, but not s scale_log2 in P = 2^(s scale_log2 - m) (FMA). Up to 2^24 the
# rounding is at most 1/2: a factor of at most 2^0.5.
LARGEST_MAXIMUM = gl.constexpr(2.0**24)


@gluon.jit
def results_of_sums(m, l, divisor, ROWS: gl.constexpr):
    """Return the factors of O, 0 for fully masked rows, and lse; NaN for numbers out of range."""
    divisor = gl.convert_layout(gl.sum(divisor, 1), ROWS)
    l = gl.convert_layout(gl.sum(l, 1), ROWS)
    masked = (l == 0.0) & (m == float("-inf"))
    in_range = (gl.abs(m) <= LARGEST_MAXIMUM) & (l > 0.0) & (l < float("inf"))
    lse = (m + gl.log2(gl.where(in_range, l, 1.0))) * LN2
    lse = gl.where(masked, float("-inf"), gl.where(in_range, lse, float("nan")))
    return gl.where(masked, 0.0, gl.where(in_range, 1.0 / divisor, float("nan"))), lse
