"""With rank_invariant=True each row visits every tile of keys once, in order, whatever the bands and the other rows."""

import pytest
from band_strategies import square_masks
from hypothesis import given
from hypothesis import strategies as st

from canon import Band, Mask
from canon.fast.kernels.placed_mask import in_place
from canon.fast.kernels.work_tables import host_table, work_table


def visits_of(tiles, spans, columns):
    """Return {row: [(first column, columns that it sees)]}, in order, of the visits in which a row sees some."""
    found, spans = {}, spans.tolist()
    for start, stop, first, _, end in tiles.tolist():
        for row in range(start, stop):
            found[row] = []
            for column, count, *band in spans[first:end]:
                bands = [x[2:] for x in spans[band[0] : band[0] - band[1]]] if band[1] < 0 else [band]
                bands = bands if band[1] else [(0, 1 << 30, 0, 1 << 30, -(1 << 30), 1 << 30)]
                seen = [
                    j for b in bands if b[0] <= row < b[1] for j in range(*interval(row, b, column, count * columns))
                ]
                assert seen == sorted(set(seen)), "the bands of a chained span come in the order of their keys"
                tiles_of_span = range(column, column + count * columns, columns)
                visits = [(at, [j for j in seen if at <= j < at + columns]) for at in tiles_of_span]
                found[row] += [visit for visit in visits if visit[1]]
    return found


def interval(row, band, column, width):
    _, _, start, stop, lo, hi = band
    return max(column, start, row + lo), min(column + width, stop, row + hi + 1)


def expected(mask, columns, transposed=False):
    cells = mask.dense().T if transposed else mask.dense()
    rows = {}
    for row, seen in enumerate(cells.tolist()):
        keys = [j for j, visible in enumerate(seen) if visible]
        rows[row] = [
            (c, found)
            for c in range(0, len(seen), columns)
            if (found := [j for j in keys if j // columns * columns == c])
        ]
    return rows


SIZES = st.sampled_from([(4, 4), (8, 2), (2, 8), (16, 1)])
MIXED = Mask([Band(0, 16, 0, 40, 10, 14), Band(12, 16, 0, 20), Band(0, 4, 30, 60), Band(20, 21, 0, 3)], 24, 64)


@given(st.integers(1, 40).flatmap(square_masks), SIZES, st.booleans())
def test_each_row_visits_each_tile_once_and_in_order(mask, sizes, transposed):
    table = host_table(in_place(mask), *sizes, sizes[1], transposed)
    assert visits_of(*table[:2], sizes[1]) == expected(mask, sizes[1], transposed)


@pytest.mark.parametrize("sizes", [(8, 4), (16, 16), (1, 8)])
def test_bands_that_alternate_over_several_tiles_are_visited_in_order(sizes):
    table = host_table(in_place(MIXED), *sizes, sizes[1])
    assert visits_of(*table[:2], sizes[1]) == expected(MIXED, sizes[1])
    alone = work_table.__wrapped__(in_place(MIXED), *sizes, sizes[1], False, False)
    assert all(x > 0 for x in alone.spans[:, 3]), "every span has a band, and no span is chained"
    assert expected(MIXED, sizes[1]) == {row: joined(x) for row, x in visits_of(*alone[:2], sizes[1]).items()}


def joined(visits):
    """Return the visits with those of one tile, by several bands, joined."""
    tiles = dict.fromkeys(tile for tile, _ in visits)
    return [(tile, sorted(j for at, seen in visits if at == tile for j in seen)) for tile in tiles]


def test_full_tiles_have_no_band():
    tiles, spans, _ = host_table(in_place(Mask.causal(512)), 128, 128, 128)
    assert spans[tiles[0, 2] : tiles[0, 4]].tolist() == [[0, 3, *[0] * 6], [384, 1, 0, 512, 0, 512, -511, 0]]


def test_long_masks_need_few_spans():
    """Bands that do not meet in a tile need no span for each tile; 2^20 tokens have 2^25 pairs of tiles."""
    n = 1 << 20
    assert len(host_table(in_place(Mask.prefix(n, 1000)), 128, 128, 128).spans) < 6 * n // 128
