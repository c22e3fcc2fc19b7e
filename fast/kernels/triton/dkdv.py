"""The dk and dv kernel, the fused kernel for dq, dk and dv, and the sum of dk and dv over heads.

With p = exp(s - lse) and delta = rowsum(dout * out) - dlse, each tile of queries adds

    s = scale q k^T      dp = dout v^T      ds = p * (dp - delta)
    dv += p^T dout       dk += scale ds^T q

A CTA owns a tile of keys. For each tile of queries it visits the query heads of its group in order.
FUSED also adds dq += scale ds k by float32 atomics. If an owner has no whole group,
`sum_heads_kernel` sums the parts.

Source of one CTA for each query head: TensorAuto/OpenTau, pull request 376.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    CTA_ROWS,
    LOG2E,
    ROW_NUMBERS,
    TILE_NUMBERS,
    accumulate_mma,
    base2,
    capped,
    chained_stop,
    cta_rows,
    cta_work_tile,
    full_tile_source,
    head_pointer,
    kernel,
    load_full_tile,
    load_rows,
    load_tile,
    padded,
    row_start,
    rows_of,
    statistic_head_pointer,
    statistic_pointers,
    store_rows,
    store_tile,
    tile_offsets,
    visible_columns,
    visible_in_chain,
    visible_mask,
)


@triton.jit
def dkdv_step(visited, k, v, dk, dv, scale, visible, MAKE_DK, MAKE_DV, PRECISION, SOFTCAP):
    """Return dk + ds^T q, dv + p^T dout and ds^T of a tile."""
    q, dout, lse, delta = visited
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=dk.dtype)
    if SOFTCAP is not None:
        s, slope = capped(s, scale, SOFTCAP)
        scale = tl.full((), 1.0, dk.dtype)
    p = tl.exp2(s * scale - base2(lse)[None, :])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    if MAKE_DV:
        dv = accumulate_mma(dv, p.to(dout.dtype), dout, PRECISION)
    ds = p
    if MAKE_DK:
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION, out_dtype=dk.dtype)
        ds = p * (dp - delta[None, :])
        if SOFTCAP is not None:
            ds *= slope
        if visible is not None:  # dp of an invisible key may be NaN, and 0 * NaN is NaN
            ds = tl.where(visible, ds, 0.0)
        dk = accumulate_mma(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv, ds.to(q.dtype)


@triton.jit
def load_queries(
    heads, offsets, strides, statistic_stride_h, first, head, exists, D, DV, ALIGN, COLUMNS
):
    """Return q, dout, lse and delta of a partial tile, 0 where not ``exists``: others may be NaN.
    ``head`` counts from ``heads``, pointers to the four tensors.
    """
    q_head, dout_head, lse_head, delta_head = heads
    q_at = q_head + row_start(head, strides[0][2], ALIGN)
    dout_at = dout_head + row_start(head, strides[1][2], ALIGN)
    q = load_rows((q_at, offsets[0], strides[0]), first, exists, D, ALIGN)
    dout = load_rows((dout_at, offsets[1], strides[1]), first, exists, DV, ALIGN)
    lse_at = statistic_pointers(lse_head, first, head, statistic_stride_h, COLUMNS)
    lse = tl.load(lse_at, mask=exists, other=0.0)
    delta_at = statistic_pointers(delta_head, first, head, statistic_stride_h, COLUMNS)
    delta = tl.load(delta_at, mask=exists, other=0.0)
    return q, dout, lse, delta


@triton.jit
def next_head(i, head, each, COLUMNS):
    """Return the first query and the head of the next tile: heads first, then queries."""
    head += 1
    i += tl.where(head == each, COLUMNS, 0)
    return i, tl.where(head == each, 0, head)


@triton.jit
def add_dq(pointer, first, strides, head, valid, ds, k, scale, D, ALIGN, PRECISION):
    """Add scale ds k to dq of one tile of queries. ``ds`` is (keys, queries)."""
    offset = tile_offsets(strides, valid.shape[0], D, ALIGN)
    x = (
        pointer
        + tl.cast(first, tl.int64) * strides[1]
        + tl.cast(head, tl.int64) * strides[2]
        + offset
    )
    part = tl.dot(tl.trans(ds), k, input_precision=PRECISION, out_dtype=scale.dtype) * scale
    keep = valid[:, None] & (tl.arange(0, padded(D)) < D)[None, :]
    tl.atomic_add(x, part, mask=keep, sem="relaxed")


@kernel(
    *TILE_NUMBERS, "each", "statistic_stride_b", "statistic_stride_h", pointers=("lse", "delta")
)
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    q_tiles,
    dout_tiles,
    lse,
    delta,
    dq,
    dk,
    dv,
    tiles,
    spans,
    scale: "fp64",
    tile_count,
    heads,
    group,
    each,
    l2_heads,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    statistic_stride_b,
    statistic_stride_h,
    dq_strides,
    dk_strides,
    dv_strides,
    FUSED: tl.constexpr,
    MAKE_DK: tl.constexpr,
    MAKE_DV: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    KEY_ORDER: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTIAL_BN: tl.constexpr,
):
    """Write dk and dv of ``heads`` owners with ``each`` query heads (KEY_ORDER: HEADS). A CTA owns
    BM keys and visits BN queries at a time.
    """
    tile, batch, owner = cta_work_tile(tiles, tile_count, heads, l2_heads)
    first, stop = tl.load(tile), tl.load(tile + 1)
    partial, full, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale_acc = tl.full((), scale, ACC)
    scale_log2 = scale_acc * LOG2E
    if KEY_ORDER:
        each = HEADS
    head_first = owner * each
    rows = first + tl.arange(0, BM)
    valid = rows < stop
    k_rows = rows_of(k, batch, head_first // group, k_strides, BM, D, ALIGN)
    v_rows = rows_of(v, batch, head_first // group, v_strides, BM, DV, ALIGN)
    k_tile = load_rows(k_rows, first, valid, D, ALIGN)
    v_tile = load_rows(v_rows, first, valid, DV, ALIGN)
    if FUSED:  # dq sums over all keys of the tile, and unseen ones may be NaN
        visible_keys = valid & (end > full)
        for index in range(partial, full):
            span = spans + index * 8
            visible_keys = visible_keys | ((rows >= tl.load(span + 2)) & (rows < tl.load(span + 3)))
        k_tile = tl.where(visible_keys[:, None], k_tile, 0.0)
    q_head = head_pointer(q, batch, head_first, q_strides, ALIGN)
    dout_head = head_pointer(dout, batch, head_first, dout_strides, ALIGN)
    q_source = full_tile_source(q_tiles, batch, head_first, q_strides, BN, D, ALIGN, TMA)
    dout_source = full_tile_source(dout_tiles, batch, head_first, dout_strides, BN, DV, ALIGN, TMA)
    dq_head = head_pointer(dq, batch, head_first, dq_strides, ALIGN)
    lse_head = statistic_head_pointer(
        lse, batch, head_first, statistic_stride_b, statistic_stride_h
    )
    delta_head = statistic_head_pointer(
        delta, batch, head_first, statistic_stride_b, statistic_stride_h
    )
    query_heads, strides = (q_head, dout_head, lse_head, delta_head), (q_strides, dout_strides)
    q_offset = tile_offsets(q_strides, PARTIAL_BN, D, ALIGN)
    dout_offset = tile_offsets(dout_strides, PARTIAL_BN, DV, ALIGN)
    offsets = q_offset, dout_offset
    dk_acc = tl.zeros([BM, padded(D)], ACC)
    dv_acc = tl.zeros([BM, padded(DV)], ACC)

    for index in range(partial, full):
        span = spans + index * 8
        left, right = visible_columns(span, rows)
        begin, query_start, query_stop = tl.load(span), tl.load(span + 4), tl.load(span + 5)
        steps = tl.load(span + 1) * each
        if KEY_ORDER:  # a tile with several bands; never FUSED
            chained_steps = (chained_stop(span, PARTIAL_BN) - begin) // PARTIAL_BN * each
            steps -= chained_steps
            for head in range(chained_steps):
                visible, touched = visible_in_chain(spans, span, rows, begin, PARTIAL_BN)
                visited = load_queries(
                    query_heads, offsets, strides, statistic_stride_h, begin, head, touched, D, DV,
                    ALIGN, PARTIAL_BN,
                )  # fmt: skip
                dk_acc, dv_acc, _ = dkdv_step(
                    visited, k_tile, v_tile, dk_acc, dv_acc, scale_log2, visible, MAKE_DK, MAKE_DV,
                    PRECISION, SOFTCAP,
                )  # fmt: skip
        # tiles with one band
        i, head = begin, 0
        for step in tl.range(steps, num_stages=PARTIAL_STAGES):
            if KEY_ORDER:  # carried numbers would spill registers
                i, head = begin + step // each * PARTIAL_BN, step % each
            queries = i + tl.arange(0, PARTIAL_BN)
            in_band = (queries >= query_start) & (queries < query_stop)
            visited = load_queries(
                query_heads, offsets, strides, statistic_stride_h, i, head, in_band, D, DV, ALIGN,
                PARTIAL_BN,
            )  # fmt: skip
            visible = visible_mask(left - i, right - i, PARTIAL_BN)
            dk_acc, dv_acc, ds = dkdv_step(
                visited, k_tile, v_tile, dk_acc, dv_acc, scale_log2, visible, MAKE_DK, MAKE_DV,
                PRECISION, SOFTCAP,
            )  # fmt: skip
            if FUSED:
                add_dq(
                    dq_head, i, dq_strides, head, in_band, ds, k_tile, scale_acc, D, ALIGN,
                    PRECISION,
                )  # fmt: skip
            if not KEY_ORDER:
                i, head = next_head(i, head, each, PARTIAL_BN)

    # full tiles
    for index in range(full, end):
        begin = tl.load(spans + index * 8)
        i, head = begin, 0
        for _ in range(tl.load(spans + index * 8 + 1) * each):
            queries = i + tl.arange(0, BN)
            q_tile = load_full_tile(q_source, batch, i, head, BN, D, ALIGN, TMA)
            dout_tile = load_full_tile(dout_source, batch, i, head, BN, DV, ALIGN, TMA)
            lse_row = tl.load(statistic_pointers(lse_head, i, head, statistic_stride_h, BN))
            delta_row = tl.load(statistic_pointers(delta_head, i, head, statistic_stride_h, BN))
            visited = q_tile, dout_tile, lse_row, delta_row
            dk_acc, dv_acc, ds = dkdv_step(
                visited, k_tile, v_tile, dk_acc, dv_acc, scale_log2, None, MAKE_DK, MAKE_DV,
                PRECISION, SOFTCAP,
            )  # fmt: skip
            if FUSED:
                add_dq(
                    dq_head, i, dq_strides, head, queries >= 0, ds, k_tile, scale_acc, D,
                    ALIGN, PRECISION,
                )  # fmt: skip
            i, head = next_head(i, head, each, BN)

    if MAKE_DK:
        dk_rows = rows_of(dk, batch, owner, dk_strides, BM, D, ALIGN)
        store_rows(dk_rows, first, valid, dk_acc * scale_acc, D, ALIGN)
    if MAKE_DV:
        store_tile(dv, batch, owner, dv_strides, first, valid, dv_acc, DV, ALIGN)


@kernel(*ROW_NUMBERS, "group")
def sum_heads_kernel(
    dk_parts,
    dv_parts,
    dk,
    dv,
    group,
    tokens,
    heads,
    batch_heads,
    dk_parts_strides,
    dv_parts_strides,
    dk_strides,
    dv_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write dk and, unless DV is 0, dv: sums of each ``group`` heads of the parts, in order."""
    first, _, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    dk_acc = tl.zeros([CTA_ROWS, padded(D)], ACC)
    dv_acc = tl.zeros([CTA_ROWS, padded(DV)], ACC)
    # unrolled, so that several loads are in flight
    for part in tl.range(head * group, (head + 1) * group, loop_unroll_factor=4):
        strides = dk_parts_strides
        dk_acc += load_tile(dk_parts, batch, part, strides, first, valid, D, ALIGN)
        if DV > 0:
            strides = dv_parts_strides
            dv_acc += load_tile(dv_parts, batch, part, strides, first, valid, DV, ALIGN)
    store_tile(dk, batch, head, dk_strides, first, valid, dk_acc, D, ALIGN)
    if DV > 0:
        store_tile(dv, batch, head, dv_strides, first, valid, dv_acc, DV, ALIGN)
