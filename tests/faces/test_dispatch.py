"""Both halves make equal plans. They are balanced and move few keys. Default chunks are short."""

import sys
from contextlib import nullcontext
from random import Random

import pytest
from band_strategies import square_masks
from hypothesis import example, given
from hypothesis import strategies as st

from canon import Layout, Mask, fast, reference
from canon.bench.packs import sampled_packs
from canon.bench.shapes import documents
from canon.fast import c_modules
from canon.fast import planner as fast_planner
from canon.masks import plan_cache
from canon.masks.plan_cache import PlanCache
from canon.reference import planner
from canon.route.plan_arguments import default_chunk


def expected_warning(n, ranks, chunk):
    """Return the expected warning: a chunk leaves a rank empty although there are enough tokens."""
    empty = 0 if chunk is None else ranks - -(-n // chunk)
    if n < ranks or empty <= 0:
        return nullcontext()
    remedy = f"pass chunk={default_chunk(n, ranks)}, the default"
    text = f"chunk={chunk} leaves {empty} of {ranks} ranks without a token, as {n} tokens.*{remedy}"
    return pytest.warns(UserWarning, match=text)


# --- dispatch


@given(
    st.sampled_from([0, 1, 5, 17, 64, 100]).flatmap(square_masks),
    st.sampled_from([1, 2, 3, 4, 5, 8, 13]),
    st.sampled_from([1, 3, 8, 40, 999]),
    st.sampled_from([1.0, 1.05, 1.3, 2.0]),
    st.sampled_from([1, 10, 4400]),
    st.sampled_from([1, 18, 200]),
    st.sampled_from([0, 1, 5]),
)
@example(Mask([], 40, 40), 3, 1, 1e30, 1, 1, 1)  # exceeds 64 bits
def test_both_halves_make_the_same_plan_with_evenly_divided_chunks(
    mask, ranks, chunk, imbalance, cells, tokens, swaps
):
    n = mask.queries
    chunk = chunk and max(n // 40, chunk)
    options = dict(
        chunk=chunk,
        imbalance=imbalance,
        cells_per_us=cells,
        tokens_per_us=tokens,
        swaps_per_chunk=swaps,
    )
    plans = []
    for half in (reference, fast, fast):  # a cached plan warns, too
        with expected_warning(n, ranks, chunk):
            plans.append(half.dispatch(mask, ranks, **options))
    layout = plans[0]
    assert [layout] * 3 == plans, (mask, ranks, options)
    sizes = [layout.size(rank) for rank in range(ranks)]
    if chunk is None:
        assert sum(map(bool, sizes)) == min(ranks, n)
        chunk = default_chunk(n, ranks)
    assert max(sizes) - min(sizes) <= chunk
    for ranges in layout.ranges_per_rank:
        assert [r.start for r in ranges] == sorted(r.start for r in ranges)
        assert all(r.start % chunk == 0 and (r.stop % chunk == 0 or r.stop == n) for r in ranges)
    reports = [half.plan_report(mask, layout, chunk=chunk) for half in (reference, fast)]
    assert reports[0] == reports[1]


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


def test_the_plan_of_a_batch_is_balanced(half):
    """Causal rows balance rows that see all later tokens, so neighbouring chunks stay together."""
    masks = [Mask.causal(1024), Mask.window(1024, 0, None)]
    assert half.dispatch(masks, 4, chunk=32) == Layout.contiguous(1024, 4)


def branches(depth):
    """Return a tree of 400 nodes: branches of so many nodes at one root."""
    parents = [-1, *(node - 1 if node % depth else 0 for node in range(1, 400))]
    return Mask.tree(parents, [100 + node % 128 for node in range(400)])


def nested_tree(tokens, nodes):
    """Return a random tree whose path goes up few nodes at a time: its end has many ancestors, with
    others between them.
    """
    draw, parents, path = Random(0), [], [-1]
    for node in range(nodes):
        path = path[: max(1, len(path) - draw.choice([0, 0, 1, 3]))]
        parents.append(path[-1])
        path.append(node)
    return Mask.tree(parents, [tokens // nodes] * nodes)


LONG = {
    "documents": Mask.documents(documents(65536, 1024, seed=1)),
    "a pack": Mask.documents(sampled_packs(65536, 1)[0]),
    "window": Mask.window(65536, 3000, 0),
    "tree": branches(4),
    "deep tree": branches(100),
}


@pytest.mark.parametrize(
    ("mask", "ranks", "chunk"),
    [
        *((mask, 8, None) for mask in LONG.values()),
        # chunks need many intervals of keys
        (nested_tree(400, 200), 3, 13),
        (nested_tree(400, 200), 6, 8),
    ],
    ids=[*LONG, "13", "8"],
)
def test_both_halves_make_the_same_plan_of_long_and_of_scattered_masks(mask, ranks, chunk):
    layout = fast.dispatch(mask, ranks, chunk=chunk)
    assert layout == reference.dispatch(mask, ranks, chunk=chunk)
    assert layout.digest, "ranks compare it"


def test_without_triton_pythons_compiler_makes_the_planner(monkeypatch, tmp_path, empty_cache):
    monkeypatch.setitem(sys.modules, "triton.runtime.build", None)
    monkeypatch.setattr(c_modules, "CACHE", tmp_path / "new")
    made = fast_planner.native_planner.__wrapped__
    assert len({made().__file__, made().__file__}) == 1, "the second one is cached"
    monkeypatch.setattr(fast_planner, "native_planner", made)
    mask = nested_tree(400, 200)
    assert fast.dispatch(mask, 3, chunk=50) == reference.dispatch(mask, 3, chunk=50)


def test_without_a_compiler_the_reference_makes_the_plan_and_a_warning_says_so(
    monkeypatch, empty_cache
):
    def fails(*sources):
        raise FileNotFoundError("gcc")

    monkeypatch.setattr(c_modules, "c_module", fails)
    monkeypatch.setattr(fast_planner, "native_planner", fast_planner.native_planner.__wrapped__)
    mask = nested_tree(400, 200)
    with pytest.warns(RuntimeWarning, match="install a C compiler"):
        layout = fast.dispatch(mask, 3, chunk=50)
    assert layout == reference.dispatch(mask, 3, chunk=50)


def score(mask, layout, chunk, rates=(4400, 18)):
    """Return (peak, peak x traffic) of a layout from its report: an exchange takes a rank as long
    as its busier direction.
    """
    report = reference.plan_report(mask, layout, chunk=chunk)
    moved = [max(pair) for pair in zip(report.received, report.sent, strict=True)]
    peak = max(
        max(area * rates[1], tokens * rates[0])
        for area, tokens in zip(report.areas, moved, strict=True)
    )
    lower = max(-(-sum(report.areas) // layout.ranks), report.largest_chunk)
    return max(peak, int(lower * 1.05) * rates[1]), peak * (
        layout.ranks * max(moved) + 5 * sum(report.received)
    )


@given(
    st.sampled_from([17, 64, 96]).flatmap(square_masks),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([(4400, 18), (10, 1)]),
)
def test_no_plan_is_worse_than_zigzag_or_contiguous_chunks(mask, ranks, rates):
    """Sent tokens count as received ones do."""
    options, n = dict(chunk=8, cells_per_us=rates[0], tokens_per_us=rates[1]), mask.queries
    with expected_warning(n, ranks, 8):
        planned = score(mask, fast.dispatch(mask, ranks, **options), 8, rates)
    chunks = planner.chunks_of(mask, 1, ranks, 8)
    for start in (planner.zigzag, planner.contiguous):
        layout = Layout([[chunk.tokens for chunk in held] for held in start(chunks, ranks)], n)
        assert planned <= score(mask, layout, 8, rates)


@pytest.mark.parametrize(("ranks", "volume"), [(8, 0.140), (16, 0.155), (32, 0.125), (64, 0.085)])
def test_published_lengths_are_balanced_and_move_little(ranks, volume):
    """Mean of 20 packs. The planner of MagiAttention 1.1: balance 1.004 to 1.03, volume .346, .301,
    .220, .148.
    """
    reports = []
    for cu_seqlens in sampled_packs(8192 * ranks, 20):
        mask = Mask.documents(cu_seqlens)
        reports.append(fast.plan_report(mask, fast.dispatch(mask, ranks)))
    assert sum(report.balance for report in reports) / 20 <= 1.05
    assert sum(report.volume for report in reports) / 20 <= volume


def test_ten_million_tokens_on_1024_ranks():
    mask = Mask.documents(sampled_packs(10_000_000, 1)[0])
    report = fast.plan_report(mask, fast.dispatch(mask, 1024, swaps_per_chunk=0))
    assert report.balance <= 1.05
    assert report.volume <= 0.011


# --- cast plans


def test_casts_divide_the_tokens_of_each_pair_of_ranks():
    plan = reference.cast_plan(Mask.causal(64), Layout.contiguous(64, 4), casts=3)
    assert [plan.receive_sizes(cast, 3) for cast in range(3)] == [
        [6, 6, 6, 0],
        [5, 5, 5, 0],
        [5, 5, 5, 0],
    ]
    few = reference.cast_plan(Mask.window(8, 1, 0), Layout.contiguous(8, 4), casts=3)
    assert few.casts == 1  # a single token for each rank
    assert (
        reference.cast_plan(Mask.documents([0, 4, 8]), Layout.contiguous(8, 2), casts=3).casts == 0
    )


def test_a_plan_keeps_the_pieces_of_used_ranks_only(half, monkeypatch):
    """At 1M tokens on 256 ranks: those of one rank take 1 MB, those of all ranks 30 to 70."""
    monkeypatch.setattr(plan_cache, "PLANS", cache := PlanCache())
    mask = Mask.causal(2**14 if half is reference else 2**20)
    layout = Layout.zigzag(mask.queries, 16 if half is reference else 256)
    plan = half.cast_plan(mask, layout)
    assert sum(plan.send_sizes(0, 3)) == len(plan.send_rows(0, 3))
    assert [key[0].__name__ for key in cache.plans if isinstance(key, tuple)].count(
        "_casts_of"
    ) == 1
    assert cache.held["cpu"] < 1_000_000
