"""The delta kernel: delta = rowsum(dout * out) - dlse, for the backward."""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    ROW_NUMBERS,
    cta_rows,
    kernel,
    load_rows,
    rows_of,
    statistic_head_pointer,
)


@triton.jit
def lse_and_delta(
    out, dout, lse_head, dlse, batch, head, strides, first, rows, valid, HAS_DLSE, D, ALIGN, ACC
):
    """Return lse and delta, 0 where lse is -inf."""
    lse_row = tl.load(lse_head + rows, mask=valid, other=0.0)
    active = valid & (lse_row > float("-inf"))
    out_rows = rows_of(out, batch, head, strides[0], active.shape[0], D, ALIGN)
    dout_rows = rows_of(dout, batch, head, strides[1], active.shape[0], D, ALIGN)
    out_tile = load_rows(out_rows, first, active, D, ALIGN).to(ACC)
    dout_tile = load_rows(dout_rows, first, active, D, ALIGN).to(ACC)
    delta = tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        dlse_head = statistic_head_pointer(dlse, batch, head, strides[2][0], strides[2][1])
        delta -= tl.load(dlse_head + rows, mask=active, other=0.0).to(ACC)
    return lse_row, delta


@kernel(*ROW_NUMBERS, statistics=("lse", "dlse", "delta"))
def delta_kernel(
    out,
    dout,
    lse,
    dlse,
    delta,
    tokens,
    heads,
    batch_heads,
    out_strides,
    dout_strides,
    lse_stride_b,
    lse_stride_h,
    dlse_stride_b,
    dlse_stride_h,
    delta_stride_b,
    delta_stride_h,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write delta = rowsum(dout * out) - dlse, and 0 where lse is -inf."""
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    lse_head = statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h)
    strides = out_strides, dout_strides, (dlse_stride_b, dlse_stride_h)
    _, total = lse_and_delta(
        out, dout, lse_head, dlse, batch, head, strides, first, rows, valid, HAS_DLSE, D, ALIGN,
        ACC,
    )  # fmt: skip
    delta_head = statistic_head_pointer(delta, batch, head, delta_stride_b, delta_stride_h)
    tl.store(delta_head + rows, total, mask=valid)
