"""A wrong argument of a mask or a layout raises an error that names it."""

import numpy as np
import pytest
import torch

from canon import Band, Layout, Mask, trees

MASK, LAYOUT, ONE = Mask.causal(8), Layout.zigzag(8, 2), Layout.contiguous(8, 1)
X = torch.zeros(1, 8)
NO_NUMBERS = [
    "8",
    8.0,
    8.5,
    float("nan"),
    True,
    None,
    [8],
    (8,),
    np.float32(8),
    np.bool_(True),
    torch.tensor(8),
]

pytestmark = pytest.mark.usefixtures("own_errors")


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("queries", Mask.full),
        ("keys", lambda n: Mask.full(8, n) if n is not None else Mask.full(8, "8")),
        ("queries", Mask.causal),
        ("keys", lambda n: Mask.causal(8, n) if n is not None else Mask.causal(8, "8")),
        ("n", Mask.window),
        ("n", lambda n: Mask.prefix(n, 2)),
        ("prefix", lambda n: Mask.prefix(8, n)),
        ("queries", lambda n: Mask([], n, 8)),
        ("keys", lambda n: Mask([], 8, n)),
        ("keys", lambda n: MASK.shift(0, n)),
        ("q_stop", lambda n: Band(0, n, 0, 8)),
        (r"cu_seqlens\[1\]", lambda n: Mask.documents([0, n])),
        (r"lengths\[0\]", lambda n: Mask.tree([-1], [n])),
        ("multiple_of", lambda n: trees.pack([], n)),
        (r"lengths\[0\]", lambda n: Mask.padding([n], 9)),
        ("n", lambda n: Mask.padding([1], n)),
        (r"position_ids\[1\]", lambda n: Mask.from_position_ids([0, n])),
        (r"q_blocks\[1\]", lambda n: Mask.block_causal([0, n if n is not True else None])),
        (r"q_ranges\[0\]\[1\]", lambda n: Mask.ranges([(0, n)], [(0, 8)], [0])),
        ("slice type", lambda n: Mask.ranges([(0, 8)], [(0, 8)], [n if n != "8" else None])),
        ("n", lambda n: Layout.contiguous(n, 2)),
        ("n", lambda n: Layout.zigzag(n, 2)),
        ("n", lambda n: Layout.striped(n, 2)),
        ("ranks", lambda n: Layout.contiguous(8, n)),
        ("ranks", lambda n: Layout.zigzag(8, n)),
        ("ranks", lambda n: Layout.striped(8, n)),
        ("ranks", lambda n: Layout.zigzag_documents([0, 8], n)),
        (r"cu_seqlens\[1\]", lambda n: Layout.zigzag_documents([0, n], 2)),
        ("tokens", lambda n: Layout([[range(8)]], n)),
        ("rank", LAYOUT.size),
        ("rank", LAYOUT.positions),
        ("rank", lambda n: LAYOUT.shard(X, n)),
        ("dim", lambda n: LAYOUT.shard(X, 0, n)),
        ("dim", lambda n: ONE.unshard(X, None, n)),
        ("q_rank", lambda n: LAYOUT.local_mask(MASK, n, 0)),
        ("k_ranks", lambda n: LAYOUT.local_mask(MASK, 0, [n])),
    ],
)
def test_arguments_that_are_not_whole_numbers_are_named(name, make, wrong):
    with pytest.raises(TypeError, match=rf"{name} must be a whole number.*, got .*: pass an int"):
        make(wrong)


@pytest.mark.parametrize("bound", [2.5, float("inf"), "2", True, (2, 0), torch.tensor(2)], ids=repr)
def test_window_bounds_are_whole_numbers(bound):
    for make in (
        lambda: Mask.window(8, bound),
        lambda: MASK.windowed(bound),
        lambda: Mask.documents([0, 8], window=(bound, 0)),
    ):
        with pytest.raises(TypeError, match="window left must be a whole number"):
            make()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_count_as_whole_numbers(kind):
    n, two, one, none = map(kind, (8, 2, 1, 0))
    ends = np.array([0, 3, 8], dtype=kind)
    for ours, expected in [
        (Mask.window(n, two, none), Mask.window(8, 2, 0)),
        (Mask.documents(ends), Mask.documents([0, 3, 8])),
        (
            Mask.block_causal(ends, q_valid=ends > 0),
            Mask.block_causal([0, 3, 8], q_valid=[0, 1, 1]),
        ),
        (Mask.ranges(np.array([[0, 8]], kind), np.array([[0, 8]], kind), [one]), MASK),
        (Mask([Band(none, n, none, n, None, none)], n, n), MASK),
        (Layout.zigzag(n, two), LAYOUT),
        (LAYOUT.local_mask(MASK, none, one), LAYOUT.local_mask(MASK, 0, 1)),
    ]:
        assert ours == expected
        assert ours.digest == expected.digest
        assert not isinstance(getattr(ours, "queries", 0) + getattr(ours, "tokens", 0), np.generic)
    assert LAYOUT.shard(X, none, one).shape == (1, 4)


