"""Pickles of masks, layouts and plans work between processes."""

import pickle
import subprocess
import sys

import torch

from canon import Layout, Mask, reference


def test_another_process_reads_pickles():
    window, zigzag = Mask.window(300, left=9, right=0), Layout.zigzag(300, 2)
    _ = window.digest
    ring = dict(rank=0, heads=(2, 1), widths=(8, 8), dtype=torch.float32, device="cpu")
    plans = reference.prepare("ring_attention", window, zigzag, **ring)
    plan = reference.cast_plan(window, zigzag)
    packed = pickle.dumps((window, zigzag, plan, plans))
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
    assert copies[3].plans == plans.plans
