"""A new mask costs the host a few tables, and no Python call for each document."""

import sys

import numpy as np
import pytest
import torch

from canon import Mask, fast
from canon.fast.kernels.launcher import Gpu
from canon.masks.plan_cache import PARTS

H200 = Gpu((9, 0), 132, 232448)
TOKENS = 65536


@pytest.fixture(autouse=True)
def _empty(empty_cache):
    PARTS.clear()


def planned(mask):
    """Return the plans of both passes, and how many Python functions were called for them."""
    calls = [0]

    def count(frame, event, argument):
        calls[0] += event == "call"

    sizes = {"heads": (32, 8), "widths": (128, 128), "batch": 1, "dtype": torch.bfloat16}
    sys.setprofile(count)
    try:
        made = fast.prepare("attention", mask, None, device=H200, **sizes)
    finally:
        sys.setprofile(None)
    return made.plans, calls[0]


def evenly(documents):
    return Mask.documents(range(0, TOKENS + 1, TOKENS // documents))


@pytest.mark.parametrize("documents", [16, 64, 256, 1024])
def test_both_passes_of_a_new_mask_upload_three_tables_at_most(documents):
    """Of both states of `torch.use_deterministic_algorithms`, which can need two orders, four."""
    plans, _ = planned(evenly(documents))
    arrays = [x for _, plan in plans if isinstance(plan, tuple) for x in plan]
    assert 1 <= sum(isinstance(x, np.ndarray) for x in arrays) <= 4


def test_calls_do_not_grow_with_the_documents():
    planned(Mask.causal(TOKENS))  # imports
    (_, few), (_, many) = planned(evenly(512)), planned(evenly(2048))
    assert many - few < 300
