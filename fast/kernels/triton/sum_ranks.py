"""The sum of what the ranks sent, in rank order: one pass over memory, each element read once and written once.

Every addition rounds to the dtype that was sent, as if the sum had travelled from rank to rank. One fixed order: the same
inputs give the same bits, which NCCL's own reductions promise for one topology only.
"""

import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.triton import launch
from canon.fast.kernels.triton.blocks import head_pointer, load_some_rows, offsets, store_rows


@triton.jit(do_not_specialize=["tokens", "heads", "lines"])
def sum_ranks_kernel(
    received,
    total,
    tokens,
    heads,
    rank_stride,
    lines,
    received_strides,
    total_strides,
    RANKS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
):
    """total (b, t, h, d) = the sum over r of received (b, t, h, d) + r * rank_stride, first to last."""
    first = tl.program_id(0) // lines * BM
    batch, head = tl.program_id(0) % lines // heads, tl.program_id(0) % lines % heads
    here = first + tl.arange(0, BM) < tokens
    offset = offsets(received_strides, BM, D_PAD, UNIT)
    pointer = head_pointer(received, batch, head, received_strides, UNIT)
    acc = load_some_rows(pointer, offset, first, received_strides[1], here, D, D_PAD)
    for rank in range(1, RANKS):
        part = pointer + tl.cast(rank, tl.int64) * rank_stride
        acc += load_some_rows(part, offset, first, received_strides[1], here, D, D_PAD)
    total_head = head_pointer(total, batch, head, total_strides, UNIT)
    store_rows(total_head, offsets(total_strides, BM, D_PAD, UNIT), first, total_strides[1], here, acc, D, D_PAD)


def sum_ranks(received: Tensor, total: Tensor) -> None:
    """Writes total (b, t, h, d) = the sum of received (b, W, t, h, d) over W, first to last, in received's dtype."""
    first = received[:, 0]
    width = total.shape[-1]
    arguments = (first, total, total.shape[1], total.shape[2], received.stride(1))
    options = {
        "RANKS": received.shape[1],
        "D": width,
        "D_PAD": launch.padded(width),
        "UNIT": launch.unit(received, total),
        "BM": launch.ROWS.rows,
    }
    lines = launch.batch_heads(total)
    launch.run(sum_ranks_kernel, launch.programs(total), launch.ROWS, arguments, lines, (first, total), options)
