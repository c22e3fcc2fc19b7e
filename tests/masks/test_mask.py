"""A mask equals its boolean matrix: constructors, methods, content and errors."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from band_strategies import bounds, check, intervals, ranges_inside, trees
from hypothesis import assume, given
from hypothesis import strategies as st

from canon import Band, Mask

small, sides = st.integers(0, 9), st.none() | st.integers(-1, 12)


@st.composite
def masks(draw):
    """Draw any rectangular mask: at most one band in each field of an uneven grid."""
    rows, columns = (
        sorted(draw(st.lists(st.integers(0, 11), min_size=1, max_size=4))) for _ in "qk"
    )
    fields = [
        Band(a, b, c, d, draw(bounds), draw(bounds))
        for a, b in pairwise(rows)
        for c, d in pairwise(columns)
    ]
    return Mask(fields, rows[-1] + draw(st.integers(0, 2)), columns[-1] + draw(st.integers(0, 2)))


@st.composite
def packed(draw, documents=6):
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7]), max_size=documents))
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def offsets(queries, keys):
    """Return j - i for every cell."""
    return torch.arange(keys) - torch.arange(queries)[:, None]


def inside(offset, left, right):
    """Return which cells a window holds."""
    low, high = (99 if bound in (None, -1) else bound for bound in (left, right))
    return (-low <= offset) & (offset <= high)


# --- constructors ---


@given(small, sides, sides)
def test_full_causal_and_window(n, left, right):
    offset = offsets(n, n)
    check(Mask.full(n), offset == offset)
    check(Mask.full(n, 7), torch.ones(n, 7, dtype=torch.bool))
    check(Mask.causal(n), offset <= 0)
    for keys in (0, 3, n + 4):  # also queries that see nothing
        check(Mask.causal(n, keys), offsets(n, keys) <= keys - n)
    check(Mask.window(n, left, right), inside(offset, left, right))


@given(packed(), st.booleans(), st.none() | st.tuples(sides, sides))
def test_documents(cu_seqlens, causal, window):
    n = cu_seqlens[-1]
    document = torch.tensor(
        [d for d, (a, b) in enumerate(pairwise(cu_seqlens)) for _ in range(a, b)]
    )
    offset = offsets(n, n)
    expected = document.view(n, 1) == document.view(1, n)
    expected &= inside(offset, *window or (None, None)) & ((offset <= 0) | (not causal))
    mask = Mask.documents(cu_seqlens, causal=causal, window=window)
    check(mask, expected)
    assert mask == Mask.documents(torch.tensor(cu_seqlens, dtype=torch.int32), causal, window)
    if window is None and causal:
        assert mask == Mask.concat([Mask.causal(b - a) for a, b in pairwise(cu_seqlens)])


@given(small, small)
def test_prefix(n, prefix):
    assume(prefix <= n)
    j = torch.arange(n)
    check(Mask.prefix(n, prefix), (offsets(n, n) <= 0) | ((j < prefix)[:, None] & (j < prefix)))


TYPES = ["full", "causal", "inverse_causal", "bi_causal"]


@given(intervals(), intervals(), st.integers(0, 3))
def test_ranges_has_the_four_slice_types_of_magiattention(q, k, kind):
    (q0, q1), (k0, k1) = q, k
    sq, sk = q1 - q0, k1 - k0
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    visible = [i == i, j - i <= sk - sq, j >= i, (i <= j) & (j <= i + sk - sq)][kind] & (j == j)
    expected = torch.zeros(q1, k1, dtype=torch.bool)
    expected[q0:, k0:] = visible
    mask = Mask.ranges([q], [k], [kind])
    check(mask, expected)
    assert mask == Mask.ranges(torch.tensor([q]), torch.tensor([k]), torch.tensor([kind]))
    assert mask == Mask.ranges([range(*q)], [range(*k)], [TYPES[kind]], queries=q1, keys=k1)
    check(
        Mask.ranges([q], [k], [kind], queries=10, keys=11),
        torch.nn.functional.pad(expected, (0, 11 - k1, 0, 10 - q1)),
    )


def ancestors(parents, lengths, starts):
    """Return the dense mask: each token sees its node and the ancestors, a token in a gap the
    ancestors of the next node.
    """
    n = starts[-1] + lengths[-1] if starts else 0
    matrix = torch.zeros(n, n, dtype=torch.bool)
    for token in range(n):
        node = max(node for node, start in enumerate([-1, *starts]) if start <= token) - 1
        if node < 0 or token >= starts[node] + lengths[node]:
            node = parents[node + 1]
        while node >= 0:
            matrix[token, starts[node] : starts[node] + lengths[node]] = True
            node = parents[node]
    return matrix.tril()


@given(trees())
def test_a_tree_mask_equals_the_sets_of_ancestors(tree):
    parents, lengths, _ = tree
    mask = Mask.tree(*tree)
    check(mask, ancestors(*tree))
    assert len(mask.bands) == sum(size > 0 for size in lengths)
    assert mask == Mask.tree(*(torch.tensor(x, dtype=torch.int32) for x in tree))
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    assert Mask.tree(parents, lengths) == Mask.tree(parents, lengths, starts)


def test_a_deep_chain_is_causal():
    n = 2000
    mask = Mask.tree(range(-1, n - 1), [1] * n)
    assert len(mask.bands) == n
    assert mask.area == Mask.causal(n).area
    assert Mask.tree([-1], [5]) == Mask.causal(5)


# --- methods ---


@given(st.data(), masks(), st.integers(1, 4))
def test_crop_slices_the_matrix(data, mask, step):
    rows = data.draw(ranges_inside(mask.queries, step))
    columns = data.draw(ranges_inside(mask.keys, step))
    dense = mask.dense()
    check(mask.crop(rows, columns), dense[list(rows)][:, list(columns)])
    if step == 1:
        check(mask.crop(queries=rows), dense[list(rows)])
        check(mask.crop(keys=columns), dense[:, list(columns)])
    assert mask.crop() == mask


@given(masks(), st.integers(-13, 4), st.integers(-13, 4))
def test_shift_pads_or_cuts_at_the_start(mask, queries, keys):
    dense = torch.nn.functional.pad(mask.dense(), (max(0, keys), 0, max(0, queries), 0))
    check(mask.shift(queries, keys), dense[max(0, -queries) :, max(0, -keys) :])


@given(masks(), sides, sides)
def test_windowed_keeps_the_cells_near_the_diagonal(mask, left, right):
    near = inside(offsets(mask.queries, mask.keys), left, right)
    check(mask.windowed(left, right), mask.dense() & near)
    assert mask.windowed() == mask


@given(st.lists(masks(), max_size=3))
def test_concat_is_block_diagonal(several):
    empty = torch.zeros(0, 0, dtype=torch.bool)
    check(Mask.concat(several), torch.block_diag(empty, *(x.dense() for x in several)))


@given(st.data(), masks(), st.integers(1, 4))
def test_needed_keys_are_the_columns_that_some_row_sees(data, mask, step):
    rows = data.draw(st.lists(ranges_inside(mask.queries, step), max_size=3))
    picked = [i for piece in rows for i in piece]
    needed, seen = mask.needed_keys(rows), mask.dense()[picked].any(0)
    assert [j for piece in needed for j in piece] == seen.nonzero().flatten().tolist()
    assert all(len(piece) and piece.step == 1 for piece in needed)
    assert all(before.stop < after.start for before, after in pairwise(needed))


# --- content ---


@given(masks())
def test_equality_and_hash_are_by_content(mask):
    rebuilt = Mask(reversed(mask.bands), mask.queries, mask.keys)
    for twin in (rebuilt, copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert twin == mask
        assert hash(twin) == hash(mask)
        assert twin.digest == mask.digest
        assert type(twin) is Mask
        assert all(type(band) is Band for band in twin.bands)
    wider = Mask(mask.bands, mask.queries, mask.keys + 1)
    assert wider != mask
    assert wider.digest != mask.digest


def test_a_mask_is_immutable_and_copies_the_tensor_that_it_is_made_from():
    cu_seqlens = torch.tensor([0, 3, 8])
    mask = Mask.documents(cu_seqlens)
    cu_seqlens[1] = 5
    assert mask == Mask.documents([0, 3, 8]) != Mask.documents(cu_seqlens)
    with pytest.raises(AttributeError, match="a Mask is immutable: cannot set queries"):
        mask.queries = 9
    with pytest.raises(AttributeError):
        mask.bands[0].lo = 0
