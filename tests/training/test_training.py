"""The losses of several ranks, under DDP and FSDP2, are the loss of one process, with its
gradients.
"""

import contextlib
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_layer import OneLayer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import canon
from canon import Layout, Mask, reference
from canon.testing import process_groups
from canon.training import linear_sequence_loss, sequence_loss
from canon.training.losses import mean_of_ranks

VOCABULARY, ENDS = 11, [0, 5, 6, 19]
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
MASK = Mask.documents(ENDS)
GUIDE = Path(__file__).parents[2] / "paper" / "in_your_program.md"


class Model(OneLayer):
    def forward(self, ids, positions, attend, labels=None, **options):
        """Return the logits, or with ``labels`` the loss: FSDP2 has the weights of the head only
        inside of forward.
        """
        x, head = self.hidden(ids, positions, attend), self.head
        if labels is None:
            return head(x)
        return linear_sequence_loss(x, head.weight, labels, linear_bias=head.bias, **options)


def new_model(kind=Model):
    torch.manual_seed(0)
    return kind(VOCABULARY, 19).double()


def batch(seed=0, ignored=range(0)):
    """Return input_ids and labels of one sequence. ``ignored``, the places of labels without a
    loss.
    """
    ids = torch.randint(VOCABULARY, (1, 19), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, list(ignored)] = -100
    return {"input_ids": ids, "labels": labels}


def losses_of_one_process(model, batch):
    """Return the losses of all tokens with a label."""
    part = Layout.contiguous(19, 1).shard_batch(batch, 0, ENDS)
    attend = partial(reference.attention, mask=MASK)
    logits, labels = model(part["input_ids"], part["position_ids"], attend), part["shift_labels"]
    losses = nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
    return losses[labels[0] >= 0]


def assert_equal_to_one_process(loss, model, *batches, by_token=False):
    """Compare with the mean of the batches' means, or over all their tokens."""
    alone = new_model()
    losses = [losses_of_one_process(alone, each) for each in batches]
    expected = (torch.cat(losses) if by_token else torch.stack([x.mean() for x in losses])).mean()
    expected.backward()
    close(loss, expected.detach())
    grads = [x.grad for x in model.parameters()]
    grads = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]
    close(grads, [x.grad for x in alone.parameters()])


def step(model, batch, layout, attention_group, loss_group, linear=False):
    """Return the loss of this rank's part of the sequence, after the backward pass."""
    part = layout.shard_batch(batch, dist.get_rank(attention_group), ENDS)
    attend = partial(reference.ring_attention, mask=MASK, layout=layout, group=attention_group)
    inputs, labels = (part["input_ids"], part["position_ids"], attend), part["shift_labels"]
    if linear:
        loss = model(*inputs, labels, chunk=4, group=loss_group)
    else:
        loss = sequence_loss(model(*inputs), labels, group=loss_group)
    loss.backward()
    return loss.detach()


# some labels; all of rank 1 if shards are contiguous; none
IGNORED = range(3, 9), range(10, 19), range(0)


def train_on_two_ranks(wrap):
    for layout in (Layout.zigzag(19, 2), Layout([[range(19)], []], 19), Layout.contiguous(19, 2)):
        for ignored in IGNORED:
            for linear in (False, True):
                model, mine = wrap(new_model()), batch(ignored=ignored)
                loss = step(model, mine, layout, None, None, linear)
                assert_equal_to_one_process(loss, model, mine)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["DDP", "FSDP2"])
def test_two_ranks_have_the_loss_and_gradients_of_one_process(wrap):
    process_groups.processes(partial(train_on_two_ranks, wrap), 2)


class Attending(Model):
    """The model of a user: `forward` takes ids and positions."""

    def forward(self, ids, positions):
        attend = partial(reference.zigzag_attention, mask=MASK)
        return super().forward(ids, positions, attend)


