"""Ranks with different halves, versions of Canon or kernel backends raise, instead of sending
messages that do not fit.
"""

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast, reference
from canon.fast.kernels.triton import launch
from canon.ranks import agreement, digests
from canon.testing import process_groups

LAYOUT, MASK = Layout.zigzag(16, 2), Mask.causal(16)
X = torch.ones(1, 8, 2, 8)
PLAN = reference.cast_plan(MASK, LAYOUT)
CALLS = {
    "ring_attention": lambda half: half.ring_attention(X, X, X, MASK, LAYOUT),
    "decode_attention": lambda half: half.decode_attention(X, X, X),
    "group_cast": lambda half: half.group_cast(X[0], PLAN, 0),
    "group_reduce": lambda half: half.group_reduce(X[0, : _received()], PLAN, 0, X[0].clone()),
}


def _received():
    return sum(PLAN.receive_sizes(0, dist.get_rank()))


def errors_of(call):
    """Return the error of each of two ranks."""

    def program():
        with pytest.raises(ValueError) as raised:
            call()
        return str(raised.value)

    return process_groups.threads(program, 2)


@pytest.mark.parametrize("function", CALLS)
def test_ranks_of_different_halves_raise(function):
    call = CALLS[function]
    errors = errors_of(lambda: call(fast if dist.get_rank() else reference))
    assert errors == ["the ranks disagree:\n  half: rank 0: reference; rank 1: fast"] * 2


def test_ranks_of_different_versions_raise(half, monkeypatch):
    other = lambda fields: (("version of Canon", f"0.0.{dist.get_rank()}"), *fields)
    for module in (digests, agreement):
        monkeypatch.setattr(module, "versioned", other)
    errors = errors_of(lambda: half.ring_attention(X, X, X, scale=0.3))
    assert errors == ["the ranks disagree:\n  version of Canon: rank 0: 0.0.0; rank 1: 0.0.1"] * 2


@pytest.mark.interpreted
def test_kernel_backends_that_send_something_else_raise(monkeypatch):
    monkeypatch.setattr(
        launch, "takes_keys_of_ranks", lambda *_: dist.get_rank() == 0, raising=False
    )
    errors = errors_of(lambda: fast.decode_attention(X, X, X, rank_invariant=True))
    assert (
        errors == ["the ranks disagree:\n  way: rank 0: decode_in_order; rank 1: keys_travel"] * 2
    )
