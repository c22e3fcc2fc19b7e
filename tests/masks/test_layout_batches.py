"""`Layout.shard_batch` divides a training batch, with positions in documents and labels shifted
before the division.
"""

from itertools import pairwise

import pytest
import torch
from band_strategies import layouts
from hypothesis import given
from hypothesis import strategies as st

from canon import Layout, Mask


def in_documents(cu_seqlens):
    """Return the position of each token in its document, and whether the next token is in the same
    one.
    """
    spans = [range(b - a) for a, b in pairwise(cu_seqlens)]
    return [i for span in spans for i in span], [i + 1 < len(span) for span in spans for i in span]


@given(st.data(), layouts(), st.integers(1, 3))
def test_every_entry_is_divided_and_labels_are_shifted_inside_documents(data, layout, b):
    n = layout.tokens
    ends = data.draw(
        st.none() | st.lists(st.integers(0, n), max_size=4).map(lambda cuts: [0, *sorted(cuts), n])
    )
    source = data.draw(st.sampled_from(["ends", "positions", "both"]))
    positions, continues = in_documents(ends or [0, n])
    batch = {
        "input_ids": torch.arange(b * n).view(b, n),
        "labels": torch.arange(b * n).view(b, n) + 7,
        "pixels": torch.randn(b, n, 2, 3),
    }
    if source == "both":
        positions = range(n)  # which do not restart
    if source != "ends":
        batch["position_ids"] = torch.tensor(positions, dtype=torch.int64).expand(b, n)
    inside = torch.tensor(continues, dtype=torch.bool)
    next_label = torch.where(inside, batch["labels"].roll(-1, 1), -100)
    for rank in range(layout.ranks):
        part = layout.shard_batch(batch, rank, None if source == "positions" else ends)
        held = layout.positions(rank)
        assert set(part) == {"input_ids", "labels", "pixels", "position_ids", "shift_labels"}
        for name, x in batch.items():
            assert part[name].equal(x[:, held])
        expected = torch.tensor(positions, dtype=torch.int64)[held].expand(b, -1)
        assert part["position_ids"].equal(expected)
        assert part["shift_labels"].equal(next_label[:, held])


@st.composite
def positions_of_rows(draw):
    """Draw position_ids (b, n): documents from 0 on, and often a place where a count is wrong, as
    in a tree or at padding.
    """
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    row = [place for length in lengths for place in range(length)]
    for _ in range(draw(st.integers(0, 2))):
        row[draw(st.integers(0, len(row) - 1))] = draw(st.integers(-1, 5))
    return [row, [*range(len(row))]][: draw(st.integers(1, 2))]


@given(positions_of_rows(), st.integers(1, 3))
def test_documents_are_those_of_the_mask_of_the_same_positions(rows, ranks):
    """A token learns its successor if the successor sees it. Where no mask exists, there are no
    labels.
    """
    n = len(rows[0])
    layout, labels = Layout.zigzag(n, ranks), torch.arange(n).expand(len(rows), -1)
    batch = {"labels": labels, "position_ids": torch.tensor(rows)}
    follows = all(b in (0, a + 1) for row in rows for a, b in zip([-1, *row], row, strict=False))
    if not follows:
        for take in (Mask.from_position_ids, lambda _: layout.shard_batch(batch, 0)):
            with pytest.raises(ValueError, match="one more than.*Mask.padding.*canon.trees"):
                take(rows)
        return
    masks = Mask.from_position_ids(rows)
    for mask, row in zip(masks, range(len(rows)), strict=True):
        learns = [*mask.dense()[1:].diagonal().tolist(), False]
        right = torch.where(torch.tensor(learns), torch.arange(n) + 1, -100)
        for rank in range(ranks):
            assert layout.shard_batch(batch, rank)["shift_labels"][row].equal(
                right[layout.positions(rank)]
            )


