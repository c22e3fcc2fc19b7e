"""The delta kernel. delta = rowsum(dout * out) - dlse is the row statistic that the backward needs besides lse.

Both statistics are (b, h, t). The kernels for dq, dk and dv use p = exp(s - lse) and ds = p * (dp - delta).
Traffic: out and dout are read once; lse (and dlse) are read and delta is written, one value a row.

Source: Tri Dao, FlashAttention-2 (2023), algorithm 2, line 4 (https://arxiv.org/abs/2307.08691).
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import cta_rows, head_pointer, load_rows, statistic_head_pointer, tile_offsets


@triton.jit
def row_dot(
    out_head,
    dout_head,
    first,
    active,
    out_strides,
    dout_strides,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """Return rowsum(dout * out) of BM rows of one head from ``first`` on; 0 in rows that are not ``active``."""
    out_offset, dout_offset = tile_offsets(out_strides, BM, D_PAD, ALIGN), tile_offsets(dout_strides, BM, D_PAD, ALIGN)
    out_tile = load_rows(out_head, out_offset, first, out_strides[1], active, D, D_PAD, ALIGN).to(ACC)
    dout_tile = load_rows(dout_head, dout_offset, first, dout_strides[1], active, D, D_PAD, ALIGN).to(ACC)
    return tl.sum(out_tile * dout_tile, 1)


@triton.jit(
    do_not_specialize=[
        "tokens", "heads", "batch_heads",
        "lse_stride_b", "lse_stride_h", "dlse_stride_b", "dlse_stride_h", "delta_stride_b", "delta_stride_h",
    ],
    do_not_specialize_on_alignment=["lse", "dlse", "delta"],
)  # fmt: skip
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
    """Write delta (b, h, t) = rowsum(dout * out) - dlse, and 0 in fully masked rows (lse = -inf)."""
    first, batch, head = cta_rows(heads, batch_heads, BM)
    rows = first + tl.arange(0, BM)
    valid = rows < tokens
    lse_row = tl.load(
        statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + rows, mask=valid, other=0.0
    )
    active = valid & (lse_row > float("-inf"))
    out_head = head_pointer(out, batch, head, out_strides, ALIGN)
    dout_head = head_pointer(dout, batch, head, dout_strides, ALIGN)
    total = row_dot(out_head, dout_head, first, active, out_strides, dout_strides, D, D_PAD, ALIGN, ACC, BM)
    if HAS_DLSE:
        dlse_rows = statistic_head_pointer(dlse, batch, head, dlse_stride_b, dlse_stride_h) + rows
        total -= tl.load(dlse_rows, mask=active, other=0.0).to(ACC)
    tl.store(statistic_head_pointer(delta, batch, head, delta_stride_b, delta_stride_h) + rows, total, mask=valid)
