"""A packed tree follows the rules of its docstring, and computes each sequence as it is alone."""

from functools import partial
from itertools import takewhile

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from one_layer import OneLayer
from torch import nn

from canon import Mask, reference
from canon.testing import process_groups
from canon.training import linear_sequence_loss, sequence_loss
from canon.trees import Tree, pack

# Equal sequences, beginnings of others, one token, no token, other roots.
HARD = [
    [0, 1, 2, 3, 4, 5],
    [0, 1, 2],
    [0, 1, 2, 3, 6, 7, 8],
    [7],
    [0, 1, 2],
    [],
    [7, 8],
    [0, 1, 2, 3, 6, 7],
    [0, 3, 3, 3],
]
few = st.lists(st.integers(0, 1), max_size=5)


@st.composite
def alike(draw):
    """Draw sequences of at most 9 tokens. Many begin with one trunk."""
    trunk = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4))
    return [
        trunk[: draw(st.sampled_from([0, 2, 4, 4]))] + draw(few)
        for _ in range(draw(st.integers(0, 7)))
    ]


def checked(tree: Tree, sequences, multiple_of):
    """Assert the rules of a tree. Return it."""
    n, m = len(tree.token_ids), multiple_of
    assert (tree.mask, tree.mask.keys) == (Mask.tree(tree.parents, tree.lengths, tree.starts), n)
    for x, expected in (
        (tree.token_ids, lambda s: s),
        (tree.position_ids, lambda s: [*range(len(s))]),
        (tree.labels, lambda s: [*s[1:], -100][: len(s)]),
    ):
        assert [part.tolist() for part in tree.unpack(x)] == [expected(list(s)) for s in sequences]
    filled = torch.zeros(n, dtype=torch.bool)
    for start, size in zip(tree.starts, tree.lengths, strict=True):
        assert size > 0
        filled[start : start + size] = True
    positions = torch.arange(n)
    assert (positions % m == tree.position_ids % m)[filled].all()
    assert (tree.labels[~filled] == -100).all()
    assert (tree.weights == 0).equal(tree.labels == -100)
    return tree


def depth_of_fork(one, other, m):
    """Return the tokens that two sequences share: up to a multiple of m whose next token is still
    shared.
    """
    if one == other:
        return len(one)
    alike = takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    shared = len(list(alike))
    return max(0, shared - 1) // m * m


@given(alike(), st.sampled_from([1, 2, 3, 4]))
def test_sequences_share_a_position_up_to_the_last_fork_with_one_label(sequences, m):
    given = map(torch.tensor, sequences) if all(sequences) else sequences
    tree = checked(pack(given, m), sequences, m)
    places = tree.unpack(torch.arange(len(tree.token_ids)))
    for one, at in zip(sequences, places, strict=True):
        for other, there in zip(sequences, places, strict=True):
            assert len({*at.tolist()} & {*there.tolist()}) == depth_of_fork(one, other, m)


@given(alike(), st.sampled_from([1, 2, 4]), st.integers(9, 20))
def test_trees_of_at_most_max_tokens_hold_the_sequences_in_order(sequences, m, most):
    trees, first = pack(sequences, m, max_tokens=most), 0
    assert isinstance(trees, list)
    for tree in trees:
        some = sequences[first : first + len(tree.paths)]
        checked(tree, some, m)
        assert len(tree.token_ids) <= most
        first += len(some)
        if first < len(sequences):
            assert len(pack([*some, sequences[first]], m).token_ids) > most, (
                "the next sequence does not fit"
            )
    assert first == len(sequences)


# --- training


class Model(OneLayer):
    def losses(self, ids, positions, labels, mask):
        """Return the losses of all tokens on one rank."""
        hidden = self.hidden(ids, positions, partial(reference.attention, mask=mask))
        return nn.functional.cross_entropy(self.head(hidden), labels, reduction="none")

    def mean(self, loss, ids, positions, labels, weights, attention):
        """Return a loss of `canon.training` over all ranks."""
        hidden, head = self.hidden(ids, positions, attention), self.head
        if loss is sequence_loss:
            return loss(head(hidden), labels, weights=weights)
        options = dict(linear_bias=head.bias, weights=weights, chunk=3)
        return loss(hidden, head.weight, labels, **options)


