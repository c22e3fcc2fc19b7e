"""The forward kernel: one CTA for each (tile of queries, head) keeps a running softmax over the
spans of its work tile.

The softmax has base 2: the exponent of P = exp2(s * scale * log2(e) - m) is one FMA."""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    LN2,
    ROW_NUMBERS,
    TILE_NUMBERS,
    capped,
    cta_rows,
    cta_work_tile,
    kernel,
    load_tile,
    padded,
    statistic_head_pointer,
    store_tile,
)
from canon.fast.kernels.triton.key_loop import key_sources, visit_keys


@triton.constexpr_function
def largest_maximum(accumulate):
    """Return the largest m with a rounding error of at most 1/2."""
    return 2.0**53 if accumulate == tl.float64 else 2.0**24


@triton.jit
def softmax_step(given, k, v, state, visible, PRECISION, SOFTCAP, TMA):
    """Add a tile of keys to maximum m (scaled, base 2), sum l and output acc. Return all three."""
    q, scale = given
    m, l, acc = state
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=acc.dtype)
    if SOFTCAP is not None:
        s, _ = capped(s, scale, SOFTCAP)
        scale = tl.full((), 1.0, acc.dtype)
    if visible is not None:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    m_use = m_new
    if visible is not None:  # no visible key so far: exp2(-inf - 0) = 0, while -inf - -inf is NaN
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - m_use[:, None])
    # the same rounded m as in P; the FMA above does not round s * scale
    shrink = tl.exp2(m - m_use)
    l = l * shrink + tl.sum(p, 1)
    acc = tl.dot(
        p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION, out_dtype=acc.dtype
    )
    return m_new, l, acc


@triton.jit
def raise_maximum(pointer, m, mask=None):
    """Raise float32 numbers in memory to m (base 2, as a natural logarithm), by atomics."""
    x = (m * LN2).to(tl.float32)
    # -0 would count as the lowest number
    tl.atomic_max(pointer, tl.where(x == 0.0, 0.0, x), mask=mask, sem="relaxed")


@kernel(*TILE_NUMBERS, statistics=("lse",), pointers=("max_logits",))
def forward_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    out,
    lse,
    max_logits,
    tiles,
    spans,
    scale_log2: "fp64",  # > 0
    tile_count,
    heads,
    group,
    l2_heads,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    D: tl.constexpr,
    DV: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MAX_LOGITS: tl.constexpr,
    TMA: tl.constexpr,
    KEY_ORDER: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTIAL_BN: tl.constexpr,
):
    """Write out and natural lse. Fully masked rows get 0 and -inf. TMA: ``k_tiles`` and ``v_tiles``
    are tensor descriptors.
    """
    tile, batch, head = cta_work_tile(tiles, tile_count, heads, l2_heads)
    first, end_row = tl.load(tile), tl.load(tile + 1)
    bounds = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    scale = tl.full((), scale_log2, ACC)
    sources = key_sources(
        k, v, k_tiles, v_tiles, k_strides, v_strides, batch, head // group, D, DV, ALIGN,
        TMA, BN, PARTIAL_BN,
    )  # fmt: skip
    rows = first + tl.arange(0, BM)
    valid = rows < end_row
    q_tile = load_tile(q, batch, head, q_strides, first, valid, D, ALIGN)
    m = tl.full([BM], float("-inf"), ACC)
    l = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, padded(DV)], ACC)

    m, l, acc = visit_keys(
        softmax_step, (q_tile, scale), (m, l, acc), spans, bounds, rows, batch, sources, D, DV,
        ALIGN, PRECISION, SOFTCAP, TMA, KEY_ORDER, PARTIAL_STAGES, BN, PARTIAL_BN,
    )  # fmt: skip

    if MAX_LOGITS:
        raise_maximum(max_logits + head, tl.max(tl.where(valid, m, float("-inf")), 0))
    fully_masked = (l == 0.0) & (m == float("-inf"))
    in_range = (tl.abs(m) <= largest_maximum(ACC)) & (l > 0.0) & (l < float("inf"))
    l = tl.where(fully_masked, float("inf"), tl.where(in_range, l, float("nan")))
    # acc of a fully masked row is NaN if v holds NaN.
    acc = tl.where(l[:, None] == float("inf"), 0.0, acc / l[:, None])
    store_tile(out, batch, head, out_strides, first, valid, acc, DV, ALIGN)
    natural = tl.where(fully_masked, float("-inf"), (m + tl.log2(l)) * LN2)
    tl.store(
        statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h) + rows,
        natural,
        mask=valid,
    )


@kernel("sign", *ROW_NUMBERS)
def sign_kernel(
    q,
    result,
    sign,
    tokens,
    heads,
    batch_heads,
    q_strides,
    result_strides,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write result = sign * q: the forward kernel needs a positive scale."""
    first, _, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    x = load_tile(q, batch, head, q_strides, first, valid, D, ALIGN)
    x = x.to(ACC) * sign
    store_tile(result, batch, head, result_strides, first, valid, x, D, ALIGN)
