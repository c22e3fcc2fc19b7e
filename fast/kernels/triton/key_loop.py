"""The loop over the tiles of keys, in the forward and dq kernels.

    partial spans    narrow tiles, masked by a band; keys outside of it may be NaN, and load as 0
    full spans       whole tiles, without a comparison, by TMA where that is faster

With KEY_ORDER all spans are partial, and some have several bands.
"""

import triton
import triton.language as tl

from canon.fast.kernels.triton.blocks import (
    chained_stop,
    full_tile_source,
    load_full_tile,
    load_rows,
    rows_of,
    visible_columns,
    visible_in_chain,
    visible_mask,
)


@triton.jit
def key_sources(
    k, v, k_tiles, v_tiles, k_strides, v_strides, batch, head, D, DV, ALIGN, TMA, BN, PARTIAL_BN
):
    """Return the sources of partial and full tiles."""
    k_rows = rows_of(k, batch, head, k_strides, PARTIAL_BN, D, ALIGN)
    v_rows = rows_of(v, batch, head, v_strides, PARTIAL_BN, DV, ALIGN)
    k_source = full_tile_source(k_tiles, batch, head, k_strides, BN, D, ALIGN, TMA)
    v_source = full_tile_source(v_tiles, batch, head, v_strides, BN, DV, ALIGN, TMA)
    return k_rows, v_rows, k_source, v_source


@triton.jit
def visit_keys(
    step, given, state, spans, bounds, rows, batch, sources, D, DV,
    ALIGN, PRECISION, SOFTCAP, TMA, KEY_ORDER, PARTIAL_STAGES, BN, PARTIAL_BN,
):  # fmt: skip
    """Return ``state`` after ``step(given, k, v, state, visible, ...)`` with each visited tile.

    ``bounds``: the first partial and full span, and their end.
    """
    partial, full, end = bounds
    k_rows, v_rows, k_source, v_source = sources
    for index in range(partial, full):
        span = spans + index * 8
        left, right = visible_columns(span, rows)
        begin, key_start, key_stop = tl.load(span), tl.load(span + 4), tl.load(span + 5)
        stop = begin + tl.load(span + 1) * PARTIAL_BN
        if KEY_ORDER:  # a tile with several bands
            for j in range(begin, chained_stop(span, PARTIAL_BN), PARTIAL_BN):
                visible, touched = visible_in_chain(spans, span, rows, j, PARTIAL_BN)
                k_tile = load_rows(k_rows, j, touched, D, ALIGN)
                v_tile = load_rows(v_rows, j, touched, DV, ALIGN)
                state = step(given, k_tile, v_tile, state, visible, PRECISION, SOFTCAP, TMA)
            begin = chained_stop(span, PARTIAL_BN)
        # tiles with one band
        for j in tl.range(begin, stop, PARTIAL_BN, num_stages=PARTIAL_STAGES):
            keys = j + tl.arange(0, PARTIAL_BN)
            in_band = (keys >= key_start) & (keys < key_stop)
            k_tile = load_rows(k_rows, j, in_band, D, ALIGN)
            v_tile = load_rows(v_rows, j, in_band, DV, ALIGN)
            visible = visible_mask(left - j, right - j, PARTIAL_BN)
            state = step(given, k_tile, v_tile, state, visible, PRECISION, SOFTCAP, TMA)

    for index in range(full, end):
        begin = tl.load(spans + index * 8)
        for j in range(begin, begin + tl.load(spans + index * 8 + 1) * BN, BN):
            k_tile = load_full_tile(k_source, batch, j, 0, BN, D, ALIGN, TMA)
            v_tile = load_full_tile(v_source, batch, j, 0, BN, DV, ALIGN, TMA)
            state = step(given, k_tile, v_tile, state, None, PRECISION, SOFTCAP, TMA)
    return state
