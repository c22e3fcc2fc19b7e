"""The row operations of the Triton kernels: the functions of `canon.fast.kernels.torch.rows`."""

from canon.fast.kernels.triton.launch import delta, merge, sum_heads
from canon.fast.kernels.triton.rows import (
    add_rows,
    add_to_rows,
    copy_rows,
    copy_statistics,
    copy_tokens,
    take_rows,
)
from canon.fast.kernels.triton.sink import apply_sink, differentiate_sink
from canon.fast.kernels.triton.sum_ranks import sum_ranks

__all__ = [
    "add_rows",
    "add_to_rows",
    "apply_sink",
    "copy_rows",
    "copy_statistics",
    "copy_tokens",
    "delta",
    "differentiate_sink",
    "merge",
    "sum_heads",
    "sum_ranks",
    "take_rows",
]
