"""The work tables of tokens in any places are those of the whole mask, and planted faults change
bits.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hopper import bands_of, in_order
from hypothesis import given
from hypothesis import strategies as st
from sharded import DEVICE

from canon import Layout, Mask, fast
from canon.fast.kernels.gluon import launch as hopper_launch
from canon.fast.kernels.gluon.tile_scheduler import untouched
from canon.fast.kernels.triton import rows
from canon.fast.tables import work_tables as tiles
from canon.fast.tables.cells import Cells, Places
from canon.fast.transport.tile_exchanges import TileCast, TileGather

SIZES = [(128, 128), (64, 64), (128, 64), (32, 128)]  # rows, columns


@st.composite
def placed(draw):
    """Draw cells of a mask with some of its tiles in any order, with gaps, on both sides
    or all keys on one.
    """
    n = draw(st.integers(1, 700))
    mask = draw(
        st.sampled_from(
            [Mask.causal(n), Mask.window(n, 150, 30), Mask.documents([0, n // 3, n // 2, n])]
        )
    )
    numbers = list(range(-(-n // 128)))

    def buffer(held):
        gaps = draw(st.lists(st.booleans(), min_size=len(held), max_size=len(held)))
        rows = [128 * (place + sum(gaps[: place + 1])) for place in range(len(held))]
        pieces = [
            (row, range(128 * i, min(n, 128 * (i + 1)))) for row, i in zip(rows, held, strict=True)
        ]
        return tuple(pieces), max((row + len(tokens) for row, tokens in pieces), default=0)

    everyone = buffer(draw(st.permutations(numbers)))
    own = buffer(draw(st.permutations(numbers))[: draw(st.integers(0, len(numbers)))])
    transposed = draw(st.booleans())
    (queries, rows), (keys, columns) = (everyone, own) if transposed else (own, everyone)
    return Cells(mask, Places(queries, keys, rows, columns)), transposed


def dense(cells):
    places, made = cells.places, torch.zeros(cells.sizes, dtype=torch.bool)
    for (q_row, queries), (k_row, keys) in product(places.query_pieces, places.key_pieces):
        part = cells.mask.dense()[queries.start : queries.stop, keys.start : keys.stop]
        made[q_row : q_row + len(queries), k_row : k_row + len(keys)] = part
    return made


def as_tokens(places, table, width, transposed):
    """Return {first token: [(visited tokens, their bands in tokens)]} for the tiles of a table, in
    order.
    """

    def token(row, keys):
        for start, tokens in places.key_pieces if keys else places.query_pieces:
            if start <= row < start + 128 * -(-len(tokens) // 128):
                return tokens.start + row - start
        raise AssertionError(f"row {row} holds no token")

    found = {}
    for start, stop, first_span, _, end in table.tiles.tolist():
        visits = []
        for span in table.spans[first_span:end].tolist():
            bands = bands_of(table.spans.tolist(), span[2:])
            for row in range(span[0], span[0] + span[1] * width, width):
                first = token(row, not transposed)
                down, right = token(start, transposed) - start, first - row
                moves = (down, down, right, right, right - down, right - down)
                moved = [[x + y for x, y in zip(band, moves, strict=True)] for band in bands]
                visits.append((first, moved))
        found[token(start, transposed)] = (stop - start, visits)
    return found


@given(placed(), st.sampled_from(SIZES))
def test_own_tiles_visit_what_they_visit_on_one_rank(case, sizes):
    cells, transposed = case
    places, one = cells.places, in_order(cells.mask)
    rows, columns = sizes
    whole, own = (tiles.host_table(x, rows, columns, columns, transposed) for x in (one, cells))
    expected = as_tokens(one.places, whole, columns, transposed)
    got = as_tokens(places, own, columns, transposed)
    held = {
        token
        for _, tokens in (places.key_pieces if transposed else places.query_pieces)
        for token in tokens
    }
    assert set(got) == set(expected) & held
    for token, visited in got.items():
        assert visited == expected[token]


@given(placed())
def test_area_and_untouched_rows_are_those_of_the_tokens(case):
    cells, _ = case
    places = cells.places
    assert cells.area == dense(cells).sum()
    for keys in (False, True):
        touched = cells.mask.dense().any(0 if keys else 1)
        rows = torch.ones(cells.sizes[keys], dtype=torch.bool)
        for row, tokens in places.key_pieces if keys else places.query_pieces:
            rows[row : row + len(tokens)] = ~touched[tokens.start : tokens.stop]
        got = torch.zeros_like(rows)
        for start, stop in zip(*untouched(cells, keys), strict=True):
            got[start:stop] = True
        assert torch.equal(got, rows)


def test_a_crop_keeps_the_tokens_of_its_rows():
    places = Places(((0, range(600)),), ((0, range(256, 512)), (384, range(128))), 600, 512)
    cells = Cells(Mask.causal(600), places)
    cropped = cells.crop_keys(range(128, 512))
    assert torch.equal(dense(cropped), dense(cells)[:, 128:])


def test_pieces_that_begin_inside_a_tile_raise():
    for row, tokens in ((1, range(128)), (0, range(64, 128)), (0, range(0, 128, 2))):
        with pytest.raises(ValueError, match="do not begin at a multiple of 128"):
            Places(((row, tokens),), (), 256, 0)
    mask, half = Mask.causal(256), Places(((0, range(256)),), ((0, range(128)),), 256, 128)
    with pytest.raises(ValueError, match="sides that divide 128, got 192 x 128"):
        tiles.host_table(in_order(mask), 192, 128, 128)
    with pytest.raises(RuntimeError, match="lacks tokens"):
        tiles.host_table(Cells(mask, half), 128, 128, 128)


# --- choices ---


@pytest.mark.parametrize("exchange", [TileGather, TileCast])
def test_every_rank_chooses_as_one_rank(exchange):
    """The ranks have other shares of the mask: few keys on the first rank, many on the last one."""
    mask, q = Mask.documents([0, 100, 160, 300, 4096]), torch.empty(1, 1, 8, 64)
    layout = Layout.contiguous(4096, 4, 128)
    whole = in_order(mask)
    expected = hopper_launch.forward_config(q, q, whole), hopper_launch.packing(whole, 128, 128, 8)
    assert (expected[0][0].rows, expected[0][0].stale_maximum) == (128, True), (
        "in other calls 192 rows, or no stale maximum"
    )
    for rank in range(4):
        call = SimpleNamespace(layout=layout, mask=mask, rank=rank, ranks=4, group=None)
        placed = exchange(call)
        for places in (placed.key_places, placed.query_places):
            own = Cells(mask, places)
            assert (
                hopper_launch.forward_config(q, q, own),
                hopper_launch.packing(own, 128, 128, 8),
            ) == expected


def test_delta_is_added_from_aligned_tensors(monkeypatch):
    """An odd address or stride compiles another order of summation. The interpreter cannot show it:
    the tensors can.
    """
    aligned, delta = [], rows.delta

    def noted(*tensors):
        aligned.extend(x.data_ptr() % 16 == 0 and x.is_contiguous() for x in tensors[:2])
        delta(*tensors)

    monkeypatch.setattr(rows, "delta", noted)
    dout = torch.randn(1 + 128 * 2 * 16, device=DEVICE)[1:].view(1, 128, 2, 16)
    for attend in (fast.attention, fast.strided_attention):
        x = torch.randn(dout.shape, device=DEVICE, requires_grad=True)
        attend(x, x, x, rank_invariant=True).backward(dout)
    assert aligned == [True] * 4