NO_LISTS = ["038", 8, None, {0, 8}, {0: 8}, (x for x in (0, 8))]


@pytest.mark.parametrize("wrong", NO_LISTS, ids=lambda x: type(x).__name__)
def test_arguments_that_are_not_sequences_of_numbers_are_named(wrong):
    for name, make in [
        ("cu_seqlens", Mask.documents),
        ("cu_seqlens", lambda ends: LAYOUT.document_positions(0, ends)),
        ("q_blocks", Mask.block_causal),
        (
            "k_valid",
            lambda flags: Mask.block_causal([0, 1], None, None, flags if flags is not None else 1),
        ),
    ]:
        with pytest.raises(
            TypeError, match=f"{name} must be a sequence or a tensor of whole numbers, got"
        ):
            make(wrong)


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_tensors_and_arrays_of_numbers_have_one_axis_and_no_fractions(make):
    for wrong, shape in ((make([[0, 3], [3, 8]]), r"\(2, 2\)"), (make(8), r"\(\)")):
        with pytest.raises(ValueError, match=f"must have one axis, got shape {shape}"):
            Mask.documents(wrong)
    for wrong in (make(8), make([[[0, 3]]])):
        for of in (Mask.block_causal, Mask.from_position_ids):
            with pytest.raises(ValueError, match=r"must be \(n,\) or \(b, n\), got"):
                of(wrong)
    for wrong in (make([0.0, 8.0]), make([0, 2.5])):  # float32 holds no whole numbers beyond 2^24
        with pytest.raises(TypeError, match=r"cu_seqlens\[0\] must be a whole number, got 0.0"):
            Mask.documents(wrong)
    with pytest.raises(TypeError, match=r"q_ranges\[0\] must be a pair"):
        Mask.ranges(make([0, 8]), [(0, 8)], [0])


