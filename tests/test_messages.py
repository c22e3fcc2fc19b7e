"""Buffers of exchanges: one exchange in flight for each, and masked room behind small shards."""

import pytest
import torch

from canon import Layout, Mask
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


def test_the_room_behind_small_shards_is_masked():
    mask, layout = Mask.full(5), Layout([[range(0, 3)], [], [range(3, 5)]], 5)
    seen = messages.gathered_mask(layout, mask, 0)
    assert (seen.queries, seen.keys) == (3, 9)
    assert seen.dense().any(0).tolist() == [True] * 3 + [False] * 3 + [True, True, False]
    even = Layout.zigzag(12, 3)
    assert messages.gathered_mask(even, Mask.causal(12), 1) == even.local_mask(Mask.causal(12), 1, range(3))


def test_gradients_of_other_keys_are_zero():
    layout = Layout.contiguous(6, 1)
    q, k, v = (torch.zeros(2, 6, 2, 3) for _ in range(3))
    call = RING.call(q, k, v, None, layout)
    heads, blocks = (
        messages.HeadGroup(call, 2, range(2), (3, 5)),
        messages.Blocks(layout, 2, [(2, 3), (2, 5)]),
    )
    for buffer, zero, views in (
        (torch.ones(heads.elements), lambda x: heads.zero_outside(x, slice(1, 4)), heads.views),
        (torch.ones(blocks.most), lambda x: blocks.zero_outside(x, 0, slice(1, 4)), lambda x: blocks.views(x, 0)),
    ):
        for written, x in zip(zero(buffer), views(buffer), strict=True):
            assert written.data_ptr() == x[:, 1:].data_ptr()
            assert written.shape[1] == 3
            assert x[0, :, 0, 0].tolist() == x[1, :, 1, 2].tolist() == [0, 1, 1, 1, 0, 0]
        assert buffer.sum() == 2 * 3 * 2 * 8
