"""What a case runs on, and what it should give: a whole sequence made of documents, its mask, and the judge's answers.

All layouts and functions of one mask and dtype share one input, and so the answers, which cost more than the runs.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from canon.reference import Layout, Mask
from canon.testing.cases import DTYPES, Case, Shape
from canon.testing.documents import Documents, projected
from canon.testing.judge import Attended, oracle, orders


def with_gaps(x: Tensor) -> Tensor:
    """x in memory of its own, with a gap behind each row."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 16)[..., : x.shape[-1]].copy_(x)


@dataclass(frozen=True)
class Inputs:
    """A whole sequence, the same on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Mask
    scale: float | None


def inputs(case: Case, documents: Documents, device: str) -> Inputs:
    """What ``case`` runs on; every layout, and every function, of one mask and dtype gets the same."""
    return _inputs(case.mask, case.dtype, case.shape, documents, device)


def mask_of(case: Case, documents: Documents) -> Mask:
    """The mask of ``case``, for cases that need no more."""
    return _mask(case.mask, documents)


@lru_cache(maxsize=12)
def _inputs(mask_name: str, dtype_name: str, shape: Shape, documents: Documents, device: str) -> Inputs:
    dtype, tokens = DTYPES[dtype_name], documents.tokens
    rows = [
        projected(documents, Layout.zigzag(tokens, 3), shape.heads, shape.widths, row)
        for row in range(shape.batch or 1)
    ]
    q, k, v = (torch.stack(x) for x in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator)
    if dtype.itemsize == 2:
        lean = _lean(documents)[:, None, None]
        v, dout = v + lean, dout + lean
    dlse = 4 * torch.randn(q.shape[0], q.shape[2], tokens, generator=generator)
    mask = _mask(mask_name, documents)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    for x, unseen in ((q, _unseen(mask, 0)), (dout, _unseen(mask, 0)), (k, _unseen(mask, 1)), (v, _unseen(mask, 1))):
        x[:, unseen] = torch.nan
    dlse = dlse.double() if dtype == torch.float64 else dlse
    tensors = [x if shape.batch else x[0] for x in (q, k, v, dout, dlse)]
    return Inputs(*(x.to(device) for x in tensors), mask, shape.scale)


def _mask(name: str, documents: Documents) -> Mask:
    cu_seqlens, tokens = documents.cu_seqlens, documents.tokens
    if name == "block_causal":  # each document sees itself and those before it, but for a little padding
        blocks = torch.repeat_interleave(torch.arange(len(documents.lengths)), torch.tensor(documents.lengths))
        place = torch.arange(tokens) / max(1, tokens)
        return Mask.block_causal(blocks, q_valid=(place < 0.6) | (place > 0.7), k_valid=(place < 0.65) | (place > 0.8))
    return {
        "documents": lambda: Mask.documents(cu_seqlens),
        "causal": lambda: Mask.causal(tokens),
        "window": lambda: Mask.window(tokens, tokens // 5, 16),
        "full": lambda: Mask.documents(cu_seqlens, causal=False),
    }[name]()


def _lean(documents: Documents) -> Tensor:
    """What is added to v and dout of 16 bits: 3 in the outer quarters of a token's document, -3 in the middle half.

    Sums over a document cancel, those over a part of it do not. So rounding partial sums to 16 bits shows, as it would
    not among numbers without a sign in common, while the honest error, which is one per term, stays what it is.
    """
    places = torch.cat([torch.arange(n) / max(1, n) for n in documents.lengths])
    return torch.where((places < 0.25) | (places >= 0.75), 3.0, -3.0)


def _unseen(mask: Mask, axis: int) -> Tensor:
    """Queries (0) that see no key, or keys (1) that no query sees."""
    unseen = torch.ones(mask.keys if axis else mask.queries, dtype=torch.bool)
    for band in mask.bands:  # every row and column of a band is seen
        unseen[slice(band.k_start, band.k_stop) if axis else slice(band.q_start, band.q_stop)] = False
    return unseen


@lru_cache(maxsize=12)
def _expected(
    mask_name: str, dtype_name: str, shape: Shape, documents: Documents, device: str, wide: bool, with_lse: bool
):
    x = _inputs(mask_name, dtype_name, shape, documents, device)
    tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) if wide else t for t in (x.q, x.k, x.v, x.dout)]
    arguments = (*tensors, x.mask, x.scale, x.dlse if with_lse else None)
    return oracle(*arguments), orders(*arguments)


def expected(case: Case, documents: Documents, device: str) -> tuple[Attended, list[Attended]]:
    """The oracle's answer, and honest ones in the dtype of the case; a merge is of float32 parts, and held to that."""
    wide, with_lse = case.function == "merge", case.variant != "plain"
    return _expected(case.mask, case.dtype, case.shape, documents, device, wide, with_lse)
