"""A wrong argument of a mask or a layout raises an error that names it."""

from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch

from canon import Band, Layout, Mask, trees

MASK, LAYOUT, ONE = Mask.causal(8), Layout.zigzag(8, 2), Layout.contiguous(8, 1)
X, TREE = torch.zeros(1, 8), trees.pack([[0, 1, 2], [0, 1]])
NO_NUMBERS = "8", 8.0, 8.5, float("nan"), True, None, [8], (8,), np.float32(8), torch.tensor(8)
# a call, and its arguments, which are whole numbers
CALLS = [
    (Mask.full, 8, 8),
    (Mask.causal, 8, 8),
    (Mask.window, 8, 2, 0),
    (MASK.windowed, 2, 0),
    (Mask.prefix, 8, 2),
    (partial(Mask, []), 8, 8),
    (partial(Mask.padding, [1]), 8),
    (partial(trees.pack, []), 1, 8),
    (Layout.contiguous, 8, 2, 1),
    (Layout.zigzag, 8, 2, 1),
    (partial(Layout.zigzag_documents, [0, 8]), 2),
    (Layout.striped, 8, 2),
    (partial(Layout, [[range(8)]]), 8),
    (LAYOUT.size, 0),
    (LAYOUT.positions, 0),
    (partial(LAYOUT.shard, X), 0),
    (partial(LAYOUT.local_mask, MASK), 0, 0),
]
SIGNED = [(Band, 0, 8, 0, 8, -8, 0), (MASK.shift, 0, 0), (partial(ONE.unshard, X, None), 1)]

pytestmark = pytest.mark.usefixtures("own_errors")


