"""A buffer of exchanges has one exchange in flight."""

import pytest
import torch

from canon import Layout
from canon.fast import messages
from canon.fast.ring import RING
from canon.testing import process_groups


def test_a_buffer_has_one_exchange_in_flight():
    def program():
        layout = Layout.contiguous(4, 2)
        q, k, v = (torch.zeros(1, 2, 2, 8) for _ in range(3))
        call = RING.call(q, k, v, None, layout)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        groups = [messages.HeadGroup(call, 1, range(head, head + 1), (8, 8)) for head in range(2)]
        reduction = messages.ReduceScatter(dk, dv, call, groups)
        reduction.finish(0)  # empty: nothing happens
        for step, group in enumerate(groups):
            for part in group.zero_outside(reduction.sent[step], slice(0, 4)):
                part.fill_(step + 1)
            reduction.start(step)
        with pytest.raises(RuntimeError, match="step 0 needs buffer 0, where an exchange is in flight"):
            reduction.start(0)
        for slot in (0, 1, 0):
            reduction.finish(slot)
        return dk, dv

    for grads in process_groups.threads(program, 2):
        for grad in grads:
            assert torch.equal(grad[:, :, 0], torch.full((1, 2, 8), 2.0))
            assert torch.equal(grad[:, :, 1], torch.full((1, 2, 8), 4.0))
