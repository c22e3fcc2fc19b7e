"""A recorded pass replays with the same bits on other tensors, and whatever cannot be replayed runs
as written.
"""

import weakref
from types import SimpleNamespace

import hopper
import pytest
import torch
from interpreted_replay import recorded
from sharded import DEVICE, all_equal, gradients
from torch.utils._python_dispatch import _disable_current_modes

from canon import Mask
from canon.fast import backward, device, local
from canon.fast.kernels.triton import launch
from canon.fast.replay import recorder
from canon.fast.replay import recordings as prepared
from canon.fast.tables.cells import Cells
from canon.masks.plan_cache import PLANS

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.usefixtures("replays")]
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
MASK = Mask.documents([0, 7, 40, 96], window=(30, 0))


@pytest.fixture(autouse=True)
def _called_before(monkeypatch):
    """Record each pass in its first call here, as in the second call of a step."""
    monkeypatch.setattr(prepared, "_is_first_call", lambda key: False)


def inputs(seed, d=16):
    """Return q, k, v and dout."""
    return hopper.inputs(MASK, 2, 4, 2, d, 8, DTYPE, seed)[:4]


def forward(q, k, v, out, lse):
    launch.forward(q, k, v, Cells(MASK), 0.25, out, lse)


def room(q, v):
    return [x.fill_(torch.nan) for x in local.empty_result(q, v, q.dtype)]


@pytest.mark.parametrize("method", ["split", "head_parallel", "fused"])
def test_a_replayed_backward_has_its_own_workspace_zeroed(method):
    """Row statistics, parts by query head and float32 sums are temporaries of the pass; the last
    two start as zeros.
    """

    def body(dout, q, k, v, out, lse, dq, dk, dv):
        delta = backward.make_delta(dout, out, lse, None)
        queries = backward.QueryInputs(dout, q, lse, delta)
        backward.backward_into(queries, k, v, Cells(MASK), 0.25, method, dq, dk, dv)

    for seed in (0, 1):
        q, k, v, dout = inputs(seed)
        out, lse = local.attention_forward(q, k, v, MASK, scale=0.25)
        got, expected = ([torch.full_like(x, torch.nan) for x in (q, k, v)] for _ in range(2))
        prepared.replayed(body, (dout, q, k, v, out, lse, *got))
        body(dout, q, k, v, out, lse, *expected)
        exact = method != "fused" or DEVICE == "cpu"
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=0.05, atol=0.02)
    assert not [made.reason for made in recorded() if made.reason]


def test_both_passes_under_a_sink_are_replayed(replays, monkeypatch):
    """Each launches a kernel over the keys and one for the sink."""

    def results(seed):
        *leaves, dout = inputs(seed)
        leaves.append(torch.linspace(-1, 1, 4, device=DEVICE))
        return gradients(lambda *x: local.attention(*x[:3], MASK, sink=x[3]), leaves, dout)

    found = [results(seed) for seed in (0, 1)]
    assert replays() == [""] * 4
    monkeypatch.setattr(prepared, "REPLAYED", {})
    assert all(all_equal(found[seed], results(seed)) for seed in (0, 1))


def test_a_gradient_that_is_the_query_itself_is_a_pass_of_its_own():
    """Local calls give the kind of their tensors; whether two of them are one tensor is still part
    of the key.
    """
    q, k, v, dout = inputs(0, d=8)

    def gradient(given):
        leaf = q.clone().requires_grad_()
        out = local.attention(leaf, k, v, MASK, scale=0.25)
        return torch.autograd.grad(out, leaf, leaf if given is None else given)[0]

    expected = gradient(dout.clone())
    PLANS.clear()
    gradient(None)
    assert torch.equal(gradient(dout), expected)


def test_atomics_warn_or_raise_where_the_switch_says_so():
    """A pass that was recorded without the switch, or with ``warn_only=True``, is not replayed in
    another state.
    """
    *leaves, dout = inputs(0)
    for x in leaves:
        x.requires_grad_()

    with device.backend("triton"):
        out = local.attention(*leaves, MASK, backward="fused")
        gradient = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        gradient()
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="any order"):
                gradient()
            torch.use_deterministic_algorithms(True)
            with pytest.raises(RuntimeError, match="any order"):
                gradient()
        finally:
            torch.use_deterministic_algorithms(False)


def calls_an_operation(q, k, v, out, lse):
    forward(q, k, v, out, lse)
    out.mul_(2)


HIDDEN = []


def reads_another_tensor(q, k, v, out, lse):
    forward(q, k, HIDDEN[-1], out, lse)


def zeroes_a_used_temporary(q, k, v, out, lse):
    some = torch.empty_like(lse)
    forward(q, k, v, out, some)
    some.zero_()
    forward(q, k, v, out, lse)


def launches_unseen(q, k, v, out, lse):
    """Write by address, as a kernel of a library does, after a zero that is seen."""
    out.zero_()
    with _disable_current_modes():
        out.fill_(q.sum().item())
        lse.fill_(1)


def allocates_much(q, k, v, out, lse):
    """Free each temporary before the next one: a workspace would hold all of them at once."""
    for _ in range(3):
        some = torch.empty_like(q)
        held = weakref.ref(some.untyped_storage())
        forward(q, k, v, out, lse)
        del some
        assert held() is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (allocates_much, "the pass allocates more than 0 MB"),
        (calls_an_operation, "the pass calls aten::mul_"),
        (reads_another_tensor, "the pass reads a tensor that it was not given"),
        (zeroes_a_used_temporary, "the pass sets a temporary to zero late, or a part of it"),
        (launches_unseen, prepared.UNSEEN),
    ],
)
def test_a_pass_that_cannot_be_replayed_says_why_and_runs_as_written(body, reason, monkeypatch):
    monkeypatch.setattr(recorder, "MOST_BYTES", 1 << 12)
    for seed in (0, 1, 2):
        q, k, v, _ = inputs(seed)
        HIDDEN.append(v.clone())
        results, expected = room(q, v), room(q, v)
        prepared.replayed(body, (q, k, v, *results))
        body(q, k, v, *expected)
        assert all(map(torch.equal, results, expected))
    assert {made.reason for made in recorded()} == {reason}


def test_a_pass_beyond_the_limits_of_the_native_replay_runs_as_written(monkeypatch):
    def make(operations):
        raise ValueError("a kernel has more bytes of parameters than replay.c holds")

    monkeypatch.setattr(prepared, "REPLAYED", {DEVICE: prepared.PreparedPass})
    monkeypatch.setattr(prepared, "native_module", lambda: SimpleNamespace(make=make, run=None))
    monkeypatch.setattr(prepared, "packed", lambda operation, place: operation)
    q, k, v, _ = inputs(0)
    expected = room(q, v)
    forward(q, k, v, *expected)
    for _ in range(2):
        out, lse = room(q, v)
        prepared.replayed(forward, (q, k, v, out, lse))
        assert torch.equal(out, expected[0])
    assert "more bytes of parameters" in recorded()[0].reason
