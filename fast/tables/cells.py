"""The cells that a launch computes, and for ``rank_invariant=True`` the places of their tokens.

Then the work table of the whole mask fixes the bits of a result. A rank takes the tiles of its own
pieces and moves their coordinates to its buffers:

    whole sequence    tile of queries 256:384 visits keys 0:256 (full), 256:384 (partial)
    buffer of keys    rows 0:256 hold tokens 128:384, rows 256:384 of the next rank hold tokens
                      0:128
    moved table       visits rows 256:384, 0:128 (full), then rows 128:256 (partial): still in
                      sequence order

Pieces begin at multiples of 128, in the sequence and in buffers, and tile sides divide 128: no tile
holds two pieces."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from canon.fast.kernels.launcher import tma_loadable
from canon.fast.tables.index_ranges import expanded
from canon.fast.tables.key_order import moved_chains
from canon.masks.mask import Mask
from canon.route.rank_invariance import TILE, Piece


class Placement(NamedTuple):
    """The pieces of a buffer in sequence order: tokens ``start:stop`` are in the rows from ``start
    + shift`` on. ``end``: ``stop`` rounded up to whole tiles.
    """

    start: np.ndarray
    stop: np.ndarray
    end: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class Places:
    """The tokens that a buffer of ``queries`` rows and one of ``keys`` rows hold, in pieces (first
    row, tokens). Raises ValueError if one does not begin at multiples of 128.
    """

    query_pieces: tuple[Piece, ...]
    key_pieces: tuple[Piece, ...]
    queries: int
    keys: int

    def __post_init__(self):
        for row, tokens in (*self.query_pieces, *self.key_pieces):
            if row % TILE or tokens.start % TILE or tokens.step != 1:
                raise ValueError(
                    f"tokens {tokens} at row {row} do not begin at a multiple of {TILE}"
                )

    @cached_property
    def _hash(self) -> int:
        return hash((self.query_pieces, self.key_pieces, self.queries, self.keys))

    def __hash__(self) -> int:
        return self._hash

    @property
    def nbytes(self) -> int:
        return 500 + 200 * (len(self.query_pieces) + len(self.key_pieces))

    def placement(self, keys: bool) -> Placement:
        pieces = sorted(
            self.key_pieces if keys else self.query_pieces, key=lambda piece: piece[1].start
        )
        row, start, stop = (
            np.array([(r, x.start, x.stop) for r, x in pieces], np.int64).reshape(-1, 3).T
        )
        return Placement(start, stop, -(-stop // TILE) * TILE, row - start)

    def owned(self, starts: np.ndarray, keys: bool) -> np.ndarray:
        """Return which tiles, given by their first tokens, are in the buffer (bool)."""
        own = self.placement(keys)
        place = np.searchsorted(own.start, starts, "right") - 1
        inside = place >= 0
        inside[inside] = starts[inside] < own.stop[place[inside]]
        return inside

    def moved(
        self, tiles: np.ndarray, spans: np.ndarray, columns: int, transposed: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the own tiles and spans of the whole mask's `ordered_table`, in rows of the
        buffers. Raises RuntimeError if a buffer lacks visited tokens.
        """
        own, visited = self.placement(transposed), self.placement(not transposed)
        tiles = tiles[self.owned(tiles[:, 0], transposed)]
        down = own.shift[np.searchsorted(own.start, tiles[:, 0], "right") - 1]
        tile, span = expanded(tiles[:, 2], tiles[:, 4])
        first = spans[span, 0].astype(np.int64)
        last = first + spans[span, 1] * columns
        part, piece = expanded(
            np.searchsorted(visited.end, first, "right"),
            np.searchsorted(visited.start, last, "left"),
        )
        begin = np.maximum(first[part], visited.start[piece])
        end = np.minimum(last[part], visited.end[piece])
        if (end - begin).sum() != (last - first).sum():
            raise RuntimeError("a buffer lacks tokens that its tiles visit")
        tile, right = tile[part], visited.shift[piece]
        made = spans[span[part]].astype(np.int64)
        made[:, 0], made[:, 1] = begin + right, (end - begin) // columns
        moves = np.stack(
            [down[tile], down[tile], right, right, right - down[tile], right - down[tile]], 1
        )
        made[:, 2:] += np.where(made[:, 3:4] > 0, moves, 0)
        chains = moved_chains(made, spans, moves)
        stops = np.cumsum(np.bincount(tile, minlength=len(tiles)))
        rows = tiles[:, :2] + down[:, None]
        return np.stack(
            [*rows.T, np.append(0, stops)[: len(tiles)], stops, stops], 1
        ), np.concatenate([made, chains])

    def untouched(
        self, keys: bool, tokens: int, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranges of rows of a buffer without a token that the whole mask touches.

        ``starts:stops`` are the untouched ones of all ``tokens``, in disjoint ranges."""
        edges = np.zeros(tokens + 1, np.int8)
        edges[starts], edges[stops] = 1, -1
        free = np.cumsum(edges, dtype=np.int8)
        rows = np.ones((self.keys if keys else self.queries) + 2, np.int8)
        rows[0] = rows[-1] = 0
        for row, piece in self.key_pieces if keys else self.query_pieces:
            rows[1 + row : 1 + row + len(piece)] = free[piece.start : piece.stop]
        changes = np.flatnonzero(np.diff(rows))
        return changes[::2], changes[1::2]


class Cells(NamedTuple):
    """The visible cells of ``mask`` between a buffer of queries and one of keys.

    ``places``: the tokens that the buffers hold, of the sequence of ``mask``; every row then sums
    in the order of the keys' positions (`key_order`). None: the buffers are the sequence, and a
    kernel chooses the order."""

    mask: Mask
    places: Places | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        rows = self.mask if self.places is None else self.places
        return rows.queries, rows.keys

    @property
    def area(self) -> int:
        if self.places is None:
            return self.mask.area
        pairs = product(self.mask.bands, self.places.query_pieces, self.places.key_pieces)
        return sum(band.pick(queries, keys).area for band, (_, queries), (_, keys) in pairs)

    def crop_keys(self, keys: range) -> "Cells":
        """Return the cells of these rows of keys; with places, of whole tiles."""
        if (own := self.places) is None:
            return Cells(self.mask.crop(keys=keys))
        pieces = _kept(own.key_pieces, keys)
        return Cells(self.mask, replace(own, key_pieces=pieces, keys=len(keys)))


def in_place(mask: Mask) -> Places:
    """Return the places on one rank."""
    sizes = mask.queries, mask.keys
    return Places(*(((0, range(size)),) if size else () for size in sizes), *sizes)


def aligned(x: Tensor) -> Tensor:
    """Return x (b, t, h, d), or a copy if TMA cannot load it: it would get another
    configuration.
    """
    return x if tma_loadable(x, every_axis=True) else canonical(x)


def canonical(x: Tensor) -> Tensor:
    """Return x or a contiguous copy, aligned and strided as a new tensor: this decides the order in
    which delta is added.
    """
    if x.data_ptr() % 16 or not x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x.reshape(-1).view(x.shape)  # an axis of length 1 may have any stride


def _kept(pieces: Iterable[Piece], rows: range) -> tuple[Piece, ...]:
    parts = [
        (max(row, rows.start), tokens[max(0, rows.start - row) : max(0, rows.stop - row)])
        for row, tokens in pieces
    ]
    return tuple((row - rows.start, tokens) for row, tokens in parts if tokens)
