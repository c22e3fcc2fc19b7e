"""The tiles of a mask that hold a visible cell, and the tokens of a tile.

A tile is at most 128 queries x 128 keys, cut at multiples of 128. (On a GPU it is 512 x 512, unless
bits must not depend on the number of ranks: there a launch costs more than hidden cells.) Tiles
without a visible cell are skipped:

    causal, 384 tokens        keys 0-127    128-255    256-383       x  all cells are visible
    queries   0-127           /             .          .             /  some are
            128-255           x             /          .             .  none: never read
            256-383           x             x          /

The weight of a hidden cell is 0, but 0 * NaN is NaN. `over_visible` leaves hidden cells out, so a
NaN or an infinity reaches exactly the queries that see its token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from canon.masks.layout import TILE
from canon.masks.mask import Mask
from canon.route.checks import Scale, accumulate_dtype, split_scale

GPU_TILE = 512


def visible_tiles(
    mask: Mask, device: torch.device, by_keys: bool = False, whole_tiles: bool = False
) -> Iterator[tuple[slice, list]]:
    """Yield (queries, [(keys, visible), ...]) for each tile of queries; with ``by_keys``, queries
    and keys change roles.

    ``queries`` and ``keys`` are slices. ``visible`` (queries, keys) is the boolean mask of a tile.
    """
    size = TILE if whole_tiles or device.type == "cpu" else GPU_TILE
    tiles = [
        [range(a, min(a + size, n)) for a in range(0, n, size)]
        for n in ((mask.keys, mask.queries) if by_keys else (mask.queries, mask.keys))
    ]
    for outer in tiles[0]:
        cut = mask.crop(keys=outer) if by_keys else mask.crop(queries=outer)
        strip = []
        for inner in tiles[1]:
            tile = cut.crop(queries=inner) if by_keys else cut.crop(keys=inner)
            if tile.bands:
                strip.append((slice(inner.start, inner.stop), tile.dense().to(device)))
        yield slice(outer.start, outer.stop), strip


def in_whole_tiles(x: Tensor) -> Tensor:
    """Return x (b, tokens, heads, width) with zeros behind its tokens, up to a multiple of 128, and
    behind its columns, up to a multiple of 8.

    A product of other sizes may add in another order. With other widths, the BLAS of a CPU adds a
    row in an order that depends on its place, and a single column in one that depends on the number
    of heads.
    """
    missing = -x.shape[1] % TILE, -x.shape[3] % 8
    return pad(x, (0, missing[1], 0, 0, 0, missing[0])) if any(missing) else x


def mask_in_whole_tiles(mask: Mask) -> Mask:
    """Return the mask with hidden queries and keys behind its own, up to multiples of 128."""
    missing = -mask.queries % TILE, -mask.keys % TILE
    return Mask.concat([mask, Mask([], *missing)]) if any(missing) else mask


def heads_first(x: Tensor, share: int = 1) -> Tensor:
    """Return x (b, tokens, heads, width) as (b, heads, tokens, width) in the accumulation dtype.
    Each key head is repeated for the ``share`` query heads that use it.
    """
    x = x.transpose(1, 2).to(accumulate_dtype(x.dtype))
    return x if share == 1 else x.repeat_interleave(share, dim=1)


def read(x: Tensor, tokens: slice) -> Tensor:
    """Return these tokens of ``x`` (b, heads, tokens, width), contiguous: strides may change
    bits.
    """
    return x[:, :, tokens].contiguous()


def scores_of(q: Tensor, k: Tensor, scale: Scale) -> Tensor:
    """Return s = scale * q k^T, or softcap * tanh(s / softcap). Nothing is masked yet."""
    number, softcap = split_scale(scale)
    scores = number * q @ k.mT
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def slope_of(scores: Tensor, scale: Scale) -> Tensor | float:
    """Return the derivative of the scores with respect to q k^T: scale, times 1 - (scores /
    softcap)^2.
    """
    number, softcap = split_scale(scale)
    return number if softcap is None else number * (1 - (scores / softcap) ** 2)


def over_visible(weights: Tensor, x: Tensor, visible: Tensor, all_finite: bool) -> Tensor:
    """Return weights @ x over the visible cells. Tokens of ``x`` with NaN or infinities are
    multiplied cell by cell; with ``all_finite`` there are none.
    """
    if all_finite or (finite := x.isfinite()).all():
        return weights @ x
    rest = (~finite).any(-1).flatten(0, 1).any(0)
    cells = weights[..., rest, None] * x.masked_fill(finite, 0)[:, :, None, rest]
    return weights @ x.masked_fill(~finite, 0) + cells.masked_fill(
        ~visible[..., rest, None], 0
    ).sum(-2)
