"""Row statistics in the form that the Hopper kernels read.

    stats (b, h, 2, padded)
        lse * log2(e)   1e30 for queries that see no key: exp2(s - lse) is 0 without a comparison
        -delta          the initial accumulator of dP - delta; both are 0 behind the last token

``padded`` is a multiple of 4 tokens, so TMA can load any box that begins at a fourth token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.launcher import launch
from canon.fast.kernels.triton import launch as portable
from canon.fast.kernels.triton.blocks import (
    ROW_NUMBERS,
    base2,
    cta_rows,
    kernel,
    statistic_head_pointer,
)
from canon.fast.kernels.triton.softmax_stats import lse_and_delta

TOKENS = 256  # of each CTA


@kernel("tokens", "padded", "heads", statistics=("lse", "delta"))
def softmax_stats_kernel(
    lse,
    delta,
    stats,
    tokens,
    padded,
    heads,
    lse_stride_b,
    lse_stride_h,
    delta_stride_b,
    delta_stride_h,
    TOKENS: tl.constexpr,
):
    """Write stats from lse and delta."""
    blocks = tl.cdiv(padded, TOKENS)
    batch_head = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    lse_row = statistic_head_pointer(
        lse, batch_head // heads, batch_head % heads, lse_stride_b, lse_stride_h
    )
    delta_row = statistic_head_pointer(
        delta, batch_head // heads, batch_head % heads, delta_stride_b, delta_stride_h
    )
    x = base2(tl.load(lse_row + token, mask=inside, other=0.0))
    start = stats + tl.cast(batch_head, tl.int64) * 2 * padded
    tl.store(start + token, x, mask=token < padded)
    y = tl.load(delta_row + token, mask=inside, other=0.0)
    tl.store(start + padded + token, -y, mask=token < padded)


@kernel(*ROW_NUMBERS, "padded", statistics=("lse", "dlse"))
def delta_stats_kernel(
    out,
    dout,
    lse,
    dlse,
    stats,
    padded,
    tokens,
    heads,
    batch_heads,
    out_strides,
    dout_strides,
    lse_stride_b,
    lse_stride_h,
    dlse_stride_b,
    dlse_stride_h,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute delta, and write stats."""
    first, rows, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    batch_head = tl.program_id(0) % batch_heads
    lse_head = statistic_head_pointer(lse, batch, head, lse_stride_b, lse_stride_h)
    strides = out_strides, dout_strides, (dlse_stride_b, dlse_stride_h)
    lse_row, delta = lse_and_delta(
        out, dout, lse_head, dlse, batch, head, strides, first, rows, valid, HAS_DLSE, D, ALIGN,
        ACC,
    )  # fmt: skip
    start = stats + tl.cast(batch_head, tl.int64) * 2 * padded
    lse2 = base2(lse_row)
    tl.store(start + rows, lse2, mask=rows < padded)
    tl.store(start + padded + rows, -delta, mask=rows < padded)


def make_row_statistics(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """As `canon.fast.kernels.torch.launch.make_row_statistics`, in one launch."""
    lse, dlse = (
        portable.contiguous_rows(lse),
        None if dlse is None else portable.contiguous_rows(dlse),
    )
    stats, dlse_or_any = empty_statistics(lse), lse if dlse is None else dlse
    tensors = out, dout, lse, dlse_or_any
    options = {
        "HAS_DLSE": dlse is not None,
        **portable.row_options(out, dout, accumulate=torch.float32),
    }
    portable.run_rows(
        delta_stats_kernel, out.shape, (*tensors, stats, stats.shape[3]), tensors, options
    )
    return stats


def row_statistics(lse: Tensor, delta: Tensor, stats: Tensor | None = None) -> Tensor:
    """Return row statistics, written into ``stats`` if given."""
    stats = empty_statistics(lse) if stats is None else stats
    lse, delta = map(portable.contiguous_rows, (lse, delta))
    b, h, tokens, padded = *lse.shape, stats.shape[3]
    if stats.numel():
        arguments = (lse, delta, stats, tokens, padded, h, *portable.stride_arguments((lse, delta)))
        launch(
            softmax_stats_kernel,
            triton.cdiv(padded, TOKENS) * b * h,
            lse.device,
            arguments,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return stats


def empty_statistics(lse: Tensor) -> Tensor:
    """Return uninitialised row statistics. Raises ValueError if they exceed 2^31 elements."""
    b, h, tokens = lse.shape
    padded = -(-tokens // 4) * 4
    if 2 * b * h * padded >= 2**31:
        raise ValueError(
            f"the row statistics of {b} x {h} heads of {tokens} tokens exceed 32-bit offsets: use "
            "smaller batches"
        )
    return torch.empty(b, h, 2, padded, dtype=torch.float32, device=lse.device)
