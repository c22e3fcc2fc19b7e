"""The tables of trainers in paper/in_your_program.md: their tests exist, and the cuts of other
systems are layouts of Canon.
"""

import re
from pathlib import Path

import pytest
import torch

from canon import Layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "paper" / "in_your_program.md").read_text()
SECTION = PAGE.split("\n## Trainers\n")[1].split("\n## ")[0]


def pieces(n, count):
    """Return ``count`` pieces of equal length."""
    return list(torch.arange(n).view(count, n // count))


def test_the_tests_that_the_section_names_exist():
    for name in re.findall(r"test_\w+\.py", SECTION):
        assert list((ROOT / "tests").rglob(name)), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_layouts_are_the_cuts_of_torchtitan_megatron_verl_and_slime(ranks):
    """Two of 2 W equal pieces, of one sequence or of each padded sample. One of W equal pieces."""
    lengths = [2 * ranks * k for k in (3, 1, 5)]
    starts = [sum(lengths[:i]) for i in range(4)]
    n = starts[-1]
    for rank in range(ranks):
        both = rank, 2 * ranks - 1 - rank
        zigzag = torch.cat([pieces(n, 2 * ranks)[piece] for piece in both])
        assert Layout.zigzag(n, ranks).positions(rank).equal(zigzag)
        samples = [
            start + pieces(length, 2 * ranks)[piece]
            for start, length in zip(starts, lengths, strict=False)
            for piece in both
        ]
        of_samples = Layout.zigzag_documents(starts, ranks).positions(rank)
        assert of_samples.equal(torch.cat(samples))
        assert Layout.contiguous(n, ranks).positions(rank).equal(pieces(n, ranks)[rank])


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_shifted_inside_a_shard_are_lost_or_wrong_at_its_borders(ranks):
    n, wrong = 8 * ranks, 0
    layout, labels = Layout.zigzag(n, ranks), torch.arange(n)[None]
    for rank in range(ranks):
        part = layout.shard_batch({"labels": labels}, rank)
        inside = torch.nn.functional.pad(part["labels"], (0, 1), value=-100)[:, 1:]
        wrong += int((inside != part["shift_labels"]).sum())
    assert wrong == 2 * ranks - 2
