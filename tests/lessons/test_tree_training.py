"""The script `notebooks/tree_training.py`: trees and separate sequences give one loss, on any
ranks.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch
from programs import on_forked_ranks

SCRIPT = Path(__file__).parents[2] / "notebooks" / "tree_training.py"
SMALL = dict(
    steps=3, prompts=1, answers=4, trunk=20, tokens=5, layers=1, width=16, heads=2, key_heads=1
)
ROUNDING = 1e-10  # float64; a fault is above 1e-3


@pytest.fixture(scope="module")
def training():
    return importlib.import_module("tree_training")


def faulty(training, fault):
    """Return `as_tree` with a fault."""

    def as_tree(sequences, weights):
        tree = training.canon.trees.pack(sequences)
        packed = right(sequences, weights)
        rows = torch.cat(tree.unpack(torch.arange(len(tree.token_ids))))
        if fault == "positions in the pack":
            return packed._replace(positions=torch.arange(len(packed.ids)))
        if fault == "a causal mask":
            return packed._replace(mask=training.Mask.causal(len(packed.ids)))
        return packed._replace(
            weights=torch.zeros_like(packed.weights).index_copy_(0, rows, torch.cat([*weights]))
        )

    right = training.as_tree
    return as_tree


@pytest.mark.parametrize(
    "fault", ["positions in the pack", "a causal mask", "the weight of one sequence"]
)
def test_a_fault_of_the_tree_shows_in_the_gradients(training, monkeypatch, fault):
    monkeypatch.setitem(training.WAYS, "tree", faulty(training, fault))
    run = training.Run(**SMALL | dict(steps=1))
    monkeypatch.setattr(
        training, "rewards_of", lambda answers: torch.arange(4.0, dtype=torch.float64)[None]
    )
    answers = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3, 4, 6], [7, 2, 3, 4, 5]])
    prompt = torch.arange(20).expand(4, -1)
    monkeypatch.setattr(
        training.Trainer, "sampled", lambda self, step: torch.cat([prompt, answers], 1)[None]
    )
    assert max(training.train(run)["difference"]) > 1e-3


def test_it_runs_with_the_variables_of_torchrun_and_prints_one_table():
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    output = on_forked_ranks(SCRIPT, 2, *options)
    line = r"^step \d: reward \S+, loss tree (\S+), separate (\S+), gradients differ by (\S+)$"
    steps = re.findall(line, output, re.MULTILINE)
    assert len(steps) == 3
    assert all(tree == separate and float(apart) < ROUNDING for tree, separate, apart in steps)
    table = (
        r"^ranks: 2 +computed tokens +seconds +tokens per second +MB\ntree +\d+ .*\nseparate "
        r"+100 "
    )
    assert re.search(table, output, re.MULTILINE)
