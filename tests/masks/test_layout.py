"""A layout assigns each token to one rank, and `local_mask` is the matrix of the mask at the tokens
of two ranks.
"""

import itertools
import pickle

import torch
from band_strategies import KINDS, check, layouts, square_masks
from hypothesis import given
from hypothesis import strategies as st

from canon import Layout, Mask
from canon.masks.rows import arrival_order, united

# --- tokens of the ranks ---


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 5))
def test_zigzag_documents_divides_each_document_as_zigzag_does(lengths, ranks):
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    expected = Layout.concat([Layout.zigzag(n, ranks) for n in (0, *lengths)])
    assert Layout.zigzag_documents(ends, ranks) == expected
    assert Layout.zigzag_documents(torch.tensor(ends), ranks) == expected


@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_concat_gives_a_rank_its_tokens_of_each_sequence(kind, lengths, ranks):
    layouts = [KINDS[kind](n, ranks) for n in lengths]
    whole = Layout.concat(layouts)
    assert (whole.tokens, whole.ranks) == (sum(lengths), ranks)
    for rank in range(ranks):
        of_each = [sum(lengths[:i]) + layout.positions(rank) for i, layout in enumerate(layouts)]
        assert torch.equal(whole.positions(rank), torch.cat(of_each))


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 40), st.integers(1, 9))
def test_contiguous_zigzag_and_striped_follow_their_definitions(kind, n, ranks):
    layout = KINDS[kind](n, ranks)
    assert (layout.tokens, layout.ranks) == (n, ranks)
    held = [layout.positions(rank).tolist() for rank in range(ranks)]
    sizes = [len(tokens) for tokens in held]
    if kind == "contiguous":
        assert [token for tokens in held for token in tokens] == list(range(n))
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
    elif kind == "striped":
        assert held == [list(range(n))[rank::ranks] for rank in range(ranks)]
    else:
        ends = Layout.contiguous(n, 2 * ranks)
        pieces = [ends.positions(piece).tolist() for piece in range(2 * ranks)]
        assert held == [pieces[rank] + pieces[-1 - rank] for rank in range(ranks)]


@given(
    st.sampled_from(["contiguous", "zigzag"]),
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_pieces_begin_at_multiples_of_a_number_of_tokens(kind, n, ranks, multiple_of):
    layout = KINDS[kind](n, ranks, multiple_of)
    # the same layout of blocks of ``multiple_of`` tokens
    blocks = KINDS[kind](-(-n // multiple_of), ranks)
    for rank in range(ranks):
        tokens = [
            b * multiple_of + i for b in blocks.positions(rank).tolist() for i in range(multiple_of)
        ]
        assert layout.positions(rank).tolist() == [token for token in tokens if token < n]


@given(layouts())
def test_equality_and_hash_are_by_content(layout):
    held = layout.ranges_per_rank
    assert pickle.loads(pickle.dumps(layout)) == Layout(held, layout.tokens) == layout
    other = Layout([*held, []], layout.tokens)
    assert other != layout
    assert other.digest != layout.digest


# --- local masks, positions and shards ---


@given(st.data(), layouts())
def test_local_mask_is_the_matrix_at_the_tokens_that_the_ranks_hold(data, layout):
    mask = data.draw(square_masks(layout.tokens))
    q_rank = data.draw(st.integers(0, layout.ranks - 1))
    # any ranks in any order
    k_ranks = data.draw(st.lists(st.integers(0, layout.ranks - 1), unique=True))
    columns = [layout.positions(rank) for rank in k_ranks]
    columns = torch.cat([torch.empty(0, dtype=torch.int64), *columns])
    dense = mask.dense()[layout.positions(q_rank)]
    check(layout.local_mask(mask, q_rank, k_ranks), dense[:, columns])
    check(layout.local_mask(mask, q_rank, q_rank), dense[:, layout.positions(q_rank)])


@given(st.sampled_from(["zigzag", "striped"]), st.integers(1, 40), st.integers(1, 6))
def test_each_hop_of_zigzag_and_striped_is_one_band(kind, n, ranks):
    layout = KINDS[kind](n, ranks)
    for hop in itertools.product(range(ranks), repeat=2):
        local = layout.local_mask(Mask.causal(n), *hop)
        assert len(local.bands) == (local.area > 0)


@given(st.data(), layouts())
def test_shard_returns_the_tokens_of_a_rank_and_its_gradient_writes_them_back(data, layout):
    rank = data.draw(st.integers(0, layout.ranks - 1))
    dim = data.draw(st.sampled_from([0, 1, 2, -1]))
    shape = [2, 3, 2]
    shape[dim] = layout.tokens
    x = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
    shard = layout.shard(x, rank, dim)
    assert shard.equal(x.movedim(dim, 0)[layout.positions(rank)].movedim(0, dim))
    shard.sum().backward()
    held = torch.zeros(layout.tokens).index_fill(0, layout.positions(rank), 1)
    assert x.grad.movedim(dim, -1).equal(held.expand(x.movedim(dim, -1).shape))


def test_equal_layouts_have_equal_digests():
    """Ranks compare digests. A range of one token has no step of its own."""
    assert Layout.striped(5, 5) == Layout.contiguous(5, 5)
    assert Layout.striped(5, 5).digest == Layout.contiguous(5, 5).digest
    assert Layout.striped(6, 5).digest != Layout.contiguous(6, 5).digest


# --- rows of a mesh


@given(layouts(37), st.sampled_from([1, 2, 3, 5, 40]))
def test_the_parts_of_a_row_hold_its_tokens_in_order(rows, heads):
    parts = rows.divided(heads)
    assert parts.ranks == rows.ranks * heads
    ordered = united(parts, heads)
    for row in range(rows.ranks):
        ranks = range(row * heads, (row + 1) * heads)
        sizes = [parts.size(rank) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1
        held = torch.cat([parts.positions(rank) for rank in ranks])
        assert held.equal(rows.positions(row))
        for order in arrival_order(parts, heads, row):
            held = held[order]
        assert held.equal(ordered.positions(row))
