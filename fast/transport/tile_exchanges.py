"""Exchanges of whole tiles between ranks, for `owner_computes.py`.

    exchange       a buffer holds, in rows                              used by
    `OwnTokens`    the own tokens; nothing is sent                      one rank
    `TileGather`   of each rank the room of the largest shard           `strided_attention`
    `TileCast`     own tokens, then needed tiles by source and by row   `magi_attention`

Every piece begins at a multiple of 128 rows. A rank whose last tile is short sends copies of its
last token behind it, which are masked. `TileGather` alternates two buffers; a `TileCast` allocates
one for each leg.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from canon.fast.group_collectives import Transfer, begin_cast, columns, granular_plan
from canon.fast.owner_computes import Leg
from canon.fast.tables.cells import Places
from canon.fast.tables.device_plans import device_plan
from canon.fast.transport.messages import HeadGroup, Pending, padded_tokens, transport_for
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.call import Call
from canon.route.rank_invariance import TILE, Piece, pieces_of, transposed


def whole_tiles(tokens: int) -> int:
    """Round a number of tokens up to whole tiles."""
    return -(-tokens // TILE) * TILE


class OwnTokens:
    """One rank: the buffers are the inputs themselves."""

    rows = ()  # nothing is kept: see `TileCast`

    def __init__(self, call: Call):
        own, size = pieces_of(call.layout, 0), call.layout.tokens
        self.key_places = self.query_places = Places(own, own, size, size)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], Pending]:
        return lambda number: Pending([], [x for message in legs[number].messages for x in message])


class TileGather:
    """All-gathers. A message is one buffer (W room, b, heads, sum of widths), in rank order."""

    def __init__(self, call: Call):
        self.call, self.room = call, whole_tiles(padded_tokens(call.layout))
        self.key_places, self.query_places = _gathered_places(call.layout, call.rank)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], Pending]:
        first = next(x for leg in legs for message in leg.messages for x in message)
        transport = transport_for(self.call.group, first.device)
        sizes = [sum(map(self._bytes, leg.messages)) for leg in legs]
        slots = range(min(2, len(legs)))
        buffers = [
            torch.empty(max(sizes[slot::2]), dtype=torch.uint8, device=first.device)
            for slot in slots
        ]
        return partial(self._fetch, legs, transport, buffers)

    def _bytes(self, message: Sequence[Tensor]) -> int:
        return -(-self._group(message).elements * message[0].element_size() // 256) * 256

    def _group(self, message: Sequence[Tensor]) -> HeadGroup:
        b, _, heads, _ = message[0].shape
        return HeadGroup(self.call, b, range(heads), [x.shape[-1] for x in message], self.room)

    def _fetch(
        self, legs: Sequence[Leg], transport, buffers: Sequence[Tensor], number: int
    ) -> Pending:
        start, flat, tensors = 0, [], []
        size = self.call.layout.size(self.call.rank)
        with transport.on_communication_stream():
            for message in legs[number].messages:
                group = self._group(message)
                flat.append(buffers[number % 2][start:].view(message[0].dtype)[: group.elements])
                start += self._bytes(message)
                group.zero_behind(flat[-1], size)
                for target, source in zip(group.own(flat[-1], size), message, strict=True):
                    target.copy_(source)
                tensors += group.views(flat[-1])
            works = [transport.all_gather(x) for x in flat]
        if number:
            transport.wait_until_started()
        return Pending(works, tensors)


class TileCast:
    """Group casts of the tiles that own queries, or own keys, need. ``kept``: rows of keys from an
    earlier cast; with ``keep``, `rows` holds this one's.
    """

    def __init__(self, call: Call, kept: Sequence[Tensor] = (), keep: bool = False):
        self.call, self.kept, self.keep, self.rows = call, kept, keep, ()
        self.plans = {
            of_queries: _cast_of(call.layout, call.mask, call.rank, of_queries)
            for of_queries in (False, True)
        }
        self.key_places, self.query_places = _cast_places(call.layout, call.mask, call.rank)

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], Pending]:
        return lambda number: self._fetch(legs[number], number)

    def _fetch(self, leg: Leg, number: int) -> Pending:
        plan, pairs = self.plans[leg.of_queries], self._pairs(leg)
        if self.kept and not leg.of_queries:
            return Pending([], columns(self.kept[0], pairs[0][0].shape[-1]))
        brought = [
            x.new_empty(plan.rows, x.shape[0], x.shape[2], x.shape[3] + y.shape[3])
            for x, y in pairs
        ]
        messages = zip(pairs, brought, strict=True) if plan.travels else ()
        casts = [
            begin_cast(*pair, plan, rows[plan.own :], self.call.group) for pair, rows in messages
        ]
        if number:
            transport_for(self.call.group, brought[0].device).wait_until_started()
        tensors: list[Tensor] = []
        for pair, rows in zip(pairs, brought, strict=True):  # while the others are in flight
            views = columns(rows, pair[0].shape[-1])
            for target, source in zip(views, pair, strict=True):
                target[:, : source.shape[1]].copy_(source)
            rows[pair[0].shape[1] : plan.own].zero_()
            tensors += views
        if self.keep and not leg.of_queries:
            self.rows = (brought[0],)
        return Pending([work for work, _ in casts], tensors, [sent for _, sent in casts])

    def _pairs(self, leg: Leg) -> list[tuple[Tensor, ...]]:
        """Return pairs of tensors of one dtype, one a message."""
        tensors = [x for message in leg.messages for x in message]
        return list(zip(tensors[::2], tensors[1::2], strict=True))


class CastOfTiles(Transfer):
    """A group cast of whole tiles, for one rank: a buffer of ``rows`` holds ``pieces``, the own
    ones first. ``index``: the own rows that are sent, by receiver. ``travels``: whether any rank
    receives a tile.
    """

    def __init__(self, layout: Layout, mask: Mask, rank: int):
        plan = granular_plan(mask, layout, 1, False, TILE)
        self.travels, index = plan.casts > 0, [np.empty(0, np.int64)]
        self.sends = self.receives = [0] * layout.ranks
        self.own = self.rows = whole_tiles(layout.size(rank))
        pieces = list(pieces_of(layout, rank))
        if self.travels:
            tokens = plan.send_sizes(0, rank)
            self.sends = list(map(whole_tiles, tokens))
            self.receives = list(map(whole_tiles, plan.receive_sizes(0, rank)))
            for piece in plan.received(0, rank):
                pieces.append((self.rows, piece.tokens))
                self.rows += whole_tiles(len(piece.tokens))
            for rows in plan.send_rows(0, rank).split(tokens):
                if len(rows):
                    index.append(np.pad(rows.numpy(), (0, -len(rows) % TILE), "edge"))
        self.received, self.sent = sum(self.receives), sum(self.sends)
        self.pieces, self.index = _joined(pieces), np.concatenate(index)

    @property
    def nbytes(self) -> int:
        return 500 + 100 * len(self.pieces) + self.index.nbytes

    def rows_sent(self, device: torch.device) -> Tensor:
        return _sent_rows(self, device)


@device_plan
def _sent_rows(plan: CastOfTiles) -> np.ndarray:
    return plan.index


@cached_plan
def _cast_of(layout: Layout, mask: Mask, rank: int, of_queries: bool) -> CastOfTiles:
    return CastOfTiles(layout, transposed(mask) if of_queries else mask, rank)


@cached_plan
def _cast_places(layout: Layout, mask: Mask, rank: int) -> tuple[Places, Places]:
    own, size = pieces_of(layout, rank), layout.size(rank)
    keys, queries = (_cast_of(layout, mask, rank, of_queries) for of_queries in (False, True))
    key_places = Places(own, keys.pieces, size, keys.rows)
    return key_places, Places(queries.pieces, own, queries.rows, size)


@cached_plan
def _gathered_places(layout: Layout, rank: int) -> tuple[Places, Places]:
    room, own = whole_tiles(padded_tokens(layout)), pieces_of(layout, rank)
    everyone = _joined(
        [(r * room + row, x) for r in range(layout.ranks) for row, x in pieces_of(layout, r)]
    )
    rows, size = layout.ranks * room, layout.size(rank)
    return Places(own, everyone, size, rows), Places(everyone, own, rows, size)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for row, tokens in pieces:
        if (
            joined
            and joined[-1][1].stop == tokens.start
            and joined[-1][0] + len(joined[-1][1]) == row
        ):
            first, before = joined.pop()
            row, tokens = first, range(before.start, tokens.stop)
        joined.append((row, tokens))
    return tuple(joined)
