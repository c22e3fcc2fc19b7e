"""Two kernels for few queries (`canon.fast.tables.key_parts`).

    parts_kernel         a CTA for each (part of the keys, tile of rows, key head)
    merge_parts_kernel   a CTA for each (query, query head) merges the parts in order

A row of a tile is a query and one of the query heads that share a key head. Source: Dao et al.,
Flash-Decoding (2023), https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton import language as tl

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import (
    LN2,
    full_tile_source,
    head_pointer,
    kernel,
    load_full_tile,
    load_rows,
    padded,
    rows_of,
)
from canon.fast.kernels.triton.config import Config, choose
from canon.fast.kernels.triton.forward import largest_maximum, raise_maximum, softmax_step
from canon.fast.tables import key_parts
from canon.fast.tables.cells import Cells
from canon.fast.tables.key_parts import WORD, part_table
from canon.masks.mask import Mask
from canon.route.checks import Scale, accumulate_dtype, split_scale

MERGE, INTERPRETED_MERGE = Config(1, 1, 1, 1), Config(128, 1, 1, 1)  # rows of a CTA
AT_ONCE = 8  # parts that a CTA of the merge loads at a time


@kernel(
    "scale_log2",
    "work_count",
    "columns",
    "rows",
    "group",
    "batch_heads",
    "heads",
    pointers=("max_logits",),
)
def parts_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    outs,
    lses,
    max_logits,
    work,
    words,
    scale_log2: "fp64",  # > 0
    work_count,
    columns,  # of words
    rows,
    group,
    batch_heads,
    heads,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MAX_LOGITS: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Write out (parts, batch_heads, rows, dv) and lse (parts, batch_heads, rows), in base 2; 0 and
    -inf in rows that see no key of the part. ``heads`` are key heads.
    """
    pid = tl.program_id(0)
    # key heads of a token are neighbours in memory
    head, batch = pid % heads, pid // heads // work_count
    entry = work + pid // heads % work_count * 4
    first, begin = tl.load(entry), tl.load(entry + 1)
    end, part = tl.load(entry + 2), tl.load(entry + 3)
    scale = tl.full((), scale_log2, ACC)
    row = first + tl.arange(0, BM)
    valid, query = row < rows, row // group
    start = (
        tl.cast(query, tl.int64) * q_strides[1]
        + tl.cast(head * group + row % group, tl.int64) * q_strides[2]
    )
    width, value_width = tl.arange(0, padded(D))[None, :], tl.arange(0, padded(DV))[None, :]
    q_tile = (
        head_pointer(q, batch, 0, q_strides, ALIGN)
        + start[:, None]
        + width.to(tl.int64) * q_strides[3]
    )
    q_tile = tl.load(q_tile, mask=valid[:, None] & (width < D), other=0.0)
    k_rows = rows_of(k, batch, head, k_strides, BN, D, ALIGN)
    v_rows = rows_of(v, batch, head, v_strides, BN, DV, ALIGN)
    k_source = full_tile_source(k_tiles, batch, head, k_strides, BN, D, ALIGN, TMA)
    v_source = full_tile_source(v_tiles, batch, head, v_strides, BN, DV, ALIGN, TMA)
    loaded = words + (columns - (rows + BM - 1) // BM + first // BM)
    m = tl.full([BM], float("-inf"), ACC)
    l = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, padded(DV)], ACC)

    # The words of the next tile are loaded early: the pipeline prefetches only K and V.
    seen = tl.load(words + begin // 64 * columns + query, mask=valid & (begin < end), other=0)
    kept = tl.load(loaded + begin // 64 * columns, mask=begin < end, other=0)
    for j in range(begin, end, BN):
        bits = j % 64 + tl.arange(0, BN)
        visible = ((seen[:, None] >> bits[None, :]) & 1) != 0
        seen = tl.load(
            words + (j + BN) // 64 * columns + query, mask=valid & (j + BN < end), other=0
        )
        if TMA:
            k_tile = load_full_tile(k_source, batch, j, 0, BN, D, ALIGN, TMA)
            v_tile = load_full_tile(v_source, batch, j, 0, BN, DV, ALIGN, TMA)
        else:
            is_loaded = ((kept >> bits) & 1) != 0  # others may be NaN: load 0
            kept = tl.load(loaded + (j + BN) // 64 * columns, mask=j + BN < end, other=0)
            k_tile = load_rows(k_rows, j, is_loaded, D, ALIGN)
            v_tile = load_rows(v_rows, j, is_loaded, DV, ALIGN)
        given, state = (q_tile, scale), (m, l, acc)
        m, l, acc = softmax_step(given, k_tile, v_tile, state, visible, PRECISION, SOFTCAP, TMA)

    if MAX_LOGITS:
        raise_maximum(max_logits + head * group + row % group, m, valid)
    fully_masked = (l == 0.0) & (m == float("-inf"))
    # Below the range, a part has no weight beside one in the range. `merge_parts_kernel` decides.
    low = (m < -largest_maximum(ACC)) & (m > float("-inf"))
    in_range = (m <= largest_maximum(ACC)) & (l > 0.0) & (l < float("inf"))
    l = tl.where(fully_masked | low, float("inf"), tl.where(in_range, l, float("nan")))
    acc = tl.where(l[:, None] == float("inf"), 0.0, acc / l[:, None])
    lse = tl.where(fully_masked | low, m, m + tl.log2(l))
    target = (tl.cast(part, tl.int64) * batch_heads + batch * heads + head) * rows + row
    tl.store(
        outs + target[:, None] * DV + value_width, acc, mask=valid[:, None] & (value_width < DV)
    )
    tl.store(lses + target, lse, mask=valid)


@kernel("parts", "rows", "all_rows", "group", "heads", statistics=("lse",))
def merge_parts_kernel(
    outs,
    lses,
    out,
    lse,
    parts,
    rows,
    all_rows,
    group,
    heads,
    out_strides,
    lse_stride_b,
    lse_stride_h,
    DV: tl.constexpr,
    ACC: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BM: tl.constexpr,
):
    """Write out and natural lse. ``all_rows``: of all batches and key heads."""
    place = tl.cast(tl.program_id(0), tl.int64) * BM + tl.arange(0, BM)
    valid = place < all_rows
    tops = tl.full([BM, 64], float("-inf"), ACC)
    for start in range(0, parts, 64):
        part = start + tl.arange(0, 64)[None, :]
        part_lses = lses + tl.cast(part, tl.int64) * all_rows + place[:, None]
        part_lses = tl.load(part_lses, mask=(part < parts) & valid[:, None], other=float("-inf"))
        tops = tl.maximum(tops, part_lses)
    top = tl.max(tops, 1)
    top_or_zero = tl.where(top == float("-inf"), 0.0, top)

    in_width = valid[:, None] & (tl.arange(0, padded(DV))[None, :] < DV)
    total = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, padded(DV)], ACC)
    for start in range(0, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            index = tl.cast(start + i, tl.int64) * all_rows + place
            exists = start + i < parts
            part_lse = tl.load(lses + index, mask=valid & exists, other=float("-inf"))
            part_out = outs + index[:, None] * DV + tl.arange(0, padded(DV))[None, :]
            weight = tl.exp2(part_lse - top_or_zero)
            total += weight
            acc += weight[:, None] * tl.load(part_out, mask=in_width & exists, other=0.0)

    fully_masked = (total == 0.0) & (top == float("-inf"))
    in_range = tl.abs(top) <= largest_maximum(ACC)
    total = tl.where(fully_masked, 1.0, tl.where(in_range, total, float("nan")))
    row, batch_head = place % rows, place // rows
    query, batch, head = row // group, batch_head // heads, batch_head % heads * group + row % group
    target = (
        out + (batch * out_strides[0] + query * out_strides[1] + head * out_strides[2])[:, None]
    )
    target += tl.arange(0, padded(DV)).to(tl.int64)[None, :] * out_strides[3]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_width)
    natural = tl.where(fully_masked, float("-inf"), (top_or_zero + tl.log2(total)) * LN2)
    tl.store(lse + batch * lse_stride_b + head * lse_stride_h + query, natural, mask=valid)


def forward_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Cells,
    scale: Scale,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:
    """As `launch.forward`, in parts of the keys."""
    outs, lses = sum_parts(q, k, v, cells.mask, scale, max_logits)
    (b, t, h, dv), key_heads = out.shape, k.shape[2]
    share, config = h // key_heads, INTERPRETED_MERGE if launch.INTERPRETED else MERGE
    options = {"DV": dv, "ACC": launch.triton_dtype(lses.dtype)}
    options |= {"AT_ONCE": AT_ONCE, "BM": config.rows}
    arguments = (outs, lses, out, lse, len(lses), t * share, b * t * h, share)
    ctas = -(-b * t * h // config.rows)
    launch.run(merge_parts_kernel, ctas, config, arguments, key_heads, (out, lse), options)


def sum_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Scale, max_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out (parts, rows, dv) and lse (parts, rows). Rows: batches x key heads x queries x
    heads of a group."""
    (b, t, h, _), g, dv = q.shape, k.shape[2], v.shape[3]
    describable = launch.has_descriptor(k) and launch.has_descriptor(v)
    config = choose("parts", q, v, describable)
    if WORD % config.columns:
        raise ValueError(
            f"the kernel of the parts needs tiles of keys that divide {WORD}, got {config.columns}"
        )
    table = part_table(mask, h // g, config.rows, key_parts.PART, q.device)
    config = replace(config, tma=config.tma and describable and table.loads_all)
    outs = torch.empty(table.parts, b * t * h, dv, dtype=accumulate_dtype(q.dtype), device=q.device)
    lses = torch.empty(table.parts, b * t * h, dtype=outs.dtype, device=q.device)
    scale, softcap = split_scale(scale)
    q, scale = launch.signed(q, scale)
    options = launch.mma_options(config, softcap, q, v, k)
    del options["PARTIAL_BN"], options["PARTIAL_STAGES"]
    options["MAX_LOGITS"] = max_logits is not None
    tensors = (q, k, v, launch.tile_source(k, config), launch.tile_source(v, config), outs, lses)
    tensors += (lses if max_logits is None else max_logits,)
    sizes = len(table.work), table.words.shape[1], t * (h // g), h // g, b * g
    arguments = (*tensors, *table[:2], scale, *sizes)
    launch.run(parts_kernel, len(table.work) * b * g, config, arguments, g, (q, k, v), options)
    return outs, lses
