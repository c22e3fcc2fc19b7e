"""The tiles of a mask that hold a visible cell, and how their tokens are read."""

from collections.abc import Iterator

import torch
from torch import Tensor

from canon.reference.checks import accumulate_dtype
from canon.reference.mask import Mask

TILE = 128  # tokens along each side of a tile


def visible_tiles(mask: Mask, device: torch.device, by_keys: bool = False) -> Iterator[tuple[slice, list]]:
    """For each tile of queries (of keys, if ``by_keys``): those of the other side with a visible cell, and which."""
    tiles = [
        [range(a, min(a + TILE, n)) for a in range(0, n, TILE)]
        for n in ((mask.keys, mask.queries) if by_keys else (mask.queries, mask.keys))
    ]
    for outer in tiles[0]:
        strip = mask.crop(keys=outer) if by_keys else mask.crop(queries=outer)
        line = []
        for inner in tiles[1]:
            cell = strip.crop(queries=inner) if by_keys else strip.crop(keys=inner)
            if cell.bands:
                line.append((slice(inner.start, inner.stop), cell.dense().to(device)))
        yield slice(outer.start, outer.stop), line


def read(x: Tensor, tokens: slice, used: Tensor) -> Tensor:
    """A tile in the accumulation dtype; a token without a visible cell in it is read as zeros, as it may hold NaN."""
    return x[:, :, tokens].to(accumulate_dtype(x.dtype)).masked_fill(~used[:, None], 0)


def read_keys(k: Tensor, v: Tensor, columns: slice, seen: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A tile of k and of v, each key head once for every query head of its group."""
    k, v = (read(x, columns, seen.any(0)).repeat_interleave(group, dim=1) for x in (k, v))
    return k, v
