"""The tables of trainers in paper/in_your_program.md: their tests exist, and the cuts of other
systems are layouts of Canon.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from canon import Layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "paper" / "in_your_program.md").read_text()
SECTION = PAGE.split("\n## Trainers\n")[1].split("\n## ")[0]


def test_the_tests_that_the_section_names_exist():
    for name in re.findall(r"test_\w+\.py", SECTION):
        assert list((ROOT / "tests").rglob(name)), name


def zigzag(start, length, rank, ranks):
    """Return a rank's two of 2 W equal pieces of a sample."""
    pieces = torch.arange(start, start + length).chunk(2 * ranks)
    return [pieces[rank], pieces[2 * ranks - 1 - rank]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_layouts_are_the_cuts_of_torchtitan_megatron_verl_and_slime(ranks):
    """Two of 2 W equal pieces, of one sequence or of each padded sample. One of W equal pieces."""
    starts = [0, 6 * ranks, 8 * ranks, 18 * ranks]
    n = starts[-1]
    for rank in range(ranks):
        whole = torch.cat(zigzag(0, n, rank, ranks))
        samples = [piece for a, b in pairwise(starts) for piece in zigzag(a, b - a, rank, ranks)]
        assert Layout.zigzag(n, ranks).positions(rank).equal(whole)
        assert Layout.zigzag_documents(starts, ranks).positions(rank).equal(torch.cat(samples))
        assert Layout.contiguous(n, ranks).positions(rank).equal(torch.arange(n).chunk(ranks)[rank])


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_shifted_inside_a_shard_are_lost_or_wrong_at_its_borders(ranks):
    n, wrong = 8 * ranks, 0
    layout, labels = Layout.zigzag(n, ranks), torch.arange(n)[None]
    for rank in range(ranks):
        part = layout.shard_batch({"labels": labels}, rank)
        inside = torch.nn.functional.pad(part["labels"], (0, 1), value=-100)[:, 1:]
        wrong += int((inside != part["shift_labels"]).sum())
    assert wrong == 2 * ranks - 2
