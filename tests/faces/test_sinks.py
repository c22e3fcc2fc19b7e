"""A sink enlarges the softmax's denominator: extreme sinks, and their gradients. `test_prepared`
replays both passes under a sink.
"""

import pytest
import torch
from sharded import gradients, whole

from canon import Mask
from canon.testing.judge import oracle

N = 19
# queries 7, 8 see no key
MASK = Mask.ranges([(0, 7), (9, N)], [(0, 7), (3, N)], ["causal", "full"], queries=N, keys=N)


def inputs(dtype=torch.float64):
    """Return q, k, v, the sink and dout."""
    *tensors, dout, dlse = whole(MASK, b=2, dv=5, dtype=dtype)
    return [*tensors, dlse[0, :, 0], dout]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_infinite_sinks_and_fully_masked_rows_give_no_nan(half, dtype):
    q, k, v, _, dout = inputs(dtype=dtype)
    dout[:, 7:9] = q[:, 7:9] = torch.nan  # these queries see no key
    sink = torch.tensor([-torch.inf, torch.inf, 1e30, -1e30], dtype=dtype)
    out, *grads = gradients(
        lambda q, k, v, sink: half.attention(q, k, v, MASK, sink=sink), (q, k, v, sink), dout
    )
    plain, *plain_grads = gradients(lambda q, k, v: half.attention(q, k, v, MASK), (q, k, v), dout)
    assert torch.equal(out[:, :, [0, 3]], plain[:, :, [0, 3]])
    assert not out[:, :, 1:3].any()
    assert all(x.isfinite().all() for x in grads)
    assert torch.equal(grads[0][:, :, [0, 3]], plain_grads[0][:, :, [0, 3]])
    assert not grads[0][:, :, 1:3].any()
    assert not grads[3].any()


@pytest.mark.parametrize("sink", [-20.0, 20.0])
def test_the_gradient_of_a_sink_far_from_lse_keeps_its_relative_accuracy(half, sink):
    *leaves, _, dout = inputs(dtype=torch.float32)
    leaves.append(torch.full((4,), sink))
    attend = lambda q, k, v, sink: half.attention(q, k, v, sink=sink)
    dsink = gradients(attend, leaves, dout)[4]
    exact = oracle(
        *(x.double() for x in (*leaves[:3], dout)), Mask.causal(N), sink=leaves[3].double()
    ).dsink
    assert exact.abs().max() < 1e-6
    torch.testing.assert_close(dsink.double(), exact, rtol=1e-4, atol=0)
