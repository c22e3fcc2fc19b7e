"""Mask a tile by the band of its span: rows, columns, lo <= column - row <= hi."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.hoisting import opaque_zero
from canon.fast.kernels.gluon.layouts import per_column_layout, per_row_layout
from canon.fast.kernels.gluon.ptx import keep_between
from canon.fast.kernels.gluon.tile_queue import (
    COLUMN_START,
    COLUMN_STOP,
    HI,
    LO,
    ROW_START,
    ROW_STOP,
    SPAN,
)


@gluon.jit
def mask_hidden(
    x,
    work,
    span,
    first,
    column,
    HIDDEN: gl.constexpr,
    PACK: gl.constexpr,
    KEY_ORDER: gl.constexpr = False,
):
    """Return x with HIDDEN (0 or -inf) in hidden cells. Row r is token ``first`` + r // PACK."""
    band = span
    if KEY_ORDER:
        number = gl.load(work + span + ROW_STOP)
        band = gl.where(number < 0, gl.load(work + span + ROW_START), span)
    left, right = visible_columns(x, work, band, first, column, PACK)
    if KEY_ORDER:
        end = band + SPAN * gl.maximum(-number, 1)
        x, left, right = _hide_gaps(
            x, left, right, work, band + SPAN, end, first, column, HIDDEN, PACK
        )
    return keep_between(x, gl.expand_dims(left, 1), gl.expand_dims(right, 1), HIDDEN)


@gluon.jit
def _hide_gaps(
    x, left, right, work, band, end, first, column, HIDDEN: gl.constexpr, PACK: gl.constexpr
):
    """Hide the cells between the bands of a chained span. Return x and new bounds."""
    for at in range(band, end, SPAN):
        next_left, next_right = visible_columns(x, work, at, first, column, PACK)
        seen, sees = right > gl.maximum(left, 0), next_right > gl.maximum(next_left, 0)
        x = _hide_between(
            x, right, gl.where(sees, next_left, right), gl.load(work + at + COLUMN_STOP), HIDDEN
        )
        left = gl.where(seen, left, next_left)
        right = gl.where(sees, next_right, right)
    return x, left, right


@gluon.jit
def visible_columns(x, work, band, first, column, PACK: gl.constexpr):
    """Return (left, right): a row sees the columns left <= j < right from ``column`` on."""
    row_start, row_stop = gl.load(work + band + ROW_START), gl.load(work + band + ROW_STOP)
    start, stop = gl.load(work + band + COLUMN_START), gl.load(work + band + COLUMN_STOP)
    lo, hi = gl.load(work + band + LO), gl.load(work + band + HI)
    rows = (
        first + (gl.arange(0, x.shape[0], per_row_layout(x.shape[1])) ^ opaque_zero(stop)) // PACK
    )
    left = gl.maximum(rows + lo, start) - column
    right = gl.minimum(rows + hi + 1, stop) - column
    return left, gl.where((rows >= row_start) & (rows < row_stop), right, 0)


@gluon.jit
def _hide_between(x, left, right, loaded, HIDDEN: gl.constexpr):
    """Return x with HIDDEN in the columns left <= j < right. ``loaded``: for `opaque_zero`."""
    j = gl.expand_dims(gl.arange(0, x.shape[1], per_column_layout(x.shape[1])), 0)
    # Only bits 1 and 2 of a column depend on the lane, so no register holds a column number.
    lane = (j & 6) ^ opaque_zero(loaded)
    left, right = gl.expand_dims(left, 1) - lane, gl.expand_dims(right, 1) - lane
    return gl.where(((j & ~6) >= left) & ((j & ~6) < right), HIDDEN, x)
