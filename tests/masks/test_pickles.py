"""Claims about pickles: they work between processes, and those of other versions are refused with a
remedy.
"""

import pickle
import subprocess
import sys

import pytest
import torch

from canon import Band, Layout, Mask, reference
from canon.masks import cast_plan, layout, mask
from canon.route import prepared_plans


def objects():
    """Return one object of each class with pickles of its own."""
    window, zigzag = Mask.window(300, left=9, right=0), Layout.zigzag(300, 2)
    _ = window.digest
    ring = dict(rank=0, heads=(2, 1), widths=(8, 8), dtype=torch.float32, device="cpu")
    plans = reference.prepare("ring_attention", window, zigzag, **ring)
    return window, zigzag, reference.cast_plan(window, zigzag), plans


@pytest.mark.parametrize("kind", range(4))
def test_pickles_of_another_format_are_refused_with_a_remedy(monkeypatch, kind):
    for module in (mask, layout, cast_plan, prepared_plans):
        monkeypatch.setattr(module, "FORMAT", 2)
    packed = pickle.dumps(objects()[kind])
    with pytest.raises(
        ValueError, match="has format 2, this version of Canon reads format 1: make the masks"
    ):
        pickle.loads(packed)


def test_another_process_reads_pickles():
    window, zigzag, plan, plans = objects()
    packed = pickle.dumps((window, zigzag, plan, plans))
    mask, copy = pickle.loads(pickle.dumps((plan.mask, plan)))
    assert copy.mask is mask, "a pickle holds each mask once"
    program = (
        "import pickle, sys; m, l, c, p = pickle.load(sys.stdin.buffer); p.load(); "
        "print(m.digest, l.digest, c.casts)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=packed, capture_output=True)
    assert done.stdout.decode().split() == [window.digest, zigzag.digest, str(plan.casts)], (
        done.stderr.decode()
    )
    copies = pickle.loads(packed)
    assert copies[:3] == (window, zigzag, plan)
    assert {type(band) for band in copies[0].bands} == {Band}
    assert copies[3].plans == plans.plans
