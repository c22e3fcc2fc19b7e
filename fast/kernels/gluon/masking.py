"""Mask a tile by the band of its span: rows [row start, row stop), columns [column start, column stop), lo <= column - row <=
hi.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.hoisting import opaque_zero
from canon.fast.kernels.gluon.layouts import per_column_layout, per_row_layout
from canon.fast.kernels.gluon.tile_queue import COLUMN_START, COLUMN_STOP, HI, LO, ROW_START, ROW_STOP, SPAN


@gluon.jit
def mask_hidden(x, work, span, first, column, hidden, PACK: gl.constexpr, KEY_ORDER: gl.constexpr):
    """Return x with ``hidden`` in the hidden cells. Row r is token ``first`` + r // PACK; columns begin at ``column``.

    KEY_ORDER: the span may be a chained one (`key_order`).
    """
    if KEY_ORDER:
        return _hide_outside_bands(x, work, span, first, column, hidden, PACK)
    else:
        left, right, zero = visible_columns(x, work, span, first, column, PACK)
        return _hide(x, left, right, zero, hidden, False)


@gluon.jit
def _hide_outside_bands(x, work, span, first, column, hidden, PACK: gl.constexpr):
    """Hide the cells outside all bands of a span, which come in the order of their keys: gap after gap."""
    number = gl.load(work + span + ROW_STOP)
    band = gl.where(number < 0, gl.load(work + span + ROW_START), span)
    reach = gl.zeros([x.shape[0]], gl.int32, per_row_layout(x.shape[1]))
    for at in range(band, band + SPAN * gl.maximum(-number, 1), SPAN):
        left, right, zero = visible_columns(x, work, at, first, column, PACK)
        sees = right > gl.maximum(left, 0)
        x = _hide(x, reach, gl.where(sees, left, reach), zero, hidden, True)
        reach = gl.where(sees, right, reach)
    return _hide(
        x, reach, gl.full_like(reach, x.shape[1]), opaque_zero(gl.load(work + band + COLUMN_STOP)), hidden, True
    )


@gluon.jit
def visible_columns(x, work, band, first, column, PACK: gl.constexpr):
    """Return (left, right, opaque zero): in this band, each row of x sees the columns left <= j < right from ``column`` on."""
    row_start, row_stop = gl.load(work + band + ROW_START), gl.load(work + band + ROW_STOP)
    start, stop = gl.load(work + band + COLUMN_START), gl.load(work + band + COLUMN_STOP)
    lo, hi = gl.load(work + band + LO), gl.load(work + band + HI)
    zero = opaque_zero(stop)
    rows = first + (gl.arange(0, x.shape[0], per_row_layout(x.shape[1])) ^ zero) // PACK
    left = gl.maximum(rows + lo, start) - column
    right = gl.minimum(rows + hi + 1, stop) - column
    return left, gl.where((rows >= row_start) & (rows < row_stop), right, 0), zero


@gluon.jit
def _hide(x, left, right, zero, hidden, INSIDE: gl.constexpr):
    """Return x with ``hidden`` in the columns left <= j < right of each row, or in all others unless INSIDE."""
    j = gl.expand_dims(gl.arange(0, x.shape[1], per_column_layout(x.shape[1])), 0)
    # Only bits 1 and 2 of a column depend on the lane, so no register holds a column number.
    lane = (j & 6) ^ zero
    left, right = gl.expand_dims(left, 1) - lane, gl.expand_dims(right, 1) - lane
    between = ((j & ~6) >= left) & ((j & ~6) < right)
    return gl.where(between, hidden, x) if INSIDE else gl.where(between, x, hidden)
