"""Record the messages of a ring of `canon.reference`, with their tensors, and the dtypes of its parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor


@dataclass(frozen=True)
class SentHop:
    """A message of a reference ring: the ``tensors`` of the keys of ``owner``."""

    step: int
    sender: int
    owner: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


@contextmanager
def recorded_hops(ring: ModuleType) -> Iterator[list[SentHop]]:
    """Yield a list of every hop that `canon.reference.ring` sends inside the block, on all ranks."""
    hops: list[SentHop] = []

    class RecordedHop(ring.Hop):
        def __init__(self, tensors, step, call):
            hops.append(SentHop(step - 1, call.rank, (call.rank - step + 1) % call.ranks, tuple(tensors)))
            super().__init__(tensors, step, call)

    with mock.patch.object(ring, "Hop", RecordedHop):
        yield hops


@contextmanager
def merged_dtypes(ring: ModuleType) -> Iterator[set[torch.dtype]]:
    """Yield a set of the dtypes of every out and lse that a ring merges inside the block, on all ranks."""
    dtypes: set[torch.dtype] = set()
    merged = ring.merged

    def recorded(*parts: Tensor) -> tuple[Tensor, Tensor]:
        dtypes.update(part.dtype for part in parts)
        return merged(*parts)

    with mock.patch.object(ring, "merged", recorded):
        yield dtypes
