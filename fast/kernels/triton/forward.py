"""The forward kernel: one program per (tile of queries, head) keeps a running softmax over the spans of its work table.

Base 2: the scores are multiplied by scale * log2(e) inside the exponent (one FMA), lse is written as a natural logarithm.
The maximum m is kept scaled and rounded; a row whose m is beyond `highest` gets NaN.
Partial spans first, then full ones, in two loops, so that the loop over full tiles has no compare.

Source: FlashAttention-2 (Tri Dao, 2023), algorithm 1; exp2 and the loop split as in Triton's attention tutorial.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    head_pointer,
    line_pointer,
    load_some_rows,
    load_whole,
    offsets,
    program_work,
    seen_cells,
    seen_columns,
    store_rows,
    whole_source,
)


@triton.constexpr_function
def highest(accumulate):
    """Return the largest m that is rounded by at most 1/2, so that P of the largest score stays between 2^-1 and 2."""
    return 2.0**53 if accumulate == tl.float64 else 2.0**24


@triton.jit
def softmax_step(q, k, v, m, l, acc, scale, seen, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Take one tile of keys into the running maximum m (scaled, in base 2), the sum l and the output acc."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_use = m_new
    if MASKED:  # a row that has seen no key yet: exp2(-inf - 0) = 0, where -inf - -inf would be NaN
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_use[:, None])
    shrink = tl.exp2(m - m_use)  # of the very numbers that P was made with: m is rounded, the product above may not be
    l = l * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION, out_dtype=acc.dtype)
    return m_new, l, acc


@triton.jit(do_not_specialize=["tile_count", "width", "heads"])
def forward_kernel(
    q,
    k,
    v,
    k_whole,
    v_whole,
    out,
    lse,
    tiles,
    spans,
    scale_log2: "fp64",  # > 0
    tile_count,
    heads,
    width,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    SIGN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTIAL_BN: tl.constexpr,
):
    """Write out (b, t, h, dv) and natural lse (b, h, t). Rows that see no key get 0 and -inf."""
    tile, batch, head = program_work(tiles, tile_count, heads, width)
    first, stop = tl.load(tile), tl.load(tile + 1)
    partial, full, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale = tl.full((), scale_log2, ACC)
    k_head = head_pointer(k, batch, head // GROUP, k_strides, UNIT)
    v_head = head_pointer(v, batch, head // GROUP, v_strides, UNIT)
    k_offset = offsets(k_strides, PARTIAL_BN, D_PAD, UNIT)
    v_offset = offsets(v_strides, PARTIAL_BN, DV_PAD, UNIT)
    k_source = whole_source(k_whole, batch, head // GROUP, k_strides, BN, D_PAD, UNIT, TMA)
    v_source = whole_source(v_whole, batch, head // GROUP, v_strides, BN, DV_PAD, UNIT, TMA)
    rows = first + tl.arange(0, BM)
    here = rows < stop
    q_head = head_pointer(q, batch, head, q_strides, UNIT)
    q_offset = offsets(q_strides, BM, D_PAD, UNIT)
    q_tile = load_some_rows(q_head, q_offset, first, q_strides[1], here, D, D_PAD, UNIT)
    if SIGN != 1:  # a scale <= 0 turns the maximum round: give its sign to q
        q_tile = (q_tile.to(ACC) * SIGN).to(q_tile.dtype)
    m = tl.full([BM], float("-inf"), ACC)
    l = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, DV_PAD], ACC)

    for index in range(partial, full):
        span = spans + index * 8
        left, right = seen_columns(span, rows)
        begin, key_start, key_stop = tl.load(span), tl.load(span + 4), tl.load(span + 5)
        for j in tl.range(begin, begin + tl.load(span + 1) * PARTIAL_BN, PARTIAL_BN, num_stages=PARTIAL_STAGES):
            keys = j + tl.arange(0, PARTIAL_BN)
            inside = (keys >= key_start) & (keys < key_stop)  # what no query sees may be NaN: load 0 there
            k_tile = load_some_rows(k_head, k_offset, j, k_strides[1], inside, D, D_PAD, UNIT)
            v_tile = load_some_rows(v_head, v_offset, j, v_strides[1], inside, DV, DV_PAD, UNIT)
            seen = seen_cells(left - j, right - j, PARTIAL_BN)
            m, l, acc = softmax_step(q_tile, k_tile, v_tile, m, l, acc, scale, seen, True, PRECISION)

    for index in range(full, end):
        begin = tl.load(spans + index * 8)
        for j in range(begin, begin + tl.load(spans + index * 8 + 1) * BN, BN):
            k_tile = load_whole(k_source, batch, j, 0, k_strides, BN, D, D_PAD, UNIT, TMA)
            v_tile = load_whole(v_source, batch, j, 0, v_strides, BN, DV, DV_PAD, UNIT, TMA)
            m, l, acc = softmax_step(q_tile, k_tile, v_tile, m, l, acc, scale, None, False, PRECISION)

    blind = (l == 0.0) & (m == float("-inf"))
    held = (tl.abs(m) <= highest(ACC)) & (l > 0.0) & (l < float("inf"))
    l = tl.where(blind, float("inf"), tl.where(held, l, float("nan")))
    # The acc of a blind row may be NaN: 0 times a NaN of v.
    acc = tl.where(l[:, None] == float("inf"), 0.0, acc / l[:, None])
    out_head = head_pointer(out, batch, head, out_strides, UNIT)
    store_rows(out_head, offsets(out_strides, BM, DV_PAD, UNIT), first, out_strides[1], here, acc, DV, DV_PAD, UNIT)
    natural = tl.where(blind, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
    tl.store(line_pointer(lse, batch, head, lse_strides) + tl.cast(rows, tl.int64) * lse_strides[2], natural, mask=here)
