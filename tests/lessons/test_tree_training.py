"""The script `notebooks/tree_training.py`: trees and separate sequences give one loss, on any
ranks.
"""

import re

import torch
import tree_training
from folders import NOTEBOOKS
from programs import on_forked_ranks

SCRIPT = NOTEBOOKS / "tree_training.py"
SMALL = dict(
    steps=3, prompts=1, answers=4, trunk=20, tokens=5, layers=1, width=16, heads=2, key_heads=1
)
ROUNDING = 1e-10  # float64; a fault is above 1e-3


def test_answers_that_share_tokens_have_the_gradients_of_separate_sequences(monkeypatch):
    """Their rewards differ, so a label of the tree needs the weights of all its sequences."""
    rewards, prompt = torch.arange(4.0, dtype=torch.float64)[None], torch.arange(20).expand(4, -1)
    answers = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3, 4, 6], [7, 2, 3, 4, 5]])
    sequences = torch.cat([prompt, answers], 1)[None]
    monkeypatch.setattr(tree_training, "rewards_of", lambda answers: rewards)
    monkeypatch.setattr(tree_training.Trainer, "sampled", lambda self, step: sequences)
    run = tree_training.Run(**SMALL | dict(steps=1))
    assert max(tree_training.train(run)["difference"]) < ROUNDING


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
