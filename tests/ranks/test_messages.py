"""One buffer receives the gradients of all steps, one step after another."""

import torch

from canon import Layout
from canon.fast.ring import RING
from canon.fast.transport import messages
from canon.route.call import checked_call
from canon.testing import process_groups


def test_one_buffer_receives_the_parts_of_all_steps():
    def program():
        layout = Layout.contiguous(4, 2)
        q, k, v = (torch.zeros(1, 2, 2, 8) for _ in range(3))
        call = checked_call(RING, q, k, v, layout=layout)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        groups = [messages.HeadGroup(call, 1, range(head, head + 1), (8, 8)) for head in range(2)]
        reduction = messages.ReduceScatter(dk, dv, call, groups)
        for step, group in enumerate(groups):
            for part in group.zero_outside(reduction.sent[step], slice(0, 4)):
                part.fill_(step + 1)
            reduction.start(step).wait()
        return dk, dv

    for grads in process_groups.threads(program, 2):
        for grad in grads:
            assert torch.equal(grad[:, :, 0], torch.full((1, 2, 8), 2.0))
            assert torch.equal(grad[:, :, 1], torch.full((1, 2, 8), 4.0))