VALUES = [  # parts of the error
    (lambda: Mask.full(2**62), "queries must be below 2^62"),
    (lambda: Mask.documents([0, 2**63]), "cu_seqlens must lie within"),
    (
        lambda: Mask.block_causal([0, 1], q_valid=[1, 5]),
        "q_valid must hold booleans, 0 or 1, got 5",
    ),
    (
        lambda: Mask.padding([3, 9], 8),
        "lengths[1] must be in 0..8, the tokens of a sequence, got 9",
    ),
    (lambda: Mask.from_position_ids([1, 2]), "position_ids[0] is 1: a position is 0, at the start"),
    (lambda: Mask.block_causal([[0], [1]], q_valid=[[1]]), "{'q_blocks': 2, 'q_valid': 1}"),
    (
        lambda: Mask.tree([-1, 0, 0, 1], [1] * 4),
        "parents[3] must be 2, an ancestor of node 2, or -1",
    ),
    (lambda: Mask.tree([-1, 0], [1, -1]), "lengths[1] must be >= 0, got -1"),
    (
        lambda: Mask.tree([-1, 0], [3, 1], [1, 3]),
        "starts[1] must be at least 4, the end of the node before",
    ),
    (lambda: Mask.tree([-1], [1, 2]), "1 parents, 2 lengths and 2 starts: give one of each"),
    (lambda: trees.pack([[1]], 0), "multiple_of must be a whole number >= 1, got 0"),
    (
        lambda: trees.pack([[1, 2]], max_tokens=1),
        "sequences[0] has 2 tokens, more than max_tokens=1",
    ),
    (lambda: trees.pack([[1, 2]]).unpack(X), "unpack: x has 1 entries along dim 0, the tree 2"),
    (
        lambda: Mask.ranges([(0, 3)], [(0, 3)], ["inv_causal"]),
        "write 'inverse_causal' for this type",
    ),
    (lambda: Band(0, 4, 0, 4).pick(range(0, 4, 2), range(4)), "two ascending ranges of one step"),
    (lambda: Layout([[range(10**30)]], 4), "ranges_per_rank[0][0] must lie inside"),
    (lambda: LAYOUT.shard(torch.zeros(8), 0), "x of shape (8,) has no dim 1"),
    (lambda: ONE.unshard(torch.zeros(8)), "unshard: x of shape (8,) has no dim 1"),
    (lambda: Mask.causal(3, -2), "keys", "-2"),
    (lambda: Mask([Band(0, 5, 0, 4)], 4, 4), "0:5", "4 queries"),
    (lambda: Mask.window(8, left=-2), "-2"),
    (lambda: Mask.documents([]), "[]"),
    (lambda: Mask.documents([1, 3]), "[1, 3]"),
    (lambda: Mask.documents([0, 5, 3]), "5", "3"),
    (lambda: Mask.prefix(4, 5), "4", "5"),
    (lambda: Mask.block_causal([0, 1, 2], q_valid=[True]), "3", "1"),
    (lambda: Mask.ranges([(3, 1)], [(0, 2)], [0]), "(3, 1)"),
    (lambda: Mask.ranges([(0, 1)], [(0, 2)], []), "1 q_ranges", "0 types"),
    (lambda: Mask.ranges([(0, 4), (2, 6)], [(0, 4), (3, 5)], [0, 0]), "q 0:4", "q 2:6"),
    (lambda: Mask.ranges([(0, 4)], [(0, 4)], [0], queries=3), "0:4", "3 queries"),
    (lambda: Mask.causal(4).crop(range(2, 6)), "range(2, 6)", "4"),
    (lambda: Mask.causal(4).crop(range(3, 0, -1)), "range(3, 0, -1)"),
    (lambda: Mask.causal(4).crop(range(0, 4, 2), range(4)), "2", "1"),
    (lambda: Layout.zigzag(8, 0), "ranks", "0"),
    (lambda: Layout.contiguous(8, 2, 0), "multiple_of", "0"),
    (lambda: Layout([], 0), "ranges_per_rank", "[]"),
    (lambda: Layout([[range(4)], [range(3, 8)]], 8), "range(3, 8)", "rank 1", "token 4"),
    (lambda: Layout([[range(4)]], 8), "token 4"),
    (lambda: Layout([[range(7, -1, -1)]], 8), "-1"),
    (lambda: Layout([[range(0, 8, 2)], [range(1, 8, 1)]], 8), "[1, 2]"),
    (lambda: Layout.concat([Layout.zigzag(8, 2), Layout.zigzag(8, 3)]), "2, 3"),
    (lambda: Layout.striped(9, 3).positions(3), "3"),
    (lambda: Layout.striped(9, 3).shard(torch.zeros(1, 8, 2), 0), "8", "9"),
    (lambda: Layout.striped(9, 3).document_positions(0, [0, 4]), "4", "9"),
    (lambda: Layout.striped(9, 3).local_mask(Mask.causal(8), 0, 0), "8 x 8", "9"),
    (lambda: Layout.striped(9, 3).local_mask(Mask.causal(9), 0, [0, 5]), "5"),
    (lambda: Layout.striped(9, 3).unshard(torch.zeros(1, 3, 2)), "3 ranks"),
]
TYPES = [  # parts of the error
    (lambda: Mask.documents([0, 8], causal="no"), "causal must be True or False, got 'no'"),
    (lambda: trees.pack(3), "sequences must be a list with the token ids of each sequence, got 3"),
    (
        lambda: Mask.documents([0, 8], window=0),
        "window must be a pair (left, right) or None, got 0",
    ),
    (lambda: Mask.ranges([(0, 3, 9)], [(0, 3)], [0]), "q_ranges[0] must be a pair"),
    (lambda: Mask.ranges([(0, 3)], [(0, 3)], "full"), "types must be a sequence"),
    (lambda: Mask.concat(MASK), "masks must be a sequence of Masks"),
    (lambda: Mask.concat([MASK, 3]), "masks[1] must be a Mask, got 3"),
    (lambda: Mask(Band(0, 4, 0, 4), 4, 4), "bands[0] must be a Band, got 0"),
    (lambda: MASK.crop(slice(0, 2)), "crop: queries must be a range"),
    (lambda: MASK.needed_keys(range(3)), "query_ranges[0] must be a range, got 0"),
    (lambda: Layout([[0, 1], [2, 3]], 4), "ranges_per_rank[0][0] must be a range, got 0"),
    (lambda: Layout([range(2), range(2, 4)], 4), "ranges_per_rank[0] must be a list of ranges"),
    (lambda: Layout(None, 4), "ranges_per_rank must be a list"),
    (
        lambda: LAYOUT.shard(np.zeros((1, 8)), 0),
        "plain tensor, got ndarray: pass torch.as_tensor(x)",
    ),
    (lambda: ONE.unshard(X, "world"), "a DeviceMesh of one dimension or None, got 'world'"),
    (lambda: ONE.unshard(X, partial_grad="yes"), "partial_grad must be True or False, got 'yes'"),
    (
        lambda: LAYOUT.local_mask(MASK.dense(), 0, 1),
        "mask must be a Mask, got a tensor of shape (8, 8)",
    ),
]


@pytest.mark.parametrize(
    ("error", "make", "parts"),
    [
        (error, make, parts)
        for error, table in ((ValueError, VALUES), (TypeError, TYPES))
        for make, *parts in table
    ],
)
def test_other_wrong_arguments_are_named_with_their_numbers(error, make, parts):
    with pytest.raises(error) as raised:
        make()
    assert all(part in str(raised.value) for part in parts), str(raised.value)
