"""lse and delta as the Hopper kernels read them: whole, aligned lines in one tensor, lse in base 2.

    lines (b, h, 2, padded):   lse * log2(e)   1e30 in rows that see no key, so that exp2(s - lse) = 0 without a compare
                               -delta          0 behind the last token, as is lse: a product begins at it

A box of any 4 n tokens from any fourth one on can be fetched by TMA; what it reads of the next line is finite.
Written in Triton: there is no product in it.
Traffic: 16 b h t bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from canon.fast.kernels.launcher import launch
from canon.fast.kernels.triton.blocks import statistic_head_pointer

TOKENS = 256  # a program


@triton.jit(do_not_specialize=["tokens", "padded", "heads"])
def softmax_stats_kernel(lse, delta, lines, tokens, padded, heads, lse_strides, delta_strides, TOKENS: tl.constexpr):
    """lines (b, h, 2, padded) from lse and delta (b, h, t), of any strides."""
    blocks = tl.cdiv(padded, TOKENS)
    line = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    here, at = token < tokens, tl.cast(token, tl.int64)
    lse_line = statistic_head_pointer(lse, line // heads, line % heads, lse_strides)
    delta_line = statistic_head_pointer(delta, line // heads, line % heads, delta_strides)
    x = tl.load(lse_line + at * lse_strides[2], mask=here, other=0.0)
    x = tl.where(x == float("-inf"), 1e30, x * 1.4426950408889634)
    start = lines + tl.cast(line, tl.int64) * 2 * padded
    tl.store(start + token, x, mask=token < padded)
    y = tl.load(delta_line + at * delta_strides[2], mask=here, other=0.0)
    tl.store(start + padded + token, -y, mask=token < padded)


def row_statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """lines (b, h, 2, padded), float32, from lse and delta (b, h, t). Raises ValueError if 32 bits do not count them."""
    b, h, tokens = lse.shape
    padded = -(-tokens // 4) * 4
    if 2 * b * h * padded >= 2**31:
        raise ValueError(f"{b} x {h} lines of {tokens} tokens are more than 32 bits count: use smaller batches")
    lines = torch.empty(b, h, 2, padded, dtype=torch.float32, device=lse.device)
    if lines.numel():
        arguments = (lse, delta, lines, tokens, padded, h, lse.stride(), delta.stride())
        launch(
            softmax_stats_kernel, triton.cdiv(padded, TOKENS) * b * h, lse.device, arguments, TOKENS=TOKENS, num_warps=4
        )
    return lines
