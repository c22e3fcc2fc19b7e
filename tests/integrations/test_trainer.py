"""Claims about `canon.integrations.trainer`: losses, gradients and evaluation equal those of
transformers' Trainer.
"""

import inspect
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from canon.testing import process_groups

pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra accelerate is not installed")
from meshes import mesh
from tiny_models import tiny
from trainer_runs import COLLATOR, assert_same, losses_and_weights, texts
from transformers import Trainer, TrainingArguments

from canon.integrations.trainer import (
    ContextParallelTrainer,
    ShardingCollator,
    _check_successive,
    mask_of,
)

DATA = dict(train=texts(11), evaluation=texts(5))  # the last batch of an epoch is short
plain = partial(
    losses_and_weights, Trainer, TrainingArguments, **DATA, attention="eager", **COLLATOR
)
shared = partial(
    losses_and_weights,
    ContextParallelTrainer,
    TrainingArguments,
    **DATA,
    half="reference",
    **COLLATOR,
)


def steps(accumulation):
    return {"changes": {"gradient_accumulation_steps": accumulation}}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from texts(4)


def runs_of_a_rank():
    """Return runs with two context ranks, the last over a mesh, and one with two data ranks of one
    context rank each.
    """
    contexts = [
        shared(**steps(accumulation), function=function)
        for accumulation, function in ((1, "magi"), (2, "ring"))
    ]
    # a ring alone makes no all-to-all
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        contexts.append(shared(**steps(1), function="ring", group=mesh(1, 2)))
    assert exchange.called
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match="so ranks would read different batches"):
        shared(train=Endless())
    return [*contexts, shared(train=texts(12), group=alone)]


def test_ranks_train_as_one_process_of_transformers():
    one = [shared(**steps(1)), shared(**steps(2)), shared(train=texts(12), **steps(2))]
    for found, expected in zip(one, (plain(**steps(1)), plain(**steps(2))), strict=False):
        assert_same(found, expected, tolerance=1e-6)
    losses, weights = one.pop()
    one.append(one[0])
    one.append((torch.cat([losses[:-1].reshape(-1, 2).sum(1), losses[-1:]]), weights))
    for rank in process_groups.processes(runs_of_a_rank, 2, timeout=200):
        for found, expected in zip(rank, one, strict=True):
            assert_same(found, expected)


def test_the_methods_of_trainer_are_those_that_canon_overrides():
    def parameters(kind, name):
        return list(inspect.signature(getattr(kind, name)).parameters)

    of_canon = vars(ContextParallelTrainer)
    names = {name for name in of_canon if hasattr(Trainer, name) and not name.startswith("__")}
    loss = {"compute_loss", "prediction_step", "evaluation_loop"}
    assert names == loss | {"_get_dataloader", "get_total_train_batch_size"}
    for name in names:
        ours, theirs = (parameters(kind, name) for kind in (ContextParallelTrainer, Trainer))
        assert ours in (theirs, ["self", "args", "kwargs"])
    assert "is_training" in parameters(Trainer, "_get_dataloader")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "does not support label_smoothing_factor"),
        (
            {"average_tokens_across_devices": False},
            {},
            "does not support average_tokens_across_devices=False",
        ),
        ({"neftune_noise_alpha": 5.0}, {}, "does not support neftune_noise_alpha"),
        ({}, {"compute_metrics": len}, "does not support compute_metrics"),
        ({}, {"half": "slow"}, "half must be one of"),
        ({}, {"attention": "eager"}, "attend to their own tokens alone"),
    ],
)
def test_what_is_not_supported_raises(changes, options, message):
    with pytest.raises(ValueError, match=message):
        shared(changes=changes, **options)


def test_layers_that_mix_tokens_outside_of_attention_raise(tmp_path):
    model = tiny("Llama", "canon")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(
        ValueError, match="'linear_attention' would mix the tokens of one rank only"
    ):
        ContextParallelTrainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none"))


def test_a_model_that_is_not_causal_raises(tmp_path):
    model = tiny("Llama", "canon")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="the model is not causal"):
        ContextParallelTrainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none"))


def test_a_group_has_successive_ranks():
    def program():
        group = dist.new_group([1, 2])
        if dist.get_rank():
            with pytest.raises(
                ValueError, match="expected 2 successive ranks from a multiple of 2"
            ):
                _check_successive("Trainer", group, 2)

    process_groups.threads(program, 3)


def test_a_batch_has_labels_and_one_mask():
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    with pytest.raises(ValueError, match="sequences of a batch are packed differently"):
        mask_of({"position_ids": positions})
    with pytest.raises(ValueError, match="must return labels"):
        ShardingCollator(lambda features: {"input_ids": positions}, len, 0, 1)([])
    packed = {"labels": positions[:1], "seq_idx": positions[:1]}
    with pytest.raises(ValueError, match=r"returns \['seq_idx'\] without position_ids"):
        ShardingCollator(lambda features: packed, len, 0, 1)([])
