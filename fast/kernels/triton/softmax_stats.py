"""The delta kernel: delta = rowsum(dout * out) - dlse, which the backward needs besides lse.

Source: Tri Dao, FlashAttention-2 (2023), algorithm 2, line 4 (https://arxiv.org/abs/2307.08691)."""

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
def row_dot(
    out, dout, batch, head, strides, first, active, D: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return rowsum(dout * out) of the rows from ``first`` on, 0 where not ``active``."""
    out_rows = rows_of(out, batch, head, strides[0], active.shape[0], D_PAD, ALIGN)
    dout_rows = rows_of(dout, batch, head, strides[1], active.shape[0], D_PAD, ALIGN)
    out_tile = load_rows(out_rows, first, active, D, D_PAD, ALIGN).to(ACC)
    dout_tile = load_rows(dout_rows, first, active, D, D_PAD, ALIGN).to(ACC)
    return tl.sum(out_tile * dout_tile, 1)


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
    D_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """Write delta (b, h, t) = rowsum(dout * out) - dlse, and 0 where lse is -inf."""
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads, BM)
    lse_row = tl.load(
        statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + rows,
        mask=valid,
        other=0.0,
    )
    active = valid & (lse_row > float("-inf"))
    strides = out_strides, dout_strides
    total = row_dot(out, dout, batch, head, strides, first, active, D, D_PAD, ALIGN, ACC)
    if HAS_DLSE:
        dlse_rows = statistic_head_pointer(dlse, batch, head, dlse_stride_b, dlse_stride_h) + rows
        total -= tl.load(dlse_rows, mask=active, other=0.0).to(ACC)
    tl.store(
        statistic_head_pointer(delta, batch, head, delta_stride_b, delta_stride_h) + rows,
        total,
        mask=valid,
    )
