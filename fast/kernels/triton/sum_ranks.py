"""Sum received tensors in rank order, in one pass."""

import triton.language as tl
from torch import Tensor

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import (
    CTA_ROWS,
    ROW_NUMBERS,
    cta_rows,
    kernel,
    load_rows,
    rows_of,
    store_rows,
)
from canon.route.checks import accumulate_dtype


@kernel(*ROW_NUMBERS)
def sum_ranks_kernel(
    received,
    total,
    rank_stride,
    tokens,
    heads,
    batch_heads,
    received_strides,
    total_strides,
    RANKS: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write total: the sum of received + r * rank_stride over r."""
    first, _, valid, batch, head = cta_rows(tokens, heads, batch_heads)
    source = rows_of(received, batch, head, received_strides, CTA_ROWS, D, ALIGN)
    acc = load_rows(source, first, valid, D).to(ACC)
    for rank in range(1, RANKS):
        part = source[0] + tl.cast(rank, tl.int64) * rank_stride
        acc += load_rows((part, source[1], received_strides), first, valid, D).to(ACC)
    store_rows(rows_of(total, batch, head, total_strides, CTA_ROWS, D, ALIGN), first, valid, acc, D)


def sum_ranks(received: Tensor, total: Tensor) -> None:
    """As `canon.fast.kernels.torch.rows.sum_ranks`."""
    tensors = received[:, 0], total
    options = launch.row_options(received, total, accumulate=accumulate_dtype(received.dtype))
    options["RANKS"] = received.shape[1]
    launch.run_rows(sum_ranks_kernel, total.shape, (*tensors, received.stride(1)), tensors, options)
