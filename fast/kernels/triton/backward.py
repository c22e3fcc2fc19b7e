"""The backward kernels: delta, dq (3 products), dk and dv (4 products), fused (5), and the sum over a group of heads.

With p = exp(s - lse) and delta = rowsum(dout * out) - dlse, each tile of queries x keys gives

    dv += p^T dout      dp = dout v^T      ds = p * (dp - delta)      dk += scale ds^T q      dq += scale ds k

`dq_kernel` owns tiles of queries; `dkdv_kernel` owns tiles of keys (the transposed work table) and walks through the
query heads of its group tile by tile, so that the group is summed in registers, in one fixed order. With FUSED it also
adds ds k to a float32 dq by atomics, whose order is not fixed. With GROUP > HEADS a program takes fewer heads
(one, for head_parallel), and `sum_heads_kernel` adds up what they wrote, again in a fixed order.

Source: FlashAttention-2 (Tri Dao, 2023), algorithm 2; two kernels in place of atomics: jax-ml/jax-triton, PR 177;
one program per query head: OpenTau, PR 376.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    add_product,
    head_pointer,
    line_pointer,
    line_rows,
    load_some_rows,
    load_whole,
    offsets,
    program_work,
    row_start,
    seen_cells,
    seen_columns,
    store_rows,
    whole_source,
)


@triton.jit(do_not_specialize=["tokens", "heads", "lines"])
def delta_kernel(
    out,
    dout,
    lse,
    dlse,
    delta,
    tokens,
    heads,
    lines,
    out_strides,
    dout_strides,
    lse_strides,
    dlse_strides,
    delta_strides,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """delta (b, h, t) = rowsum(dout * out) - dlse; 0 where lse is -inf."""
    first = tl.program_id(0) // lines * BM
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    rows = first + tl.arange(0, BM)
    here = rows < tokens
    line = tl.cast(rows, tl.int64)
    lse_row = tl.load(line_pointer(lse, batch, head, lse_strides) + line * lse_strides[2], mask=here, other=0.0)
    sees = here & (lse_row > float("-inf"))
    out_head = head_pointer(out, batch, head, out_strides, UNIT)
    dout_head = head_pointer(dout, batch, head, dout_strides, UNIT)
    out_offset, dout_offset = offsets(out_strides, BM, D_PAD, UNIT), offsets(dout_strides, BM, D_PAD, UNIT)
    out_tile = load_some_rows(out_head, out_offset, first, out_strides[1], sees, D, D_PAD, UNIT).to(ACC)
    dout_tile = load_some_rows(dout_head, dout_offset, first, dout_strides[1], sees, D, D_PAD, UNIT).to(ACC)
    total = tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        dlse_head = line_pointer(dlse, batch, head, dlse_strides)
        total -= tl.load(dlse_head + line * dlse_strides[2], mask=sees, other=0.0).to(ACC)
    tl.store(line_pointer(delta, batch, head, delta_strides) + line * delta_strides[2], total, mask=here)


@triton.jit
def dq_step(
    q, k, v, dout, lse2, delta, acc, scale, seen, MASKED: tl.constexpr, PRECISION: tl.constexpr, HOPPER: tl.constexpr
):
    """Adds ds k of one tile of keys. HOPPER: 16 bits, and registers enough."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
    p = tl.exp2(s * scale - lse2[:, None])
    if HOPPER:  # what a product begins at is free, and its rounding hidden by that of ds
        less = tl.broadcast_to(-delta[:, None], s.shape).to(acc.dtype)
        ds = p * tl.dot(dout, tl.trans(v), less, input_precision=PRECISION, out_dtype=acc.dtype)
    else:
        ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION, out_dtype=acc.dtype) - delta[:, None])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit(do_not_specialize=["tile_count", "width", "heads"])
