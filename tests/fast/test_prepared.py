"""A recorded pass replays with the same bits on other tensors, and whatever cannot be replayed runs
as written.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from interpreted_replay import recorded
from sharded import DEVICE
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


def inputs(seed, h=4, g=2, d=16, dv=8, b=2):
    draw = torch.Generator().manual_seed(seed)
    sizes = [(MASK.queries, h, d), (MASK.keys, g, d), (MASK.keys, g, dv), (MASK.queries, h, dv)]
    return [torch.randn(b, *size, generator=draw).to(DEVICE, DTYPE) for size in sizes]


def forward(q, k, v, out, lse):
    launch.forward(q, k, v, Cells(MASK), 0.25, out, lse)


def room(q, v):
    b, t, h, _ = q.shape
    return torch.full(
        (b, t, h, v.shape[-1]), torch.nan, dtype=q.dtype, device=q.device
    ), torch.empty(b, h, t, device=q.device)


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


def test_one_tensor_as_q_and_k_is_a_pass_of_its_own():
    q, k, v, _ = inputs(0, h=2, d=8)
    for first, second in ((q, k), (q, q), (q, k)):
        out, lse = room(q, v)
        prepared.replayed(forward, (first, second, v, out, lse))
        expected = room(q, v)
        forward(first, second, v, *expected)
        assert torch.equal(out, expected[0])
    assert len(recorded()) == 2


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


def test_a_warning_for_atomics_becomes_an_error_in_strict_mode():
    """A pass that was recorded with ``warn_only=True`` is not replayed without it."""
    *leaves, dout = inputs(0)
    for x in leaves:
        x.requires_grad_()

    def gradient():
        return torch.autograd.grad(local.attention(*leaves, MASK, backward="fused"), leaves, dout)

    with device.backend("triton"):
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="any order"):
                gradient()
            torch.use_deterministic_algorithms(True)
            with pytest.raises(RuntimeError, match="any order"):
                gradient()
        finally:
            torch.use_deterministic_algorithms(False)


def test_other_operations_are_named_and_the_pass_runs_as_written():
    def body(x, y):
        y.copy_(x * 2)

    for seed in (0, 1):
        x = inputs(seed)[0]
        y = torch.empty_like(x)
        prepared.replayed(body, (x, y))
        assert torch.equal(y, x * 2)
    (made,) = recorded()
    assert made.reason == "the pass calls aten::mul"


def test_a_tensor_of_unknown_origin_is_never_replayed():
    q, k, v, _ = inputs(0)

    def body(q, k, out, lse):
        forward(q, k, hidden[0], out, lse)

    for seed in (1, 2):
        hidden = [inputs(seed)[2]]
        out, lse = room(q, v)
        prepared.replayed(body, (q, k, out, lse))
        expected = room(q, v)
        forward(q, k, hidden[0], *expected)
        assert torch.equal(out, expected[0])
    assert {made.reason for made in recorded()} == {"the pass reads a tensor that it was not given"}


def test_a_temporary_that_is_zeroed_after_its_use_is_not_replayed():
    def body(q, k, v, out, lse):
        some = torch.empty_like(lse)
        forward(q, k, v, out, some)
        some.zero_()
        forward(q, k, v, out, lse)

    q, k, v, _ = inputs(0)
    prepared.replayed(body, (q, k, v, *room(q, v)))
    assert "late" in recorded()[0].reason


def test_a_pass_with_large_temporaries_frees_them_as_it_goes(monkeypatch):
    """A workspace would hold all of them at once."""
    monkeypatch.setattr(recorder, "MOST_BYTES", 1 << 12)
    alive = []

    def body(q, k, v, out, lse):
        for _ in range(3):
            some = torch.empty_like(q)
            alive.append(weakref.ref(some))
            forward(q, k, v, out, lse)
            del some

    q, k, v, _ = inputs(0)
    prepared.replayed(body, (q, k, v, *room(q, v)))
    assert [x() for x in alive] == [None] * 3
    assert recorded()[0].reason == "the pass allocates more than 0 MB"


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_pass_whose_kernels_were_not_seen_runs_as_written(zeroed):
    """A kernel of a library writes by address. The recorder sees nothing, or only that the result
    is set to 0.
    """

    def body(x, out):
        if zeroed:
            out.zero_()
        with _disable_current_modes():
            out.copy_(x)

    for value in (1.0, 2.0, 3.0):
        x = torch.full((4,), value, device=DEVICE)
        out = torch.full_like(x, torch.nan)
        prepared.replayed(body, (x, out))
        assert torch.equal(out, x)
    assert recorded()[0].reason == prepared.UNSEEN


def test_a_pass_of_a_backend_that_is_not_replayable_runs_as_written(monkeypatch):
    """It launches one kernel through the launcher, and writes lse past it."""

    def library_forward(q, k, v, cells, scale, out, lse):
        launch.forward(q, k, v, cells, scale, out, torch.empty_like(lse))
        with _disable_current_modes():
            lse.fill_(q.sum().item())

    library = SimpleNamespace(
        name="library", replayable=False, module=SimpleNamespace(forward=library_forward)
    )
    monkeypatch.setattr(device, "_backend_for", lambda *_: library)
    for seed in (0, 1):
        q, k, v, _ = inputs(seed)
        out, lse = room(q, v)
        local.forward_into(q, k, v, Cells(MASK), 0.25, out, lse)
        assert torch.equal(lse, torch.full_like(lse, q.sum().item()))
    assert {made.reason for made in recorded()} == {
        "launches of the library backend are not recorded"
    }


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