def run_the_guide():
    """Run the guide's example, uncompiled, on three microbatches: with some labels, with none and
    with all.
    """
    code = re.search(r"```python\n(model = Dist.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    microbatches = [batch(0, range(6, 15)), batch(1, range(19)), batch(2)]
    names = dict(model=new_model(Attending), layout=Layout.zigzag(19, 2), rank=dist.get_rank())
    names |= dict(DistributedDataParallel=DistributedDataParallel, cu_seqlens=ENDS, torch=torch)
    names["nullcontext"] = contextlib.nullcontext
    sums = []
    hook = lambda state, bucket: sums.append(bucket.index()) or allreduce_hook(state, bucket)
    code = code.replace("torch.compile(model))", "model)\nmodel.register_comm_hook(None, hook)")
    taking = lambda *args, **options: losses.append(sequence_loss(*args, **options)) or losses[-1]
    losses = []
    exec(code, names | {"sequence_loss": taking, "microbatches": microbatches, "hook": hook}, names)
    assert len(sums) == 1, "gradients travel once"
    whole = sum(x.detach() for x in losses)  # the microbatch between has no labels
    assert_equal_to_one_process(whole, names["model"], *microbatches[::2], by_token=True)


def test_the_guide_trains_with_ddp_on_microbatches_of_different_label_counts():
    process_groups.processes(run_the_guide, 2)


def train_on_a_mesh():
    """Two data ranks with different numbers of valid tokens, two context ranks each."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both = batch(0, range(3, 12)), batch(1)
    layout, mine = Layout.zigzag(19, 2), both[mesh["dp"].get_local_rank()]
    context = mesh["cp"].get_group()
    model = DistributedDataParallel(new_model())
    loss = step(model, mine, layout, context, mesh["cp"])
    close(loss, losses_of_one_process(new_model(), mine).mean().detach())
    # data ranks count equally
    assert_equal_to_one_process(sum_over(loss, mesh["dp"].get_group()) / 2, model, *both)
    model = DistributedDataParallel(new_model())
    loss = step(model, mine, layout, context, None)
    assert_equal_to_one_process(loss, model, *both, by_token=True)


def sum_over(x, group):
    dist.all_reduce(x, group=group)
    return x


def test_data_ranks_or_tokens_count_equally_on_a_mesh():
    process_groups.processes(train_on_a_mesh, 4)


def test_without_a_process_group_it_is_the_mean_cross_entropy():
    assert canon.training.sequence_loss is sequence_loss
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([[1, 2, -100, 6, 0], [-100] * 5])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss = sequence_loss(logits, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sequence_loss(logits[0], labels[0]), expected)  # (t, vocabulary)
    loss = sequence_loss(logits.bfloat16(), labels.where(labels >= 0, 7), ignore_index=7)
    assert loss.dtype == torch.float32
    assert loss == nn.functional.cross_entropy(
        logits.bfloat16().float().flatten(0, 1), labels.flatten()
    )


def linear_loss(hidden, labels, **options):
    """Return `linear_sequence_loss` of hidden states that are the logits."""
    return linear_sequence_loss(
        hidden, torch.eye(VOCABULARY, dtype=hidden.dtype), labels, **options
    )


LOSSES = sequence_loss, linear_loss


@pytest.mark.parametrize("tokens", [(3, 3), (0, 4), (0, 0)])
def test_without_a_valid_token_loss_and_gradients_are_0(tokens):
    def program():
        hidden = torch.randn(1, tokens[dist.get_rank()], VOCABULARY, requires_grad=True)
        for loss, items in product(LOSSES, (None, 0)):
            labels = torch.full(hidden.shape[:2], 7)
            found = loss(hidden, labels, ignore_index=7, num_items_in_batch=items)
            assert found == 0
            assert torch.autograd.grad(found, hidden)[0].eq(0).all()

    process_groups.threads(program, 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_items_but_a_label_of_one_rank_raise_on_every_rank(loss):
    def program():
        labels = torch.tensor([3 if dist.get_rank() else -100])
        with pytest.raises(ValueError, match="num_items_in_batch must be above 0"):
            loss(torch.zeros(1, VOCABULARY), labels, num_items_in_batch=0)

    process_groups.threads(program, 2)
    one = torch.ones(())  # as on a GPU
    assert mean_of_ranks("loss", one, one, 0.0, None, 1) == torch.inf


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("wrong", [-0.5, torch.nan, torch.inf, 1e-40])
def test_weights_whose_sum_may_vanish_raise_on_every_rank(wrong, loss):
    hidden, labels = torch.zeros(4, VOCABULARY, dtype=torch.float64), torch.arange(4)
    unlabelled = labels.masked_fill(labels == 2, -100)  # its weight may be anything
    message = "weights must be finite, and 0 or at least 1.2e-38.*pass num_items_in_batch"

    def program():
        weights = torch.ones(4, dtype=torch.float64)
        weights[2] = wrong if dist.get_rank() == 1 else 1
        with pytest.raises(ValueError, match=message):
            loss(hidden, labels, weights=weights)
        assert loss(hidden, unlabelled, weights=weights).isfinite()

    process_groups.threads(program, 2)


def test_advantages_are_weights_of_a_number_of_items():
    """The advantages of four answers add up to 0. Without an advantage that is not 0, the loss is
    0.
    """
    rewards = torch.tensor([1.0, 0.0, 0.3, 0.9], dtype=torch.float64)
    advantages = ((rewards - rewards.mean()) / rewards.std()).repeat_interleave(3)
    hidden = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(12) % 7
    expected = nn.functional.cross_entropy(hidden, labels, reduction="none") @ advantages / 12
    for loss in LOSSES:
        close(loss(hidden, labels, weights=advantages, num_items_in_batch=12), expected)
        assert loss(hidden, labels, weights=0 * advantages) == 0


def test_labels_of_later_tokens_stay_inside_their_documents():
    """Multi-token prediction: each `shard_batch` of a whole sequence shifts its labels once
    more.
    """
    labels = batch()["labels"]
    for k in (1, 2, 3):
        part = Layout.zigzag(19, 2).shard_batch({"labels": labels}, 1, ENDS)
        positions = Layout.zigzag(19, 2).positions(1)
        ends = torch.tensor([min(end for end in ENDS if end > place) for place in positions])
        later = batch()["labels"][:, (positions + k).clamp(max=18)]
        assert part["shift_labels"].equal(torch.where(positions + k < ends, later, -100))
        labels = Layout.contiguous(19, 1).shard_batch({"labels": labels}, 0, ENDS)["shift_labels"]


def test_a_token_of_weight_0_counts_as_one_without_a_label():
    """Also if its loss is infinite, as that of a word that a sampler must not choose."""
    logits, labels, grads = torch.randn(3, 5), torch.tensor([1, 2, 3]), []
    logits[1, 2] = -float("inf")
    losses = []
    for given in ({"weights": torch.tensor([1.0, 0.0, 1.0])}, {}):
        mine = logits.clone().requires_grad_()
        losses.append(
            sequence_loss(mine, labels if given else labels.masked_fill(labels == 2, -100), **given)
        )
        grads += torch.autograd.grad(losses[-1], mine)
    assert losses[0].isfinite()
    assert torch.equal(*losses)
    assert torch.equal(*grads)
