"""The dq kernel: one CTA for each (tile of queries, head), three MMAs for each tile of keys. Source
of the kernel without atomics: jax-ml/jax-triton, pull request 177.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    LOG2E,
    TILE_NUMBERS,
    base2,
    capped,
    cta_work_tile,
    kernel,
    load_tile,
    padded,
    rows_of,
    statistic_head_pointer,
    store_rows,
)
from canon.fast.kernels.triton.key_loop import key_sources, visit_keys


@triton.jit
def dq_step(given, k, v, state, visible, PRECISION, SOFTCAP, TMA):
    """Return acc + ds k for one tile of keys, with ds of `dkdv`, in base 2."""
    q, dout, lse2, delta, scale = given
    acc = state[0]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
    if SOFTCAP is not None:
        s, slope = capped(s, scale, SOFTCAP)
        scale = tl.full((), 1.0, acc.dtype)
    p = tl.exp2(s * scale - lse2[:, None])
    if TMA:  # costs nothing, and the rounding of ds to 16 bits hides that of this sum
        minus_delta = tl.broadcast_to(-delta[:, None], s.shape).to(acc.dtype)
        ds = p * tl.dot(
            dout, tl.trans(v), minus_delta, input_precision=PRECISION, out_dtype=acc.dtype
        )
    else:
        ds = p * (
            tl.dot(dout, tl.trans(v), input_precision=PRECISION, out_dtype=acc.dtype)
            - delta[:, None]
        )
    if SOFTCAP is not None:
        ds *= slope
    if visible is not None:
        ds = tl.where(visible, ds, 0.0)
    return (tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION, out_dtype=acc.dtype),)


@kernel(*TILE_NUMBERS, "statistic_stride_b", "statistic_stride_h", pointers=("lse", "delta"))
def dq_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    dout,
    lse,
    delta,
    dq,
    tiles,
    spans,
    scale: "fp64",
    tile_count,
    heads,
    group,
    l2_heads,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    statistic_stride_b,
    statistic_stride_h,
    dq_strides,
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
    """Write dq (b, t, h, d). Fully masked rows get 0."""
    tile, batch, head = cta_work_tile(tiles, tile_count, heads, l2_heads)
    first, end_row = tl.load(tile), tl.load(tile + 1)
    bounds = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale_acc = tl.full((), scale, ACC)
    scale_log2 = scale_acc * LOG2E
    sources = key_sources(
        k, v, k_tiles, v_tiles, k_strides, v_strides, batch, head // group, D, DV, ALIGN,
        TMA, BN, PARTIAL_BN,
    )  # fmt: skip
    rows = first + tl.arange(0, BM)
    valid = rows < end_row
    q_tile = load_tile(q, batch, head, q_strides, first, valid, D, ALIGN)
    dout_tile = load_tile(dout, batch, head, dout_strides, first, valid, DV, ALIGN)
    lse_head = statistic_head_pointer(lse, batch, head, statistic_stride_b, statistic_stride_h)
    delta_head = statistic_head_pointer(delta, batch, head, statistic_stride_b, statistic_stride_h)
    lse_row = tl.load(lse_head + rows, mask=valid, other=0.0)
    lse2 = base2(lse_row)
    delta_row = tl.load(delta_head + rows, mask=valid, other=0.0)
    acc = tl.zeros([BM, padded(D)], ACC)

    acc = visit_keys(
        dq_step, (q_tile, dout_tile, lse2, delta_row, scale_log2), (acc,), spans, bounds, rows,
        batch, sources, D, DV, ALIGN, PRECISION, SOFTCAP, TMA, KEY_ORDER,
        PARTIAL_STAGES, BN, PARTIAL_BN,
    )[0]  # fmt: skip
    dq_rows = rows_of(dq, batch, head, dq_strides, BM, D, ALIGN)
    store_rows(dq_rows, first, valid, acc * scale_acc, D, ALIGN)
