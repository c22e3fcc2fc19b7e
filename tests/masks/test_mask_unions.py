"""`Mask.union` and `Mask.with_blocks` have exactly the cells of their matrices, in disjoint
bands.
"""

import pytest
import torch
from band_strategies import check, square_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from canon import Band, Mask
from canon.masks import mask as mask_module


@st.composite
def cases(draw, most=13):
    """Draw a mask, often with a window, starts, stops, and the matrix with these blocks."""
    n = draw(st.integers(0, most))
    mask = draw(square_masks(n)).windowed(draw(st.none() | st.integers(0, n)))
    cuts = sorted(draw(st.sets(st.integers(0, n), max_size=6)))
    pairs = draw(st.permutations(list(zip(cuts[::2], cuts[1::2], strict=False))))
    matrix = mask.dense()
    for start, stop in pairs:
        matrix[start:stop, start:stop] = True
    return mask, [start for start, _ in pairs], [stop for _, stop in pairs], matrix


@settings(max_examples=300, report_multiple_bugs=False)
@given(cases())
def test_blocks_add_the_cells_between_their_tokens_and_no_others(case):
    mask, starts, stops, matrix = case
    check(mask.with_blocks(starts, stops), matrix)
    assert mask.with_blocks([], []) == mask


@settings(max_examples=300)
@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_a_union_has_the_cells_of_its_masks_in_any_order(data, n, count):
    masks = [data.draw(square_masks(n)) for _ in range(count)]
    cut = data.draw(st.integers(0, n))  # also masks that are not square
    masks = [mask.crop(queries=range(cut)) for mask in masks]
    found = Mask.union(*masks)
    check(found, torch.stack([mask.dense() for mask in masks]).any(0))
    assert Mask.union(*data.draw(st.permutations(masks))) == found
    assert Mask.union(masks[0], masks[0]) == masks[0]


def test_known_masks_are_unions():
    images = Mask.causal(9).with_blocks([1, 6], [4, 8])
    assert images.bands == (Band(0, 9, 0, 9, None, 0), Band(1, 3, 2, 4, 1), Band(6, 7, 7, 8))
    assert Mask.union(Mask.documents(range(10)), Mask.causal(9)) == Mask.causal(9)


def test_a_union_of_too_many_bands_is_refused(monkeypatch):
    monkeypatch.setattr(mask_module, "MOST_BANDS", 20)
    lines = [(i, i + 1) for i in range(0, 9, 2)]
    rows = Mask.ranges(lines, [(0, 9)] * 5, [0] * 5)
    columns = Mask.ranges([(0, 9)] * 5, lines, [0] * 5)
    with pytest.raises(ValueError, match="a union of 10 bands takes more than 20 disjoint bands"):
        Mask.union(rows, columns)
    monkeypatch.setattr(mask_module, "MOST_BANDS", 30)
    check(Mask.union(rows, columns), rows.dense() | columns.dense())


def test_a_thousand_images_in_a_million_tokens_cost_no_square_of_them():
    """Bands that share no query are never compared: a block meets the bands of its own rows."""
    n, met = 1 << 20, []
    starts = torch.arange(1000) * 1024 + 300
    intersect = Band.intersect
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Band, "intersect", lambda *given: met.append(1) or intersect(*given))
        for mask in (
            Mask.causal(n),
            Mask.documents(range(0, n + 1, 4096), window=(512, 0)),
            Mask.tree([-1, *[0] * 1023], [1024] * 1024),
        ):
            images = mask.with_blocks(starts, starts + 576)
            assert images.area >= mask.area + 1000 * 576 * 575 // 2
    assert len(met) < 9_000
