"""Claims about the inputs of `canon check`: documents, tensors, masks and layouts of the cases."""

from itertools import product

import pytest

from canon.check import cases
from canon.check.documents import Documents
from canon.check.inputs import inputs
from canon.reference import Layout, Mask, cast_plan


def test_unseen_tokens_hold_nan():
    documents = Documents(("a", "b"), (b"0123456789" * 8, b"abcdef" * 9))
    found = cases.all_cases(["float32"], False, documents)
    x = inputs(next(case for case in found if case.mask == "block_causal"), "cpu")
    assert x.q.isnan().any()
    assert x.k.isnan().any()
    assert not x.q.isnan().all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_planned_cases_interleave_the_chunks_of_their_ranks_and_cast_something(ranks):
    """With the default rates of `dispatch`, so few tokens would stay in contiguous shards, and
    casts would be empty. Cases with rank_invariant=True have whole tiles of 128 tokens.
    """
    documents = Documents(tuple("abcd"), tuple(b"x" * n for n in (72, 100, 150, 257)))
    planned = [
        case
        for case in cases.all_cases(["float32"], False, documents)
        if case.layout == "planned" and not case.rank_invariant
    ]
    assert {case.mask for case in planned} == {*cases.MASKS, "sequences"} - {"full"}
    for case in planned:
        mask, layout = case.masks, case.layout_of(ranks)
        pieces = [len(ranges) for ranges in layout.ranges_per_rank]
        assert max(pieces) > 2, case.name
        assert sum(pieces) > 2 * ranks - 1, case.name
        options = {name: x for name, x in case.options if name in ("casts", "own_keys_first")}
        if isinstance(mask, tuple):
            mask, layout = Mask.concat(mask), Layout.concat([layout] * len(mask))
        plan = cast_plan(mask, layout, **options)
        assert plan.casts == options.get("casts", 1), case.name
        casts = product(range(plan.casts), range(1, ranks))
        assert all(any(plan.receive_sizes(*each)) for each in casts)
