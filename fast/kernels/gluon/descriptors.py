"""TMA descriptors of tensors (b, t, h, d), as boxes of some tokens and heads."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from canon.fast.kernels.launcher import tma_loadable

VECTOR = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def box(x: Tensor, tokens: int, heads: int, width: int) -> TensorDescriptor:
    """Return a descriptor of x (b, t, h, d), or of a copy unless x is `tma_loadable`."""
    return descriptor(x if tma_loadable(x) else empty_for_tma(x).copy_(x), 1, tokens, heads, width)


def descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """Return a TMA descriptor of x with these boxes."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(descriptor_fields(x.dtype, x.shape, x.stride(), block), base=x)
    return made


@lru_cache(maxsize=4096)
def descriptor_fields(
    dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], block: tuple[int, ...]
) -> dict:
    """Return its other fields, cached: Triton's checks are slow."""
    width = min(128, block[-1] * dtype.itemsize)
    layout = VECTOR if len(shape) == 1 else NVMMASharedLayout(width, 8 * dtype.itemsize, rank=4)
    inner, strided = _padded_width(dtype, shape), [1]
    for n, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        strided.insert(0, stride if n > 1 else inner)  # any, for an axis of length 1
        inner = n * strided[0]
    base = torch.empty(0, dtype=dtype, device="cpu")
    return vars(TensorDescriptor(base, list(shape), strided, list(block), layout))


def empty_for_tma(x: Tensor) -> Tensor:
    """Return an empty tensor like x (b, t, h, d) that TMA can load."""
    return x.new_empty(*x.shape[:3], _padded_width(x.dtype, x.shape))[..., : x.shape[3]]


def _padded_width(dtype: torch.dtype, shape: torch.Size) -> int:
    unit = 16 // dtype.itemsize
    return -(-shape[-1] // unit) * unit
