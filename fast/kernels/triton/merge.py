"""The merge kernel: `merge` in one pass over memory, possibly in place."""

import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    CTA_ROWS,
    ROW_NUMBERS,
    cta_rows,
    kernel,
    load_rows,
    load_tile,
    padded,
    row_pointers,
    rows_of,
    statistic_head_pointer,
    store_tile,
)


@kernel(*ROW_NUMBERS, statistics=("lse", "other_lse", "new_lse"), pointers=("table",))
def merge_kernel(
    out,
    lse,
    other_out,
    other_lse,
    new_out,
    new_lse,
    table,
    tokens,
    heads,
    batch_heads,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    other_out_strides,
    other_lse_stride_b,
    other_lse_stride_h,
    new_out_strides,
    new_lse_stride_b,
    new_lse_stride_h,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """Write new_out and new_lse. A part is not read where its lse is -inf. INDEXED: row i of the
    other part belongs to token ``table[i]`` (int64); others stay unchanged.
    """
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    other_token = tl.cast(rows, tl.int64)
    token = tl.load(table + rows, mask=valid, other=0) if INDEXED else other_token
    a = tl.load(
        statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + token,
        mask=valid,
        other=0.0,
    )
    b = (
        statistic_head_pointer(other_lse, batch, head, other_lse_stride_b, other_lse_stride_h)
        + other_token
    )
    b = tl.load(b, mask=valid, other=0.0)
    a, b = a.to(ACC), b.to(ACC)
    a_masked, b_masked = a == float("-inf"), b == float("-inf")
    top = tl.maximum(a, b)
    top = tl.where(a_masked & b_masked, 0.0, top)
    a_weight, b_weight = tl.exp(a - top), tl.exp(b - top)
    total = a_weight + b_weight
    merged = tl.where(
        a_masked & b_masked, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total))
    )
    total = tl.where(total == 0.0, 1.0, total)

    other_rows = rows_of(other_out, batch, head, other_out_strides, CTA_ROWS, D, ALIGN)
    in_width = tl.arange(0, padded(D))[None, :] < D
    if INDEXED:
        x = row_pointers(out, batch, head, token, out_strides, D, ALIGN)
        x = tl.load(x, mask=(valid & (a_masked == 0))[:, None] & in_width, other=0.0)
    else:
        read = valid & (a_masked == 0)
        x = load_tile(out, batch, head, out_strides, first, read, D, ALIGN)
    y = load_rows(other_rows, first, valid & (b_masked == 0), D)
    both = x.to(ACC) * (a_weight / total)[:, None] + y.to(ACC) * (b_weight / total)[:, None]
    if INDEXED:
        target = row_pointers(new_out, batch, head, token, new_out_strides, D, ALIGN)
        tl.store(target, both.to(new_out.dtype.element_ty), mask=valid[:, None] & in_width)
    else:
        store_tile(new_out, batch, head, new_out_strides, first, valid, both, D, ALIGN)
    # new_lse may be lse: one warp writes all rows, so all warps must have read them
    tl.debug_barrier()
    new_rows = (
        statistic_head_pointer(new_lse, batch, head, new_lse_stride_b, new_lse_stride_h) + token
    )
    tl.store(new_rows, merged, mask=valid)