@given(st.data(), st.integers(0, 14), st.integers(1, 3))
def test_documents_of_a_mask_are_those_of_cu_seqlens(data, n, ranks):
    """Images inside the documents change nothing, nor does a window."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=4)))
    ends = [0, *(cut for cut in cuts if cut < n), *[n] * (n > 0)]
    mask = Mask.documents(ends, window=(data.draw(st.integers(1, 5)), 0))
    images = [(a, b) for a, b in pairwise(ends) if data.draw(st.booleans())]
    mask = mask.with_blocks([a for a, _ in images], [b for _, b in images])
    layout, batch = Layout.zigzag(n, ranks), {"labels": torch.arange(n)[None]}
    for rank in range(ranks):
        part, other = (layout.shard_batch(batch, rank, of) for of in (mask, torch.tensor(ends)))
        assert part["shift_labels"].equal(other["shift_labels"])
        assert part["position_ids"].equal(other["position_ids"])
        assert layout.document_positions(rank, mask).equal(part["position_ids"][0])


def test_a_mask_without_documents_is_refused():
    """In a tree, positions of a branch continue those of its trunk."""
    tree = Mask.tree([-1, 0, 0], [3, 2, 3])
    for mask in (tree, tree.with_blocks([3], [5]), Mask.union(tree, Mask.window(8, 0, 0))):
        with pytest.raises(ValueError, match="token 5 does not see token 4, but it or a later one"):
            Layout.zigzag(8, 2).shard_batch({"labels": IDS}, 0, mask)


@pytest.mark.parametrize("dim", [2, -1])
def test_entries_are_divided_along_the_dim_that_is_named(dim):
    """Positions (3, b, n) of a vision model; one sequence first; one axis only."""
    layout, positions = Layout.zigzag(8, 3), torch.arange(48).view(3, 2, 8)
    batch = {
        "labels": torch.arange(16).view(2, 8),
        "position_ids": positions,
        "embeddings": torch.randn(8, 2, 5),
        "weights": torch.randn(8),
    }
    dims = {"position_ids": dim, "embeddings": 0, "weights": -1, "labels": -1}
    for rank in range(3):
        part, held = layout.shard_batch(batch, rank, [0, 5, 8], dims), layout.positions(rank)
        assert part["position_ids"].equal(positions[:, :, held])
        assert part["embeddings"].equal(batch["embeddings"][held])
        assert part["weights"].equal(batch["weights"][held])
        shifted = torch.tensor([1, 2, 3, 4, -100, 6, 7, -100])[held]
        assert part["shift_labels"][0].equal(shifted)


def test_given_shift_labels_are_divided_as_they_are():
    batch = {"labels": torch.zeros(1, 4), "shift_labels": torch.tensor([[5, 6, 7, 8]])}
    assert Layout.striped(4, 2).shard_batch(batch, 1)["shift_labels"].tolist() == [[6, 8]]


IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.usefixtures("own_errors")
@pytest.mark.parametrize(
    ("batch", "more", "error", "message"),
    [
        ({"input_ids": IDS[0]}, {}, ValueError, "'input_ids' must be (b, 8, ...), with all tokens"),
        (
            {"text": ["a", "b"]},
            {},
            TypeError,
            "entry 'text' must be a plain tensor, got ['a', 'b'] (list): leave it out",
        ),
        ({"labels": IDS.float()}, {}, ValueError, "labels must be whole numbers (b, n)"),
        (
            {"labels": IDS, "position_ids": torch.zeros(3, 2, 8)},
            {},
            ValueError,
            "got (3, 2, 8): pass dims={'position_ids': 2}",
        ),
        (
            {"labels": IDS, "position_ids": torch.zeros(3, 2, 8)},
            {"dims": {"position_ids": 2}},
            ValueError,
            "got (3, 2, 8): pass cu_seqlens or the mask",
        ),
        (
            {"input_ids": IDS},
            {"dims": {"position_ids": 2}},
            ValueError,
            "dims names 'position_ids', expected some of ['input_ids']",
        ),
        ({"input_ids": IDS}, {"dims": [1]}, TypeError, "dims must be a dict of dims by name"),
        (
            {"input_ids": IDS},
            {"dims": {"input_ids": 0}},
            ValueError,
            "on dim 0, got (2, 8): pass dims={'input_ids': 1}",
        ),
        ({}, {}, TypeError, "batch must be a dict of one or more tensors, got {}"),
    ],
)
def test_other_entries_are_named(batch, more, error, message):
    with pytest.raises(error) as raised:
        Layout.zigzag(8, 2).shard_batch(batch, 0, **more)
    assert message in str(raised.value)


PLANNED = Mask.documents([0, 40, 60, 100])
TOKENS = torch.arange(100)[None]
LABELS = {"labels": TOKENS}


def positions(*ends):
    return torch.tensor(in_documents([0, *ends, 100])[0])[None]


@pytest.mark.parametrize("divide", [lambda layout: layout, lambda layout: layout.divided(2)])
@pytest.mark.parametrize(
    ("batch", "cu_seqlens"),
    [
        ({"input_ids": TOKENS}, None),
        ({"input_ids": TOKENS, "labels": TOKENS}, None),
        (LABELS, [0, 60, 100]),
        (LABELS | {"position_ids": positions(60)}, None),
        (LABELS | {"position_ids": positions(60)}, Mask.causal(100)),
    ],
)
def test_a_batch_without_the_documents_of_its_plan_warns_on_each_rank(
    half, divide, batch, cu_seqlens
):
    layout = divide(half.dispatch(PLANNED, 2))
    for rank in range(2):
        with pytest.warns(UserWarning, match="begins at token 40.*pass the mask as cu_seqlens"):
            layout.shard_batch(batch, rank, cu_seqlens)


@pytest.mark.parametrize(
    ("mask", "batch", "cu_seqlens"),
    [
        (PLANNED, {"input_ids": TOKENS, "labels": TOKENS}, PLANNED),
        (PLANNED, LABELS, [0, 40, 60, 80, 100]),
        (PLANNED, LABELS | {"position_ids": positions(40, 60)}, None),
        (PLANNED, {"labels": TOKENS.expand(2, -1), "position_ids": positions(40, 60)}, None),
        (PLANNED, {"input_ids": TOKENS, "position_ids": positions()}, None),
        ((PLANNED, Mask.causal(100)), {"labels": TOKENS.expand(2, -1)}, None),
        (Mask.causal(100), LABELS, None),
        (Mask.window(100, 7), LABELS, None),
        (Mask.padding([60], 100)[0], LABELS, None),
        (Mask.tree([-1, 0, 1, 0], [40, 20, 20, 20]), LABELS, None),
    ],
)
def test_batches_that_fit_their_plan_do_not_warn(half, mask, batch, cu_seqlens):
    half.dispatch(mask, 2).shard_batch(batch, 0, cu_seqlens)
