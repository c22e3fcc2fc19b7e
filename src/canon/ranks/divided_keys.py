"""Bring the keys of all ranks to every rank, in order: for ``decode_attention(...,
rank_invariant=True)``. A merge of parts would have other bits.

A rank gathers n x 3 numbers, all bands (7 numbers each), and K and V, padded to the longest. The
host waits for the first two.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.band import Band
from canon.masks.layout import TILE
from canon.masks.mask import Mask, Masks

EVERY = -1  # the place of a band of all sequences


def keys_of_all_ranks(
    function: str, k: Tensor, v: Tensor, mask: Masks, group: dist.ProcessGroup | None, ranks: int
) -> tuple[Tensor, Tensor, Masks]:
    """Return k (*b, s, g, d), v (*b, s, g, dv) and the mask over the keys of all ranks: a mask for
    each sequence, if a rank has these. Raises as `check_starts`, on every rank.
    """
    if ranks == 1 or (k.ndim == 4 and not k.shape[0]):
        return k, v, mask
    each = [(EVERY, mask)] if isinstance(mask, Mask) else list(enumerate(mask))
    numbers = [(place, *band) for place, one in each for band in one.bands]
    bands = torch.tensor(numbers, dtype=torch.int64, device=k.device).reshape(-1, 7)
    counts = k.shape[-3], len(bands), 0 if isinstance(mask, Mask) else len(each)
    sizes = torch.stack(_gathered(torch.tensor(counts, device=k.device), group, ranks)).tolist()
    starts = check_starts(function, [keys for keys, _, _ in sizes])
    every_band = _gathered(_padded(bands, max(number for _, number, _ in sizes)), group, ranks)
    sequences = max(number for _, _, number in sizes)  # 0: one mask on all ranks
    found: list[list[Band]] = [[] for _ in range(max(1, sequences))]
    for (_, number, _), start, numbers in zip(sizes, starts, every_band, strict=False):
        for place, q_start, q_stop, k_start, k_stop, lo, hi in numbers[:number].tolist():
            band = Band(q_start, q_stop, k_start, k_stop, lo, hi).shift(keys=start)
            for bands_of_one in found if place == EVERY else [found[place]]:
                bands_of_one.append(band)
    whole = [Mask.of_disjoint(own, each[0][1].queries, starts[-1]) for own in found]
    both = torch.cat([k.flatten(-2), v.flatten(-2)], -1)
    parts = _gathered(_padded(both, max(keys for keys, _, _ in sizes)), group, ranks)
    both = torch.cat(
        [x.narrow(-2, 0, keys) for x, (keys, _, _) in zip(parts, sizes, strict=True)], -2
    )
    k_whole, v_whole = both.split([k.shape[-2] * k.shape[-1], v.shape[-2] * v.shape[-1]], -1)
    k_whole, v_whole = k_whole.unflatten(-1, k.shape[-2:]), v_whole.unflatten(-1, v.shape[-2:])
    return k_whole.contiguous(), v_whole.contiguous(), whole if sequences else whole[0]


def check_starts(function: str, sizes: list[int]) -> list[int]:
    """Return the first key of each rank, multiples of 128 or ValueError, and the number of all."""
    starts = [0]
    for rank, keys in enumerate(sizes):
        if keys and starts[-1] % TILE:
            raise ValueError(
                f"{function}: rank_invariant=True needs keys that begin at a multiple of {TILE} on "
                f"each rank; those of rank {rank} begin at {starts[-1]}: give every rank but the "
                f"last a multiple of {TILE} keys"
            )
        starts.append(starts[-1] + keys)
    return starts


def _gathered(x: Tensor, group: dist.ProcessGroup | None, ranks: int) -> list[Tensor]:
    received = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(received, x.contiguous(), group=group)
    return received


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[-2]))
