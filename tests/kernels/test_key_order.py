"""With rank_invariant=True each row visits every tile of keys once, in order, whatever the bands
and the other rows.
"""

from functools import partial

import pytest
from band_strategies import square_masks
from hopper import HOPPER_ONLY, assert_exact, bands_of, hopper, in_order, inputs, plant
from hypothesis import example, given
from hypothesis import strategies as st
from sharded import ON_HOPPER, gradients

from canon import Band, Mask, fast
from canon.fast.kernels.gluon import masking
from canon.fast.tables.work_tables import host_table
from canon.route.rank_invariance import transposed
from canon.testing.judge import Attended


def visits_of(tiles, spans, columns):
    """Return {row: [(first column, columns that it sees)]}, in order, of the visits in which a row
    sees some.
    """
    found, spans = {}, spans.tolist()
    for start, stop, first, _, end in tiles.tolist():
        for row in range(start, stop):
            found[row] = []
            for column, count, *band in spans[first:end]:
                bands = bands_of(spans, band) or [(0, 1 << 30, 0, 1 << 30, -(1 << 30), 1 << 30)]
                seen = [
                    j
                    for b in bands
                    if b[0] <= row < b[1]
                    for j in range(*interval(row, b, column, count * columns))
                ]
                assert seen == sorted(set(seen)), (
                    "the bands of a chained span come in the order of their keys"
                )
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
# bands that alternate over several tiles
MIXED = Mask(
    [Band(0, 16, 0, 40, 10, 14), Band(12, 16, 0, 20), Band(0, 4, 30, 60), Band(20, 21, 0, 3)],
    24,
    64,
)


@given(st.integers(1, 40).flatmap(square_masks), SIZES, st.booleans())
@example(MIXED, (8, 4), False)
@example(MIXED, (16, 16), False)
@example(MIXED, (1, 8), False)
def test_each_row_visits_each_tile_once_and_in_order(mask, sizes, transposed):
    table = host_table(in_order(mask), *sizes, sizes[1], transposed)
    assert visits_of(*table[:2], sizes[1]) == expected(mask, sizes[1], transposed)


def test_full_tiles_have_no_band():
    tiles, spans, *_ = host_table(in_order(Mask.causal(512)), 128, 128, 128)
    assert spans[tiles[0, 2] : tiles[0, 4]].tolist() == [
        [0, 3, *[0] * 6],
        [384, 1, 0, 512, 0, 512, -511, 0],
    ]


def test_long_masks_need_few_spans():
    """Bands that do not meet in a tile need no span for each tile; 2^20 tokens have 2^25 pairs of
    tiles.
    """
    n = 1 << 20
    assert len(host_table(in_order(Mask.prefix(n, 1000)), 128, 128, 128).spans) < 6 * n // 128


# --- the Hopper kernels ---


# In a tile of 128 keys, rows see up to four bands: all, some, only later ones, or none.
GAPS = Mask(
    [
        Band(0, 70, 0, 10),
        Band(5, 80, 20, 40),
        Band(0, 60, 60, 90, 40, 70),
        Band(10, 75, 120, 200),
        Band(0, 8, 256, 300),
    ],
    90,
    300,
)


def both_passes(q, k, v, dout, dlse, mask):
    attend = partial(fast.attention, mask=mask, rank_invariant=True, return_lse=True)
    with hopper():
        return Attended(*gradients(attend, (q, k, v), dout, dlse))


@pytest.mark.parametrize("mask", [GAPS, transposed(GAPS)], ids=["keys", "queries"])
@pytest.mark.parametrize("d", [pytest.param(d, marks=HOPPER_ONLY) for d in (64, 128, 256)])
def test_cells_between_the_bands_of_a_tile_are_hidden(mask, d):
    arguments = inputs(mask, d=d, dv=d)
    assert_exact(both_passes(*arguments, mask), *arguments, mask)


FAULTS = [
    ("x = _hide_between(", "_ = _hide_between("),
    ("gl.where(sees, next_left, right)", "right"),
    ("gl.where(sees, next_left, right)", "next_left"),
    ("gl.where(seen, left, next_left)", "left"),
    ("gl.where(sees, next_right, right)", "right"),
    ("gl.where(sees, next_right, right)", "next_right"),
]


@pytest.mark.parametrize(
    ("right", "wrong"), [pytest.param(*fault, marks=HOPPER_ONLY) for fault in FAULTS]
)
def test_faults_planted_between_the_bands_of_a_tile_are_found(right, wrong, monkeypatch):
    """They are planted in the source that the simulator runs: a GPU would run the compiled kernel
    again.
    """
    if ON_HOPPER:
        pytest.skip("the kernel is compiled already")
    plant(monkeypatch, masking, "_hide_gaps", right, wrong)
    arguments = inputs(GAPS)
    with pytest.raises(AssertionError):
        assert_exact(both_passes(*arguments, GAPS), *arguments, GAPS)