def dq_kernel(
    q,
    k,
    v,
    k_whole,
    v_whole,
    dout,
    lse,
    delta,
    dq,
    tiles,
    spans,
    scale: "fp64",
    tile_count,
    heads,
    width,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    line_strides,
    dq_strides,
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
    """dq (b, t, h, d), loops as in the forward kernel; rows that see no key get 0."""
    tile, batch, head = program_work(tiles, tile_count, heads, width)
    first, stop = tl.load(tile), tl.load(tile + 1)
    partial, full, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale_acc = tl.full((), scale, ACC)
    scale_log2 = scale_acc * 1.4426950408889634
    k_head = head_pointer(k, batch, head // GROUP, k_strides, UNIT)
    v_head = head_pointer(v, batch, head // GROUP, v_strides, UNIT)
    k_offset = offsets(k_strides, PARTIAL_BN, D_PAD, UNIT)
    v_offset = offsets(v_strides, PARTIAL_BN, DV_PAD, UNIT)
    k_source = whole_source(k_whole, batch, head // GROUP, k_strides, BN, D_PAD, UNIT, TMA)
    v_source = whole_source(v_whole, batch, head // GROUP, v_strides, BN, DV_PAD, UNIT, TMA)
    rows = first + tl.arange(0, BM)
    here = rows < stop
    q_head = head_pointer(q, batch, head, q_strides, UNIT)
    q_tile = load_some_rows(q_head, offsets(q_strides, BM, D_PAD, UNIT), first, q_strides[1], here, D, D_PAD, UNIT)
    dout_head = head_pointer(dout, batch, head, dout_strides, UNIT)
    dout_offset = offsets(dout_strides, BM, DV_PAD, UNIT)
    dout_tile = load_some_rows(dout_head, dout_offset, first, dout_strides[1], here, DV, DV_PAD, UNIT)
    lse_head, delta_head = line_pointer(lse, batch, head, line_strides), line_pointer(delta, batch, head, line_strides)
    lse2 = tl.load(line_rows(lse_head, first, 0, line_strides, BM), mask=here, other=0.0) * 1.4426950408889634
    delta_row = tl.load(line_rows(delta_head, first, 0, line_strides, BM), mask=here, other=0.0)
    acc = tl.zeros([BM, D_PAD], ACC)

    for index in range(partial, full):
        span = spans + index * 8
        left, right = seen_columns(span, rows)
        begin, key_start, key_stop = tl.load(span), tl.load(span + 4), tl.load(span + 5)
        for j in tl.range(begin, begin + tl.load(span + 1) * PARTIAL_BN, PARTIAL_BN, num_stages=PARTIAL_STAGES):
            keys = j + tl.arange(0, PARTIAL_BN)
            inside = (keys >= key_start) & (keys < key_stop)
            k_tile = load_some_rows(k_head, k_offset, j, k_strides[1], inside, D, D_PAD, UNIT)
            v_tile = load_some_rows(v_head, v_offset, j, v_strides[1], inside, DV, DV_PAD, UNIT)
            seen = seen_cells(left - j, right - j, PARTIAL_BN)
            acc = dq_step(
                q_tile, k_tile, v_tile, dout_tile, lse2, delta_row, acc, scale_log2, seen, True, PRECISION, TMA
            )

    for index in range(full, end):
        begin = tl.load(spans + index * 8)
        for j in range(begin, begin + tl.load(spans + index * 8 + 1) * BN, BN):
            k_tile = load_whole(k_source, batch, j, 0, k_strides, BN, D, D_PAD, UNIT, TMA)
            v_tile = load_whole(v_source, batch, j, 0, v_strides, BN, DV, DV_PAD, UNIT, TMA)
            acc = dq_step(
                q_tile, k_tile, v_tile, dout_tile, lse2, delta_row, acc, scale_log2, None, False, PRECISION, TMA
            )

    dq_head = head_pointer(dq, batch, head, dq_strides, UNIT)
    dq_offset = offsets(dq_strides, BM, D_PAD, UNIT)
    store_rows(dq_head, dq_offset, first, dq_strides[1], here, acc * scale_acc, D, D_PAD, UNIT)


@triton.jit
def dkdv_step(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    scale,
    seen,
    MASKED: tl.constexpr,
    MAKE_DK: tl.constexpr,
    MAKE_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds ds^T q and p^T dout of one tile of queries; also returns ds^T."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=dk.dtype)
    p = tl.exp2(s * scale - (lse * 1.4426950408889634)[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    if MAKE_DV:
        dv = add_product(dv, p.to(dout.dtype), dout, PRECISION)
    ds = p
    if MAKE_DK:
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION, out_dtype=dk.dtype)
        ds = p * (dp - delta[None, :])
        if MASKED:  # a key that no query sees may make dp NaN, and 0 times NaN is NaN
            ds = tl.where(seen, ds, 0.0)
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv, ds.to(q.dtype)


@triton.jit
def add_dq(
    pointer,
    offset,
    first,
    strides,
    head,
    inside,
    ds,
    k,
    scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of one tile of queries += scale ds k, by atomics in any order."""
    x = pointer + tl.cast(first, tl.int64) * strides[1] + tl.cast(head, tl.int64) * strides[2] + offset
    part = tl.dot(tl.trans(ds), k, input_precision=PRECISION, out_dtype=scale.dtype) * scale
    keep = inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
    tl.atomic_add(x, part, mask=keep, sem="relaxed")


@triton.jit(do_not_specialize=["tile_count", "width", "heads"])
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    q_whole,
    dout_whole,
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
    width,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    line_strides,
    dq_strides,
    dk_strides,
    dv_strides,
    FUSED: tl.constexpr,
    MAKE_DK: tl.constexpr,
    MAKE_DV: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
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
    """dk (b, s, o, d) and dv (b, s, o, dv) of the ``heads`` = o owners, each of HEADS query heads of one group.

    BM keys are owned, BN queries visited. Keys that no query sees get 0.
    """
    tile, batch, owner = program_work(tiles, tile_count, heads, width)
    first, stop = tl.load(tile), tl.load(tile + 1)
    partial, full, end = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale_acc = tl.full((), scale, ACC)
    scale_log2 = scale_acc * 1.4426950408889634
    head_first = owner * HEADS
    rows = first + tl.arange(0, BM)
    here = rows < stop
    k_head = head_pointer(k, batch, head_first // GROUP, k_strides, UNIT)
    v_head = head_pointer(v, batch, head_first // GROUP, v_strides, UNIT)
    k_tile = load_some_rows(k_head, offsets(k_strides, BM, D_PAD, UNIT), first, k_strides[1], here, D, D_PAD, UNIT)
    v_tile = load_some_rows(v_head, offsets(v_strides, BM, DV_PAD, UNIT), first, v_strides[1], here, DV, DV_PAD, UNIT)
    if FUSED:  # dq is made of all keys of the tile: 0 for those that no query sees, which may be NaN
        known = here & (end > full)
        for index in range(partial, full):
            known = known | ((rows >= tl.load(spans + index * 8 + 2)) & (rows < tl.load(spans + index * 8 + 3)))
        k_tile = tl.where(known[:, None], k_tile, 0.0)
    q_head = head_pointer(q, batch, head_first, q_strides, UNIT)
    dout_head = head_pointer(dout, batch, head_first, dout_strides, UNIT)
    q_source = whole_source(q_whole, batch, head_first, q_strides, BN, D_PAD, UNIT, TMA)
    dout_source = whole_source(dout_whole, batch, head_first, dout_strides, BN, DV_PAD, UNIT, TMA)
    dq_head = head_pointer(dq, batch, head_first, dq_strides, UNIT)
    lse_head = line_pointer(lse, batch, head_first, line_strides)
    delta_head = line_pointer(delta, batch, head_first, line_strides)
    q_offset = offsets(q_strides, PARTIAL_BN, D_PAD, UNIT)
    dout_offset = offsets(dout_strides, PARTIAL_BN, DV_PAD, UNIT)
    dk_acc = tl.zeros([BM, D_PAD], ACC)
    dv_acc = tl.zeros([BM, DV_PAD], ACC)

    for index in range(partial, full):
        span = spans + index * 8
        left, right = seen_columns(span, rows)
        begin, query_start, query_stop = tl.load(span), tl.load(span + 4), tl.load(span + 5)
        for step in tl.range(tl.load(span + 1) * HEADS, num_stages=PARTIAL_STAGES):
            i, head = begin + step // HEADS * PARTIAL_BN, step % HEADS
            queries = i + tl.arange(0, PARTIAL_BN)
            inside = (queries >= query_start) & (queries < query_stop)
            q_at = q_head + row_start(head, q_strides[2], UNIT)
            dout_at = dout_head + row_start(head, dout_strides[2], UNIT)
            q_tile = load_some_rows(q_at, q_offset, i, q_strides[1], inside, D, D_PAD, UNIT)
            dout_tile = load_some_rows(dout_at, dout_offset, i, dout_strides[1], inside, DV, DV_PAD, UNIT)
            lse_row = tl.load(line_rows(lse_head, i, head, line_strides, PARTIAL_BN), mask=inside, other=0.0)
            delta_row = tl.load(line_rows(delta_head, i, head, line_strides, PARTIAL_BN), mask=inside, other=0.0)
            seen = seen_cells(left - i, right - i, PARTIAL_BN)
            dk_acc, dv_acc, ds = dkdv_step(
                q_tile,
                k_tile,
                v_tile,
                dout_tile,
                lse_row,
                delta_row,
                dk_acc,
                dv_acc,
                scale_log2,
                seen,
                True,
                MAKE_DK,
                MAKE_DV,
                PRECISION,
            )
            if FUSED:
                add_dq(
                    dq_head,
                    offsets(dq_strides, PARTIAL_BN, D_PAD, UNIT),
                    i,
                    dq_strides,
                    head,
                    inside,
                    ds,
                    k_tile,
                    scale_acc,
                    D,
                    D_PAD,
                    PRECISION,
                )

    for index in range(full, end):
        begin = tl.load(spans + index * 8)
        for step in range(tl.load(spans + index * 8 + 1) * HEADS):
            i, head = begin + step // HEADS * BN, step % HEADS
            queries = i + tl.arange(0, BN)
            q_tile = load_whole(q_source, batch, i, head, q_strides, BN, D, D_PAD, UNIT, TMA)
            dout_tile = load_whole(dout_source, batch, i, head, dout_strides, BN, DV, DV_PAD, UNIT, TMA)
            lse_row = tl.load(line_rows(lse_head, i, head, line_strides, BN))
            delta_row = tl.load(line_rows(delta_head, i, head, line_strides, BN))
            dk_acc, dv_acc, ds = dkdv_step(
                q_tile,
                k_tile,
                v_tile,
                dout_tile,
                lse_row,
                delta_row,
                dk_acc,
                dv_acc,
                scale_log2,
                None,
                False,
                MAKE_DK,
                MAKE_DV,
                PRECISION,
            )
            if FUSED:
                inside = queries >= 0
                add_dq(
                    dq_head,
                    offsets(dq_strides, BN, D_PAD, UNIT),
                    i,
                    dq_strides,
                    head,
                    inside,
                    ds,
                    k_tile,
                    scale_acc,
                    D,
                    D_PAD,
                    PRECISION,
                )

    dk_head = head_pointer(dk, batch, owner, dk_strides, UNIT)
    dv_head = head_pointer(dv, batch, owner, dv_strides, UNIT)
    dk_offset, dv_offset = offsets(dk_strides, BM, D_PAD, UNIT), offsets(dv_strides, BM, DV_PAD, UNIT)
    if MAKE_DK:
        store_rows(dk_head, dk_offset, first, dk_strides[1], here, dk_acc * scale_acc, D, D_PAD, UNIT)
    if MAKE_DV:
        store_rows(dv_head, dv_offset, first, dv_strides[1], here, dv_acc, DV, DV_PAD, UNIT)


@triton.jit(do_not_specialize=["tokens", "heads", "lines"])
def sum_heads_kernel(
    x,
    total,
    tokens,
    heads,
    lines,
    x_strides,
    total_strides,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """total (b, s, g, d) = the sum of each GROUP heads of x (b, s, h, d), first to last."""
    first = tl.program_id(0) // lines * BM
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    here = first + tl.arange(0, BM) < tokens
    offset = offsets(x_strides, BM, D_PAD, UNIT)
    acc = tl.zeros([BM, D_PAD], ACC)
    for member in tl.static_range(GROUP):
        pointer = head_pointer(x, batch, head * GROUP + member, x_strides, UNIT)
        acc += load_some_rows(pointer, offset, first, x_strides[1], here, D, D_PAD, UNIT)
    total_head = head_pointer(total, batch, head, total_strides, UNIT)
    store_rows(total_head, offsets(total_strides, BM, D_PAD, UNIT), first, total_strides[1], here, acc, D, D_PAD, UNIT)