@pytest.mark.parametrize(("call", "given"), [(call, given) for call, *given in CALLS + SIGNED])
def test_arguments_that_are_not_whole_numbers_are_named(call, given):
    for place, parameter in enumerate([*signature(call).parameters.values()][: len(given)]):
        wrongs = [x for x in NO_NUMBERS if x is not parameter.default]
        if parameter.name == "k_ranks":  # or a sequence
            wrongs = [x for x in wrongs if not isinstance(x, str | list | tuple)]
        for wrong in wrongs:
            with pytest.raises(
                TypeError, match=rf"{parameter.name} must be a whole number.*, got .*: pass an int"
            ):
                call(*given[:place], wrong, *given[place + 1 :])
        if (call, *given) in CALLS:
            with pytest.raises(ValueError, match=f"{parameter.name}|rank -2 is not one of"):
                call(*given[:place], -2, *given[place + 1 :])


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        (r"cu_seqlens\[1\]", lambda n: Mask.documents([0, n])),
        (r"q_blocks\[1\]", lambda n: Mask.block_causal([0, n if n is not True else None])),
        (r"q_ranges\[0\]\[1\]", lambda n: Mask.ranges([(0, n)], [(0, 8)], [0])),
        ("slice type", lambda n: Mask.ranges([(0, 8)], [(0, 8)], [n])),
    ],
)
def test_entries_that_are_not_whole_numbers_are_named(name, make, wrong):
    with pytest.raises(TypeError, match=rf"{name}.* must be a whole number.*, got"):
        make(wrong)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_count_as_whole_numbers(kind):
    n, two, one, none = map(kind, (8, 2, 1, 0))
    ends = np.array([0, 3, 8], dtype=kind)
    for ours, expected in [
        (Mask.window(n, two, none), Mask.window(8, 2, 0)),
        (Mask.documents(ends), Mask.documents([0, 3, 8])),
        (Mask.ranges(np.array([[0, 8]], kind), np.array([[0, 8]], kind), [one]), MASK),
        (Mask([Band(none, n, none, n, None, none)], n, n), MASK),
        (LAYOUT.local_mask(MASK, none, one), LAYOUT.local_mask(MASK, 0, 1)),
    ]:
        assert ours == expected
        assert ours.digest == expected.digest
        assert type(ours.queries) is int


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
    (  # those of an image repeat and jump, so they do not count the tokens of a document
        lambda: Mask.from_position_ids(torch.arange(8).expand(3, 1, 8)),
        "must be (n,) or (b, n), got a tensor of shape (3, 1, 8)",
        ": positions (3, b, n) of a vision model do not count",
        "use Mask.documents(cu_seqlens)",
    ),
    (
        lambda: Mask.padding([3, 9], 8),
        "lengths[1] must be in 0..8, the tokens of a sequence, got 9",
    ),
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
    (
        lambda: trees.pack([[1, 2]], max_tokens=1),
        "sequences[0] has 2 tokens, more than max_tokens=1",
    ),
    (lambda: TREE.weights_of([1.0]), "1 weights for 2 sequences: give one of each"),
    (lambda: TREE.weights_of([torch.ones(2), 1.0]), "must be a number or (3,), got (2,)"),
    (lambda: TREE.unpack(X), "unpack: x has 1 entries along dim 0, the tree 4"),
    (lambda: Band(0, 4, 0, 4).pick(range(0, 4, 2), range(4)), "two ascending ranges of one step"),
    (lambda: Layout([[range(10**30)]], 4), "rank 0 must lie inside the layout's 4 tokens"),
    (lambda: Mask([Band(0, 5, 0, 4)], 4, 4), "0:5", "4 queries"),
    (  # the outer bands meet below the end of the one between them
        lambda: Mask([Band(0, 9, 0, 9, -1, 0), Band(0, 3, 5, 6), Band(0, 9, 7, 8)], 9, 9),
        f"share cells: {Band(0, 9, 0, 9, -1, 0)} and {Band(0, 9, 7, 8)}",
    ),
    (lambda: Mask.documents([1, 3]), "[1, 3]"),
    (lambda: Mask.documents([0, 5, 3]), "5", "3"),
    (lambda: Mask.prefix(4, 5), "4", "5"),
    (lambda: Mask.block_causal([0, 1, 2], q_valid=[True]), "3", "1"),
    (lambda: Mask.ranges([(3, 1)], [(0, 2)], [0]), "(3, 1)"),
    (lambda: Mask.ranges([(0, 1)], [(0, 2)], []), "1 q_ranges", "0 types"),
    (lambda: Mask.ranges([(0, 4), (2, 6)], [(0, 4), (3, 5)], [0, 0]), "q 0:4", "q 2:6"),
    (lambda: Mask.ranges([(0, 4)], [(0, 4)], [0], queries=3), "0:4", "3 queries"),
    (lambda: MASK.with_blocks([1, 4], [3]), "2 starts and 1 stops: give one of each"),
    (lambda: MASK.with_blocks([4, 2], [6, 2]), "block 1 needs 0 <= start < stop <= 8", "(2, 2)"),
    (lambda: MASK.with_blocks([6], [9]), "block 0 needs", "stop <= 8, the tokens of the mask"),
    (
        lambda: MASK.with_blocks([4, 1], [6, 5]),
        "blocks 1 and 0 overlap, (1, 5) and (4, 6): join them",
    ),
    (
        lambda: Mask.causal(3, 8).with_blocks([1], [2]),
        "with_blocks needs a square mask, got 3 x 8: crop it",
    ),
    (
        lambda: Mask.union(Mask.causal(3, 8), Mask.full(3)),
        "union needs masks of one size, got 3 x 3, 3 x 8",
    ),
    (lambda: Mask.union(), "union needs masks of one size, got no mask"),
    (lambda: MASK.crop(range(6, 10)), "range(6, 10)", "8"),
    (lambda: MASK.crop(range(3, 0, -1)), "range(3, 0, -1)"),
    (lambda: MASK.crop(range(0, 8, 2), range(8)), "2", "1"),
    (lambda: Layout([], 0), "ranges_per_rank", "[]"),
    (lambda: Layout([[range(4)], [range(3, 8)]], 8), "range(3, 8)", "rank 1", "token 4"),
    (lambda: Layout([[range(4)]], 8), "token 4"),
    (lambda: Layout([[range(7, -1, -1)]], 8), "-1"),
    (lambda: Layout([[range(0, 8, 2)], [range(1, 8, 1)]], 8), "[1, 2]"),
    (lambda: Layout.concat([Layout.zigzag(8, 2), Layout.zigzag(8, 3)]), "2, 3"),
    (lambda: Layout.striped(9, 3).shard(X, 0), "8", "9"),
    (lambda: Layout.striped(9, 3).document_positions(0, [0, 4]), "4", "9"),
    (
        lambda: LAYOUT.shard_batch({"labels": X.long()}, 0, Mask.causal(7)),
        "the mask is 7 x 7, the layout has 8 tokens",
    ),
    (lambda: Layout.striped(9, 3).local_mask(MASK, 0, 0), "8 x 8", "9"),
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
    (lambda: Mask.ranges([(0, 3)], [(0, 3)], ["inv_causal"]), "'inverse_causal'", "'inv_causal'"),
    (lambda: Mask.concat(MASK), "masks must be a sequence of Masks"),
    (lambda: Mask.concat([MASK, 3]), "masks[1] must be a Mask, got 3"),
    (
        lambda: TREE.weights_of([1.0, [1.0, 1.0]]),
        "per_sequence[1] must be a number or a tensor",
    ),
    (lambda: MASK.with_blocks([1.0], [3]), "starts[0] must be a whole number, got 1.0"),
    (lambda: MASK.crop(slice(0, 2)), "crop: queries must be a range"),
    (lambda: Layout([[0, 1], [2, 3]], 4), "ranges_per_rank[0][0] must be a range, got 0"),
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
