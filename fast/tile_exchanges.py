"""Exchanges of whole tiles between ranks, for `owner_computes.py`: all-gathers, or group casts of the needed tokens.

    exchange         a buffer holds, in rows                                       used by
    `OwnTokens`      the own tokens; nothing is sent                               one rank
    `TileGather`     of each rank the room of the largest shard                    `strided_attention`
    `TileCast`       own tokens, then needed tiles by source and by row            `magi_attention`

Every piece begins at a multiple of 128 rows, so rooms are rounded up to whole tiles, and a cast sends whole tiles. A rank whose
last tile is short sends copies of its last token behind it. These rows are masked.

`TileGather` has two buffers, which alternate from leg to leg: kernels read one while the other one receives. A `TileCast`
allocates a buffer for each leg. On GPUs, copies into buffers run on the communication stream.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.fast.exchange import PendingKeys
from canon.fast.kernels.device_plans import device_plan
from canon.fast.kernels.placed_mask import PlacedMask, shifted
from canon.fast.kernels.triton.rows import take_rows
from canon.fast.owner_computes import Leg
from canon.fast.planner import areas_and_needs
from canon.fast.transport import transport_for
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.runtime.call import Call
from canon.runtime.rank_invariance import TILE, Piece, pieces_of, transposed


def whole_tiles(tokens: int) -> int:
    """Return the number of tokens, rounded up to whole tiles."""
    return -(-tokens // TILE) * TILE


class OwnTokens:
    """One rank: the buffers are the inputs themselves."""

    rows = ()  # nothing is kept: see `TileCast`

    def __init__(self, call: Call):
        own = pieces_of(call.layout, 0)
        self.key_mask = self.query_mask = _placed(call.mask, own, own, call.layout.tokens, call.layout.tokens)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], PendingKeys]:
        """Return a function whose result holds the own tensors of a leg."""
        return lambda number: PendingKeys([], [x for message in legs[number].messages for x in message])


class TileGather:
    """All-gathers. A message is one buffer (W room, b, heads, sum of widths), in rank order."""

    def __init__(self, call: Call):
        self.call, self.room = call, _room(call.layout)
        self.key_mask, self.query_mask = _gathered_masks(call.layout, call.mask, call.rank)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], PendingKeys]:
        """Allocate the buffers, and return the function that starts to gather the tensors of a leg."""
        first = next(x for leg in legs for message in leg.messages for x in message)
        transport = transport_for(self.call.group, first.device)
        sizes = [sum(map(self._bytes, leg.messages)) for leg in legs]
        buffers = [
            transport.empty(f"gather {slot}", max(sizes[slot::2]), torch.uint8, first.device)
            for slot in range(min(2, len(legs)))
        ]
        return partial(self._fetch, legs, transport, buffers)

    def _bytes(self, message: Sequence[Tensor]) -> int:
        x = message[0]
        elements = self.call.ranks * self.room * x.shape[0] * x.shape[2] * sum(y.shape[-1] for y in message)
        return -(-elements * x.element_size() // 256) * 256

    def _fetch(self, legs: Sequence[Leg], transport, buffers: Sequence[Tensor], number: int) -> PendingKeys:
        start, flat, tensors = 0, [], []
        first, size = self.call.rank * self.room, self.call.layout.size(self.call.rank)
        with transport.on_communication_stream():
            for message in legs[number].messages:
                x, widths = message[0], [y.shape[-1] for y in message]
                shape = self.call.ranks * self.room, x.shape[0], x.shape[2], sum(widths)
                stop = start + prod(shape) * x.element_size()
                flat.append(buffers[number % 2][start:stop].view(x.dtype))
                start += self._bytes(message)
                rows = flat[-1].view(shape)
                rows[first + size : first + self.room].zero_()
                made = rows.transpose(0, 1).split(widths, -1)
                for target, source in zip(made, message, strict=True):
                    target[:, first : first + size].copy_(source)
                tensors += made
            works = [transport.all_gather(x) for x in flat]
        if number:  # the next kernel fills all SMs: a gather that starts later would wait for its end
            transport.wait_until_started()
        return PendingKeys(works, tensors)


class TileCast:
    """Group casts: the tiles of keys that own queries see, and those of queries that see own keys.

    ``kept``: rows of keys that an earlier cast has brought, or an empty tuple. With ``keep``, `rows` holds those of this one.
    """

    def __init__(self, call: Call, kept: Sequence[Tensor] = (), keep: bool = False):
        self.call, self.kept, self.keep, self.rows = call, kept, keep, ()
        self.plans = {
            of_queries: _cast_of(call.layout, call.mask, call.rank, of_queries) for of_queries in (False, True)
        }
        own, size = pieces_of(call.layout, call.rank), call.layout.size(call.rank)
        keys, queries = self.plans[False], self.plans[True]
        self.key_mask = _placed(call.mask, own, keys.pieces, size, keys.rows)
        self.query_mask = _placed(call.mask, queries.pieces, own, queries.rows, size)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], PendingKeys]:
        """Return the function that starts to cast the tensors of a leg."""
        return lambda number: self._fetch(legs[number], number)

    def _fetch(self, leg: Leg, number: int) -> PendingKeys:
        plan, pairs = self.plans[leg.of_queries], self._pairs(leg)
        if self.kept and not leg.of_queries:
            return PendingKeys([], _columns(self.kept[0], pairs[0][0].shape[-1]))
        brought = [x.new_empty(plan.rows, x.shape[0], x.shape[2], x.shape[3] + y.shape[3]) for x, y in pairs]
        works, sent = [], [rows.new_empty(sum(plan.sent), *rows.shape[1:]) for rows in brought]
        transport = transport_for(self.call.group, brought[0].device)
        with transport.on_communication_stream():
            for pair, rows, part in zip(pairs, brought, sent, strict=True) if plan.travels else ():
                take_rows(*pair, _sent_rows(plan, part.device), part.transpose(0, 1))
                sizes = plan.received, plan.sent
                works.append(
                    dist.all_to_all_single(rows[plan.own :], part, *sizes, group=transport.gathers, async_op=True)
                )
        if number:  # the next kernel fills all SMs: a cast that starts later would wait for its end
            transport.wait_until_started()
        for pair, rows in zip(pairs, brought, strict=True):  # copied while the others are in flight
            for target, source in zip(_columns(rows, pair[0].shape[-1]), pair, strict=True):
                target[:, : source.shape[1]].copy_(source)
            rows[pair[0].shape[1] : plan.own].zero_()
        if self.keep and not leg.of_queries:
            self.rows = (brought[0],)
        columns = [x for pair, rows in zip(pairs, brought, strict=True) for x in _columns(rows, pair[0].shape[-1])]
        return _PendingCast(works, columns, sent)

    def _pairs(self, leg: Leg) -> list[tuple[Tensor, ...]]:
        """Return the tensors of a leg in pairs of one dtype. A message carries a pair."""
        tensors = [x for message in leg.messages for x in message]
        return list(zip(tensors[::2], tensors[1::2], strict=True))


def _columns(rows: Tensor, width: int) -> list[Tensor]:
    """Return rows (tokens, b, heads, both widths) as two tensors (b, tokens, heads, width)."""
    return list(rows.transpose(0, 1).split([width, rows.shape[-1] - width], -1))


class _PendingCast(PendingKeys):
    """Casts in flight. ``sent`` is kept until they have ended."""

    def __init__(self, works, keys: Sequence[Tensor], sent: Sequence[Tensor]):
        super().__init__(works, keys)
        self.sent = sent

    def wait(self) -> Sequence[Tensor]:
        """As `PendingKeys.wait`. Then the memory of the sent rows may be used again."""
        keys = super().wait()
        self.sent = ()
        return keys


class CastOfTiles:
    """A group cast of whole tiles, for one rank: a buffer of ``rows`` holds ``pieces``, the own ones first.

    ``sent`` and ``received``: rows by rank. ``index``: the own rows that are sent, by receiver. ``travels``: whether any rank
    receives a tile. The receivers of a token are the ranks with queries that see it in ``mask``.
    """

    def __init__(self, layout: Layout, mask: Mask, rank: int):
        owner, row = _tile_owners(layout)
        need = _needed_tiles(layout, mask)
        need[owner, np.arange(len(owner))] = False
        received = np.flatnonzero(need[rank])
        received = received[np.lexsort((row[received], owner[received]))]
        sent = [tiles[np.argsort(row[tiles])] for tiles in (np.flatnonzero(each & (owner == rank)) for each in need)]
        self.travels = bool(need.any())
        self.received = (TILE * np.bincount(owner[received], minlength=layout.ranks)).tolist()
        self.sent = [TILE * len(tiles) for tiles in sent]
        self.own = whole_tiles(layout.size(rank))
        self.rows = self.own + sum(self.received)
        pieces = [
            (TILE * at, range(TILE * tile, min(TILE * (tile + 1), layout.tokens)))
            for at, tile in enumerate(received.tolist())
        ]
        self.pieces = _joined([*pieces_of(layout, rank), *shifted(pieces, self.own)])
        index = (row[np.concatenate(sent)][:, None] + np.arange(TILE)).ravel()
        self.index = np.minimum(index, max(0, layout.size(rank) - 1))  # behind a short tile: its last token

    @property
    def nbytes(self) -> int:
        """The memory on the host, in bytes (an estimate)."""
        return 500 + 100 * len(self.pieces) + self.index.nbytes


def _tile_owners(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each tile of the sequence, and its first row there."""
    tiles = whole_tiles(layout.tokens) // TILE
    owner, row = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
    for rank in range(layout.ranks):
        for first, tokens in pieces_of(layout, rank):
            held = slice(tokens.start // TILE, whole_tiles(tokens.stop) // TILE)
            owner[held], row[held] = rank, first + TILE * np.arange(held.stop - held.start)
    return owner, row


def _needed_tiles(layout: Layout, mask: Mask) -> np.ndarray:
    """Return the tiles of keys that the queries of each rank see: bool (ranks, tiles)."""
    pieces = sorted(
        (tokens.start, tokens.stop, rank) for rank in range(layout.ranks) for _, tokens in pieces_of(layout, rank)
    )
    start, stop, rank = np.array(pieces, np.int64).reshape(-1, 3).T
    _, piece, first, last = areas_and_needs(mask, start, stop)
    ends = np.zeros((layout.ranks, whole_tiles(layout.tokens) // TILE + 1), np.int64)
    np.add.at(ends, (rank[piece], first // TILE), 1)
    np.add.at(ends, (rank[piece], -(-last // TILE)), -1)
    return np.cumsum(ends, 1)[:, :-1] > 0


@device_plan
def _sent_rows(plan: CastOfTiles) -> np.ndarray:
    return plan.index


@cached_plan
def _cast_of(layout: Layout, mask: Mask, rank: int, of_queries: bool) -> CastOfTiles:
    return CastOfTiles(layout, transposed(mask) if of_queries else mask, rank)


@cached_plan
def _room(layout: Layout) -> int:
    """Return the room of each rank in a gathered buffer: the most tokens of a rank, in whole tiles."""
    return whole_tiles(max(map(layout.size, range(layout.ranks))))


@cached_plan
def _gathered_masks(layout: Layout, mask: Mask, rank: int) -> tuple[PlacedMask, PlacedMask]:
    room, own = _room(layout), pieces_of(layout, rank)
    everyone = [piece for r in range(layout.ranks) for piece in shifted(pieces_of(layout, r), r * room)]
    everyone, rows, size = _joined(everyone), layout.ranks * room, layout.size(rank)
    return _placed(mask, own, everyone, size, rows), _placed(mask, everyone, own, rows, size)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces; those that continue each other in the sequence and in the buffer are one."""
    joined: list[Piece] = []
    for row, tokens in pieces:
        if joined and joined[-1][1].stop == tokens.start and joined[-1][0] + len(joined[-1][1]) == row:
            first, before = joined.pop()
            row, tokens = first, range(before.start, tokens.stop)
        joined.append((row, tokens))
    return tuple(joined)


@cached_plan
def _placed(
    mask: Mask, queries: tuple[Piece, ...], keys: tuple[Piece, ...], query_rows: int, key_rows: int
) -> PlacedMask:
    return PlacedMask(mask, queries, keys, query_rows, key_rows)
