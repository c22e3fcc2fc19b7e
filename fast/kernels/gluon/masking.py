"""Mask a tile by the band of its span: rows [row start, row stop), columns [column start, column stop), lo <= column - row <=
hi.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.hoisting import opaque_zero
from canon.fast.kernels.gluon.layouts import per_row_layout
from canon.fast.kernels.gluon.ptx import keep_between
from canon.fast.kernels.gluon.tile_queue import COLUMN_START, COLUMN_STOP, HI, LO, ROW_START, ROW_STOP


@gluon.jit
def mask_hidden(x, work, span, first, column, HIDDEN: gl.constexpr, PACK: gl.constexpr):
    """Return x with HIDDEN (0 or -inf) in hidden cells. Row r is token ``first`` + r // PACK. Column 0 is number ``column``."""
    row_start, row_stop = gl.load(work + span + ROW_START), gl.load(work + span + ROW_STOP)
    start, stop = gl.load(work + span + COLUMN_START), gl.load(work + span + COLUMN_STOP)
    lo, hi = gl.load(work + span + LO), gl.load(work + span + HI)
    rows = first + (gl.arange(0, x.shape[0], per_row_layout(x.shape[1])) ^ opaque_zero(stop)) // PACK
    left = gl.maximum(rows + lo, start) - column  # a row sees columns left <= j < right
    right = gl.minimum(rows + hi + 1, stop) - column
    right = gl.where((rows >= row_start) & (rows < row_stop), right, 0)
    return keep_between(x, gl.expand_dims(left, 1), gl.expand_dims(right, 1), HIDDEN)
