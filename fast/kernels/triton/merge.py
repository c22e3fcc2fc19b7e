"""The merge kernel: attention over two disjoint parts of the keys becomes one, in a single pass over memory.

    lse' = log(exp(lse) + exp(other_lse))        out' = exp(lse - lse') out + exp(other_lse - lse') other_out

Each element is read and written once, and out may be written in place: a ring's running result costs
3 x 4 bytes of traffic per float32 element and hop.

Source: FlashAttention-2 (Tri Dao, 2023), section 2.3.1.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    head_pointer,
    line_pointer,
    load_some_rows,
    offsets,
    row_pointers,
    store_rows,
)


@triton.jit(do_not_specialize=["tokens", "heads", "lines"])
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
    lines,
    out_strides,
    lse_strides,
    other_out_strides,
    other_lse_strides,
    new_out_strides,
    new_lse_strides,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """new_out (b, t, h, dv) and new_lse (b, h, t); a part with lse -inf has no weight and its out is not read.

    INDEXED: the other part is of ``tokens`` rows of out alone, which stand in ``table`` (int64); the rest is left as it is.
    """
    first = tl.program_id(0) // lines * BM
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    rows = first + tl.arange(0, BM)
    here, other_line = rows < tokens, tl.cast(rows, tl.int64)
    line = tl.load(table + rows, mask=here, other=0) if INDEXED else other_line
    a = tl.load(line_pointer(lse, batch, head, lse_strides) + line * lse_strides[2], mask=here, other=0.0)
    other = line_pointer(other_lse, batch, head, other_lse_strides)
    b = tl.load(other + other_line * other_lse_strides[2], mask=here, other=0.0)
    a, b = a.to(ACC), b.to(ACC)
    a_blind, b_blind = a == float("-inf"), b == float("-inf")
    top = tl.maximum(a, b)
    top = tl.where(a_blind & b_blind, 0.0, top)
    a_weight, b_weight = tl.exp(a - top), tl.exp(b - top)
    total = a_weight + b_weight
    merged = tl.where(a_blind & b_blind, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
    total = tl.where(total == 0.0, 1.0, total)

    y = head_pointer(other_out, batch, head, other_out_strides, UNIT)
    inside = tl.arange(0, D_PAD)[None, :] < D
    if INDEXED:
        x = row_pointers(out, batch, head, line, out_strides, D_PAD, UNIT)
        x = tl.load(x, mask=(here & (a_blind == 0))[:, None] & inside, other=0.0)
    else:
        x = head_pointer(out, batch, head, out_strides, UNIT)
        x = load_some_rows(
            x, offsets(out_strides, BM, D_PAD, UNIT), first, out_strides[1], here & (a_blind == 0), D, D_PAD, UNIT
        )
    y = load_some_rows(
        y, offsets(other_out_strides, BM, D_PAD, UNIT), first, other_out_strides[1], here & (b_blind == 0), D, D_PAD
    )
    both = x.to(ACC) * (a_weight / total)[:, None] + y.to(ACC) * (b_weight / total)[:, None]
    if INDEXED:
        target = row_pointers(new_out, batch, head, line, new_out_strides, D_PAD, UNIT)
        tl.store(target, both.to(new_out.dtype.element_ty), mask=here[:, None] & inside)
    else:
        new_head = head_pointer(new_out, batch, head, new_out_strides, UNIT)
        store_rows(
            new_head, offsets(new_out_strides, BM, D_PAD, UNIT), first, new_out_strides[1], here, both, D, D_PAD, UNIT
        )
    tl.debug_barrier()  # new_lse may be lse: one warp writes all rows', which the others must have read by then
    tl.store(line_pointer(new_lse, batch, head, new_lse_strides) + line * new_lse_strides[2], merged, mask=here)