def new_model():
    torch.manual_seed(0)
    return Model(9, 9).double()


def alone(model, sequence):
    ids = torch.tensor(sequence, dtype=torch.int64)
    labels = torch.cat([ids[1:], ids.new_full((min(1, len(ids)),), -100)])
    return model.losses(ids, torch.arange(len(ids)), labels, Mask.causal(len(ids)))


def mean_of(separate, mean):
    """Return the mean over all tokens, or over the sequences' means. ``separate``: the losses of
    each sequence.
    """
    long = [losses[:-1] for losses in separate if len(losses) > 1]
    return (torch.cat(long) if mean == "tokens" else torch.stack([x.mean() for x in long])).mean()


def same_numbers(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def compare_on_ranks(model, tree, expected):
    """Each rank computes its part of the tree. ``expected``: loss and gradients for each of the two
    weights.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = reference.dispatch(tree.mask, ranks)
    attention = partial(reference.magi_attention, mask=tree.mask, layout=layout)
    given = tree.token_ids, tree.position_ids, tree.labels, tree.weights, tree.sequence_weights
    *inputs, of_tokens, of_sequences = (layout.shard(x, rank, 0) for x in given)
    for weights, (value, right) in zip((of_tokens, of_sequences), expected, strict=True):
        for loss in (sequence_loss, linear_sequence_loss):
            found = model.mean(loss, *inputs, weights, attention)
            gradients = torch.autograd.grad(found, [*model.parameters()])
            for x in gradients:
                dist.all_reduce(x)
            same_numbers(found.detach(), value)
            same_numbers([x / ranks for x in gradients], right)  # DDP and FSDP2 average over ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("multiple_of", [1, 2, 4])
def test_both_losses_with_the_weights_of_a_tree_are_the_means_of_separate_sequences(
    multiple_of, ranks
):
    model, expected = new_model(), []
    for mean in ("tokens", "sequences"):
        loss = mean_of([alone(model, sequence) for sequence in HARD], mean)
        expected.append((loss.detach(), list(torch.autograd.grad(loss, [*model.parameters()]))))
    process_groups.threads(
        partial(compare_on_ranks, model, pack(HARD, multiple_of), expected), ranks
    )


def test_weights_of_a_label_are_those_of_its_sequences():
    tree = pack(HARD, 2)
    assert tree.weights_of([1] * len(HARD)).equal(tree.weights)
    per_token = [torch.arange(len(sequence)) + 10.0 * place for place, sequence in enumerate(HARD)]
    total = torch.zeros(len(tree.token_ids), dtype=torch.float64)
    for row, weights in zip(tree.unpack(torch.arange(len(total))), per_token, strict=True):
        total[row[:-1]] += weights[:-1]
    assert tree.weights_of(iter(per_token)).equal(total)


def test_the_price_of_multiple_of_is_that_of_the_page():
    sequences = [[*range(130), 200 + answer, *range(4)] for answer in range(8)]
    assert [len(pack(sequences, m).token_ids) for m in (1, 128)] == [177, 1031]


def test_gradients_of_unpacked_rows_are_sums():
    tree = pack(HARD, 2)
    x = torch.randn(3, len(tree.token_ids), 2, requires_grad=True, dtype=torch.float64)
    parts = tree.unpack(x, 1)
    assert [part.shape for part in parts] == [(3, len(sequence), 2) for sequence in HARD]
    sum(part.sum() for part in parts).backward()
    uses = torch.cat(tree.unpack(torch.arange(x.shape[1]))).bincount(minlength=x.shape[1])
    assert x.grad.equal(uses[None, :, None].expand_as(x).double())
