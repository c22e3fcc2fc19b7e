"""The tables of trainers in paper/in_your_program.md: their tests exist, and labels
cannot be shifted inside a shard. tests/masks/test_layout.py has the cuts of other systems.
"""

import re

import pytest
import torch
from folders import GUIDE, ROOT

from canon import Layout

SECTION = GUIDE.read_text().split("\n## Trainers\n")[1].split("\n## ")[0]


def test_the_tests_that_the_section_names_exist():
    for name in re.findall(r"test_\w+\.py", SECTION):
        assert list((ROOT / "tests").rglob(name)), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_shifted_inside_a_shard_are_lost_or_wrong_at_its_borders(ranks):
    n, wrong = 8 * ranks, 0
    layout, labels = Layout.zigzag(n, ranks), torch.arange(n)[None]
    for rank in range(ranks):
        part = layout.shard_batch({"labels": labels}, rank)
        inside = torch.nn.functional.pad(part["labels"], (0, 1), value=-100)[:, 1:]
        wrong += int((inside != part["shift_labels"]).sum())
    assert wrong == 2 * ranks - 2
