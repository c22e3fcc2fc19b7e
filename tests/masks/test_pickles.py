"""Pickles of masks, layouts and plans work between processes."""

import pickle

import torch
from programs import printed

from canon import Layout, Mask, reference


def test_another_process_reads_pickles(tmp_path):
    window, zigzag = Mask.window(300, left=9, right=0), Layout.zigzag(300, 2)
    _ = window.digest
    ring = dict(rank=0, heads=(2, 1), widths=(8, 8), dtype=torch.float32, device="cpu")
    plans = reference.prepare("ring_attention", window, zigzag, **ring)
    plan, packed = reference.cast_plan(window, zigzag), tmp_path / "packed"
    packed.write_bytes(pickle.dumps((window, zigzag, plan, plans)))
    program = (
        "import pickle, sys; m, l, c, p = pickle.load(open(sys.argv[1], 'rb')); p.load(); "
        "print(m.digest, l.digest, c.casts)"
    )
    assert printed(program, packed).split() == [window.digest, zigzag.digest, str(plan.casts)]
    copies = pickle.loads(packed.read_bytes())
    assert copies[:3] == (window, zigzag, plan)
    assert copies[3].plans == plans.plans
