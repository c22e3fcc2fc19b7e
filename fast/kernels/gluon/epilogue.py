"""Write accumulators from registers to global memory, in whole 32-byte sectors."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from canon.fast.kernels.gluon.hoisting import opaque_zero
from canon.fast.kernels.gluon.layouts import mma_layout, store_layout
from canon.fast.kernels.gluon.ptx import transpose_words


@gluon.jit
def row_offset(batch, row, head, strides):
    """Return the 64-bit offset of a row of (b, t, h, width)."""
    return (
        batch.to(gl.int64) * strides[0]
        + row.to(gl.int64) * strides[1]
        + head.to(gl.int64) * strides[2]
    )


@gluon.jit
def even_strides(tokens, stride_t, stride_h):
    """Return 64-bit strides (b, t, h); that of b is ``tokens`` token strides."""
    return tokens.to(gl.int64) * stride_t, stride_t, stride_h


@gluon.jit
def to_store_layout(x):
    """Return x (two-byte, `mma_layout`) in `store_layout`: a lane writes 16 bytes at a time."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    y = transpose_words(x).reshape([M, N // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(y, store_layout(N), assert_trivial=True)


@gluon.constexpr_function
def columns_per_store(dtype):
    """Return how many columns a lane writes at a time."""
    return 8 if dtype.primitive_bitwidth == 16 else 2


@gluon.jit
def store_tile(
    start, x, batch_head, left, stride_t, stride_h, WIDTH: gl.constexpr, PACK: gl.constexpr
):
    """Write the first ``left`` tokens of x, WIDTH columns. ``batch_head``: for `opaque_zero`."""
    UNIT: gl.constexpr = columns_per_store(start.dtype.element_ty)
    LAYOUT: gl.constexpr = store_layout(x.shape[1]) if UNIT == 8 else mma_layout(x.shape[1])
    x = x.to(start.dtype.element_ty)
    if UNIT == 8:
        x = to_store_layout(x)
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    zero = opaque_zero(batch_head)
    d = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    lane = gl.max_constancy(gl.multiple_of((d & (3 * UNIT)) ^ zero, [1, UNIT]), [1, UNIT])
    rest = gl.max_contiguous(gl.multiple_of(d & ~(3 * UNIT), [1, UNIT]), [1, UNIT])
    r = r ^ zero
    offset = gl.expand_dims(r // PACK * stride_t + r % PACK * stride_h, 1)
    keep = gl.expand_dims(r // PACK < left, 1)
    if x.shape[1] > WIDTH:
        keep = keep & (d < WIDTH)
    gl.store(start + offset + lane + rest, x, mask=keep)
