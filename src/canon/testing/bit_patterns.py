"""Compare the bits of tensors."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The first token and head with other bits, and `distance` there."""

    token: int
    head: int
    out: float
    lse: float


def digest(x: Tensor) -> str:
    """Return a hexadecimal digest of the bits."""
    return hashlib.sha256(
        x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def patterns(x: Tensor) -> Tensor:
    """Return bits as whole numbers. NaN equals NaN, and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y| in units of the last place of the larger number; infinite unless both are
    finite.
    """
    if x.dtype != y.dtype:
        raise ValueError(f"expected tensors of one dtype, got {x.dtype} and {y.dtype}")
    kind, (a, b) = torch.finfo(x.dtype), (t.double() for t in (x, y))
    exponent = torch.frexp(torch.maximum(a.abs(), b.abs()).clamp(min=kind.tiny)).exponent
    steps = (a - b).abs() / torch.ldexp(torch.full_like(a, kind.eps), exponent - 1)
    return torch.where(patterns(x) == patterns(y), 0.0, steps.nan_to_num(torch.inf))


def first_difference(
    out: Tensor, lse: Tensor, expected_out: Tensor, expected_lse: Tensor
) -> Place | None:
    """Return the first place with other bits in out (t, h, dv) or lse (h, t), or None. Raises
    ValueError for other shapes.
    """
    for name, x, y in (("out", out, expected_out), ("lse", lse, expected_lse)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"{name} is {tuple(x.shape)} in {x.dtype}, expected {tuple(y.shape)} in {y.dtype}"
            )
    differs = (patterns(out) != patterns(expected_out)).any(-1) | (
        patterns(lse) != patterns(expected_lse)
    ).T
    if not differs.any():
        return None
    token, head = (int(i) for i in differs.nonzero()[0])
    of_out = distance(out[token, head], expected_out[token, head]).max()
    return Place(
        token, head, of_out.item(), distance(lse[head, token], expected_lse[head, token]).item()
    )
