"""A sink enlarges the softmax's denominator, in both halves, forward and backward, on one rank and
on several.
"""

import pytest
import torch
import torch.distributed as dist
from sharded import all_equal

from canon import Layout, Mask, fast
from canon.fast import sinks as fast_sinks
from canon.fast.replay import recordings as prepared
from canon.testing import process_groups
from canon.testing.judge import oracle

N = 19
# queries 7, 8 see no key
MASK = Mask.ranges([(0, 7), (9, N)], [(0, 7), (3, N)], ["causal", "full"], queries=N, keys=N)


def inputs(b=2, tokens=N, h=4, g=2, d=8, dv=5, dtype=torch.float64):
    """Return q, k, v, the sink and dout."""
    draw = torch.Generator().manual_seed(0)
    shapes = (b, tokens, h, d), (b, tokens, g, d), (b, tokens, g, dv), (h,), (b, tokens, h, dv)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def gradients(attend, leaves, dout):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


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


def test_autocast_leaves_a_float32_sink_alone(half):
    *leaves, sink, dout = inputs(dtype=torch.float32)
    attend = lambda *x: half.attention(*x[:3], MASK, sink=x[3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *grads = gradients(attend, (*leaves, sink), dout.bfloat16())
    cast = *(x.bfloat16() for x in leaves), sink
    expected, *others = gradients(attend, cast, dout.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    for mine, theirs in zip(grads, others, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.float())


@pytest.mark.parametrize("needed", [("sink",), ("q",), ("q", "k", "v")])
def test_only_the_needed_gradients_are_computed(half, needed, monkeypatch):
    *tensors, dout = inputs()
    _, *whole = gradients(lambda *x: half.attention(*x[:3], sink=x[3]), tensors, dout)
    leaves = dict(zip(("q", "k", "v", "sink"), tensors, strict=True))
    for name in needed:
        leaves[name].requires_grad_()
    given, differentiate = [], fast_sinks._differentiate
    noting = lambda *x: (given.append(x[4]), differentiate(*x))
    monkeypatch.setattr(fast_sinks, "_differentiate", noting)
    half.attention(**leaves).backward(dout)
    for (name, x), grad in zip(leaves.items(), whole, strict=True):
        assert x.grad is None if name not in needed else torch.equal(x.grad, grad), name
    if half is fast:
        assert [x is None for x in given] == [needed == ("sink",)]


def test_a_rank_without_tokens_has_a_zero_gradient_of_the_sink(half):
    def program():
        *leaves, sink, dout = inputs(tokens=2)
        layout, rank = Layout.contiguous(2, 3), dist.get_rank()
        attend = lambda *x: half.ring_attention(*x[:3], None, layout, sink=x[3])
        got = gradients(
            attend, (*(layout.shard(x, rank) for x in leaves), sink), layout.shard(dout, rank)
        )
        return layout.size(rank), bool(got[4].any())

    assert sorted(process_groups.threads(program, 3)) == [(0, False), (1, True), (1, True)]


def test_both_passes_are_replayed_with_equal_bits(replays, monkeypatch):
    attend = lambda *x: fast.attention(*x[:3], MASK, sink=x[3])
    given = [[x + shift for x in inputs(dtype=torch.float32)] for shift in (0, 0, 1)]
    runs = [gradients(attend, leaves, dout) for *leaves, dout in given]
    assert all_equal(*runs[:2])
    assert not any(replays())
    monkeypatch.setattr(prepared, "REPLAYED", {})
    assert all_equal(runs[2], gradients(attend, given[2][:-1], given[2][-1]))
