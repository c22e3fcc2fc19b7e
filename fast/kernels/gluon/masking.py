"""Mask a tile by the band of its span: rows [row start, row stop), columns [column start, column stop), lo <= column - row <=
hi.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.layouts import per_column_layout, per_row_layout


@gluon.jit
def mask_hidden(x, work, span, first, column, hidden, PACK: gl.constexpr):
    """Return x with ``hidden`` in the hidden cells. Row r is token ``first`` + r // PACK; columns begin at ``column``."""
    row_start, row_stop = gl.load(work + span + 2), gl.load(work + span + 3)
    start, stop = gl.load(work + span + 4), gl.load(work + span + 5)
    lo, hi = gl.load(work + span + 6), gl.load(work + span + 7)
    zero = gl.minimum(
        stop, 0
    )  # always 0, but opaque: the compiler would hoist the ranges below and keep them in registers
    rows = first + (gl.arange(0, x.shape[0], per_row_layout(x.shape[1])) ^ zero) // PACK
    left = gl.maximum(rows + lo, start) - column  # a row sees columns left <= j < right
    right = gl.minimum(rows + hi + 1, stop) - column
    right = gl.where((rows >= row_start) & (rows < row_stop), right, 0)
    j = gl.expand_dims(gl.arange(0, x.shape[1], per_column_layout(x.shape[1])), 0)
    # Only bits 1 and 2 of a column depend on the lane, so no register holds a column number.
    lane = (j & 6) ^ zero
    left, right = gl.expand_dims(left, 1) - lane, gl.expand_dims(right, 1) - lane
    return gl.where(((j & ~6) >= left) & ((j & ~6) < right), x, hidden)
