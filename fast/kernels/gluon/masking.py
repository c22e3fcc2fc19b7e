"""Mask a tile by the band of its span: rows [row start, row stop), columns [column start, column stop), lo <= column - row <=
hi.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.hoisting import opaque_zero
from canon.fast.kernels.gluon.layouts import per_column_layout, per_row_layout
from canon.fast.kernels.gluon.ptx import keep_between
from canon.fast.kernels.gluon.tile_queue import COLUMN_START, COLUMN_STOP, HI, LO, ROW_START, ROW_STOP, SPAN


@gluon.jit
def mask_hidden(x, work, span, first, column, HIDDEN: gl.constexpr, PACK: gl.constexpr, KEY_ORDER: gl.constexpr):
    """Return x with HIDDEN (0 or -inf) in the hidden cells. Row r is token ``first`` + r // PACK; columns begin at ``column``.

    KEY_ORDER: the span may be a chained one (`key_order`).
    """
    if KEY_ORDER:
        bands = gl.load(work + span + ROW_STOP)
        if bands < 0:
            x = _hide_outside_chain(x, work, gl.load(work + span + ROW_START), -bands, first, column, HIDDEN, PACK)
        else:
            x = _hide_outside_band(x, work, span, first, column, HIDDEN, PACK)
    else:
        x = _hide_outside_band(x, work, span, first, column, HIDDEN, PACK)
    return x


@gluon.jit
def _hide_outside_band(x, work, band, first, column, HIDDEN: gl.constexpr, PACK: gl.constexpr):
    left, right = _visible_columns(x, work, band, first, column, PACK)
    return keep_between(x, gl.expand_dims(left, 1), gl.expand_dims(right, 1), HIDDEN)


@gluon.jit
def _visible_columns(x, work, band, first, column, PACK: gl.constexpr):
    """Return (left, right): in this band, each row of x sees the columns left <= j < right from ``column`` on."""
    row_start, row_stop = gl.load(work + band + ROW_START), gl.load(work + band + ROW_STOP)
    start, stop = gl.load(work + band + COLUMN_START), gl.load(work + band + COLUMN_STOP)
    lo, hi = gl.load(work + band + LO), gl.load(work + band + HI)
    rows = first + (gl.arange(0, x.shape[0], per_row_layout(x.shape[1])) ^ opaque_zero(stop)) // PACK
    left = gl.maximum(rows + lo, start) - column
    right = gl.minimum(rows + hi + 1, stop) - column
    return left, gl.where((rows >= row_start) & (rows < row_stop), right, 0)


@gluon.jit
def _hide_outside_chain(x, work, band, bands, first, column, HIDDEN: gl.constexpr, PACK: gl.constexpr):
    """Hide the cells that no band has of the ``bands`` from the offset ``band`` on. Two words hold a row's visible columns."""
    low = gl.zeros([x.shape[0]], gl.int64, per_row_layout(x.shape[1]))
    high = low
    for at in range(band, band + bands * SPAN, SPAN):
        left, right = _visible_columns(x, work, at, first, column, PACK)
        low |= _bits_from(left) & ~_bits_from(gl.maximum(left, right))
        high |= _bits_from(left - 64) & ~_bits_from(gl.maximum(left, right) - 64)
    j = gl.expand_dims(gl.arange(0, x.shape[1], per_column_layout(x.shape[1])), 0)
    word = gl.where(j < 64, gl.expand_dims(low, 1), gl.expand_dims(high, 1))
    return gl.where((word >> (j & 63).to(gl.int64)) & 1 != 0, x, HIDDEN)


@gluon.jit
def _bits_from(first):
    """Return int64 words with the bits from ``first`` on. A shift by 64 is undefined."""
    ones = gl.full_like(first, -1).to(gl.int64)
    return gl.where(first >= 64, 0, ones << gl.minimum(gl.maximum(first, 0), 63).to(gl.int64))
