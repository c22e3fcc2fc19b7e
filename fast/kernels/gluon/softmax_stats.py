"""Row statistics (lse and delta) in the form that the Hopper kernels read: aligned rows of one tensor, lse in base 2.

    stats (b, h, 2, padded):   lse * log2(e)   1e30 for queries that see no key: exp2(s - lse) is 0 without a comparison
                               -delta          the initial accumulator of dP - delta; both are 0 behind the last token

``padded`` is a multiple of 4 tokens, so TMA can load any box that begins at a fourth token. Numbers that a box reads from the
next row are finite. The kernel is plain Triton because it has no MMA. It reads and writes 16 b h t bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.launcher import launch
from canon.fast.kernels.triton.blocks import line_pointer

TOKENS = 256  # of each CTA


@triton.jit(do_not_specialize=["tokens", "padded", "heads"])
def softmax_stats_kernel(lse, delta, stats, tokens, padded, heads, lse_strides, delta_strides, TOKENS: tl.constexpr):
    """Write stats (b, h, 2, padded) from lse and delta (b, h, t), of any strides."""
    blocks = tl.cdiv(padded, TOKENS)
    batch_head = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    inside, at = token < tokens, tl.cast(token, tl.int64)
    lse_row = line_pointer(lse, batch_head // heads, batch_head % heads, lse_strides)
    delta_row = line_pointer(delta, batch_head // heads, batch_head % heads, delta_strides)
    x = tl.load(lse_row + at * lse_strides[2], mask=inside, other=0.0)
    x = tl.where(x == float("-inf"), 1e30, x * 1.4426950408889634)
    start = stats + tl.cast(batch_head, tl.int64) * 2 * padded
    tl.store(start + token, x, mask=token < padded)
    y = tl.load(delta_row + at * delta_strides[2], mask=inside, other=0.0)
    tl.store(start + padded + token, -y, mask=token < padded)


def row_statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """Return the row statistics (b, h, 2, padded), float32, of lse and delta (b, h, t).

    Raises ValueError if they are too many for offsets of 32 bits.
    """
    b, h, tokens = lse.shape
    padded = -(-tokens // 4) * 4
    if 2 * b * h * padded >= 2**31:
        raise ValueError(
            f"the row statistics of {b} x {h} heads of {tokens} tokens exceed 32-bit offsets: use smaller batches"
        )
    stats = torch.empty(b, h, 2, padded, dtype=torch.float32, device=lse.device)
    if stats.numel():
        arguments = (lse, delta, stats, tokens, padded, h, lse.stride(), delta.stride())
        ctas = triton.cdiv(padded, TOKENS) * b * h
        launch(softmax_stats_kernel, ctas, lse.device, arguments, TOKENS=TOKENS, num_warps=4)
    return stats
