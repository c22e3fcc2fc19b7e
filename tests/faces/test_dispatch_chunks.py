"""Default chunks are short enough to balance the ranks, and a chunk that leaves a rank empty gives
a warning.
"""

import pytest
from band_strategies import square_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from canon import Mask, fast, reference
from canon.route.plan_arguments import default_chunk

# --- the default


@given(st.integers(0, 3_000_000), st.integers(1, 1100))
def test_the_default_gives_each_rank_8_to_32_chunks_or_each_token_its_own(tokens, ranks):
    chunk = default_chunk(tokens, ranks)
    chunks = -(-tokens // chunk)
    assert min(8 * ranks, tokens) <= chunks <= 32 * ranks
    unit = 128 if tokens >= 1024 * ranks else 16 if tokens >= 128 * ranks else 1
    assert chunk % unit == 0
    if 8192 * ranks <= tokens <= 32768 * ranks:
        assert chunk == 1024
    # short chunks are few, because planning takes the square of their number
    elif tokens < 8192 * ranks:
        assert chunks <= 16 * ranks + 1


@pytest.mark.parametrize(
    ("tokens", "ranks", "chunk"),
    [
        (65536, 8, 1024),
        (2**20, 8, 4096),
        (2**20, 256, 512),
        (10_000_000, 1024, 1024),
        (8191 * 8, 8, 896),
        (2048, 4, 64),
        (100, 4, 3),
        (3, 4, 1),
        (0, 4, 1),
    ],
)
def test_the_default_of_known_sizes(half, tokens, ranks, chunk):
    assert default_chunk(tokens, ranks) == chunk
    if tokens <= 2048:
        mask = Mask.causal(tokens)
        layout = half.dispatch(mask, ranks)
        assert layout == half.dispatch(mask, ranks, chunk=chunk)
        assert half.plan_report(mask, layout) == half.plan_report(mask, layout, chunk=chunk)


@settings(max_examples=60)
@given(
    (st.sampled_from([0, 1, 1, 2, 3]) | st.integers(0, 70)).flatmap(square_masks), st.integers(1, 9)
)
def test_every_rank_holds_a_token_where_there_are_enough(mask, ranks):
    """Both halves make the same plan without a warning, also for no token and for more ranks than
    tokens.
    """
    layout = reference.dispatch(mask, ranks)
    assert layout == fast.dispatch(mask, ranks)
    sizes = [layout.size(rank) for rank in range(ranks)]
    assert sum(sizes) == mask.queries
    assert sum(map(bool, sizes)) == min(ranks, mask.queries)
    assert max(sizes) - min(sizes) <= default_chunk(mask.queries, ranks)
    assert reference.plan_report(mask, layout) == fast.plan_report(mask, layout)
    for options in ({"own_keys_first": False}, {"casts": 2}):
        one, other = (half.cast_plan(mask, layout, **options) for half in (reference, fast))
        assert one == other
        assert all(one.casts_of(one, rank) == other.casts_of(other, rank) for rank in range(ranks))


@pytest.mark.parametrize(("tokens", "ranks"), [(2048, 4), (3001, 3), (5000, 2), (2000, 6)])
def test_short_sequences_are_balanced(half, tokens, ranks):
    """The rates make traffic free. With the default rates, a plan of few tokens trades balance for
    fewer keys.
    """
    packed = Mask.documents([0, tokens // 5, tokens // 2, tokens - 100, tokens])
    for mask in (Mask.causal(tokens), packed):
        layout = half.dispatch(mask, ranks, cells_per_us=1, tokens_per_us=1000)
        report = half.plan_report(mask, layout)
        assert max(report.areas) <= 1.05 * sum(report.areas) / ranks


# --- warnings


def test_a_chunk_that_leaves_ranks_empty_gives_a_warning_with_a_better_chunk(half):
    mask = Mask.causal(2048)
    message = (
        "chunk=1024 leaves 2 of 4 ranks without a token, as 2048 tokens make fewer chunks than "
        "ranks: pass chunk=64, the default"
    )
    for _ in range(2):  # the second plan is cached
        with pytest.warns(UserWarning, match=message):
            assert sorted(map(half.dispatch(mask, 4, chunk=1024).size, range(4))) == [
                0,
                0,
                1024,
                1024,
            ]
    for chunk in (None, 64, 512):
        assert min(map(half.dispatch(mask, 4, chunk=chunk).size, range(4))) > 0


@pytest.mark.parametrize("chunk", [100, 101, 2**40, 2**61, 2**62 - 1])
def test_chunks_longer_than_the_sequence_are_one(chunk):
    """Seven chunks of the longest length do not fit in 64 bits."""
    mask = Mask.documents([0, 30, 100])
    with pytest.warns(UserWarning, match=f"chunk={chunk} leaves 6 of 7 ranks"):
        layout = reference.dispatch(mask, 7, chunk=chunk)
    with pytest.warns(UserWarning, match=f"chunk={chunk} leaves 6 of 7 ranks"):
        assert layout == fast.dispatch(mask, 7, chunk=chunk)
    report = reference.plan_report(mask, layout, chunk=chunk)
    assert report == fast.plan_report(mask, layout, chunk=chunk)
    assert report.largest_chunk == mask.area
