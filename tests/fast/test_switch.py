"""`torch.use_deterministic_algorithms` decides whether "auto" repeats its bits, in each pass that
runs.

Launches for a Hopper GPU are noted and dropped, where a test names it. The CPU stands for the GPU.
"""

import functools
from contextlib import nullcontext

import hopper
import pytest
import torch
import torch.distributed as dist
from programs import printed
from torch.utils.checkpoint import checkpoint

from canon import Layout, Mask, fast
from canon.fast import backward, device, schedule
from canon.fast.kernels.gluon import launch as gluon_launch
from canon.testing import process_groups
from canon.testing.deterministic import deterministic

pytestmark = pytest.mark.usefixtures("empty_cache")
SMS = 4  # of the GPU: few wait in the fixed order, even in short sequences
# names, whether fused, whether ordered
ANY_ORDER, IN_ORDER = [("dkdv_kernel", True, False)], [("dkdv_kernel", True, True)]
TWO_KERNELS = [("dkdv_kernel", False, False), ("dq_kernel", None, None)]


def inputs(tokens, d=128, dtype=torch.bfloat16):
    *leaves, dout, _ = hopper.inputs(Mask.causal(tokens), 1, 4, 4, d, d, dtype)
    return [*(x.requires_grad_() for x in leaves), dout]


@pytest.fixture
def launched(monkeypatch):
    """Return a list that collects the backward kernels that a Hopper GPU would run."""
    found = []

    def note(kernel, ctas, device, arguments, **options):
        if (name := kernel.fn.__name__) in ("dq_kernel", "dkdv_kernel"):
            found.append((name, options.get("FUSED"), options.get("ORDERED")))

    monkeypatch.setattr(gluon_launch, "launch", note)
    hopper.plan_for_hopper(monkeypatch, SMS)
    with device.backend("gluon"):
        yield found


def kernels_of(launched, attend, q, k, v, dout, mask=None):
    """Return the kernels of one backward pass."""
    launched.clear()
    torch.autograd.grad(attend(q, k, v, mask), (q, k, v), dout)
    return list(launched)


@pytest.mark.interpreted
def test_a_long_call_adds_in_any_order_unless_bits_must_repeat(launched):
    kernels = functools.partial(kernels_of, launched, fast.attention)
    long, short = inputs(2048), inputs(256)
    narrow = *inputs(2048, d=64), Mask.full(2048)
    assert kernels(*long) == kernels(*narrow) == ANY_ORDER
    assert kernels(*short) == TWO_KERNELS
    for warn_only in (False, True):
        with deterministic(warn_only):
            assert kernels(*long) == kernels(*short) == TWO_KERNELS
            assert kernels(*narrow) == IN_ORDER
    assert kernels(*long) == ANY_ORDER, "the switch is off again: the call is the first one again"


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("options", "without", "with_switch"),
    [
        ({"rank_invariant": True}, TWO_KERNELS, TWO_KERNELS),
        ({"backward": "fused"}, ANY_ORDER, IN_ORDER),
    ],
)
def test_named_methods_and_rank_invariant_calls_ignore_lengths(
    options, without, with_switch, launched
):
    attend = functools.partial(fast.attention, **options)
    for given in (inputs(2048, d=64), inputs(256, d=64)):
        assert kernels_of(launched, attend, *given, Mask.full(given[0].shape[1])) == without
        with deterministic():
            assert kernels_of(launched, attend, *given) == with_switch


# --- what "auto" is told, and when


@pytest.fixture
def asked(monkeypatch):
    """Return a list that collects what "auto" depends on besides shapes, of each choice. All are
    "split", but "fused" in any order without the switch.
    """
    found = []

    def automatic(q, k, v, mask, how):
        found.append(how)
        return "split" if how.repeats else "fused"

    monkeypatch.setattr(backward, "automatic", automatic)
    return found


def small(tokens=12):
    return [x.detach().requires_grad_() for x in inputs(tokens, d=8, dtype=torch.float32)]


def differentiate(attend):
    q, k, v, dout = small()
    return torch.autograd.grad(attend(q, k, v), (q, k, v), dout.detach())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", ["ring", "strided", "magi"])
def test_only_steps_of_several_ranks_send_gradients(schedule, ranks, asked):
    given = {"mask": Mask.causal(12 * ranks), "layout": Layout.zigzag(12 * ranks, ranks)}
    attend = functools.partial(getattr(fast, f"{schedule}_attention"), **given)
    process_groups.threads(lambda: differentiate(attend), ranks)
    assert asked
    assert {how.sends for how in asked} == {ranks > 1}
    differentiate(fast.attention)
    assert not asked[-1].sends


def test_each_pass_of_several_ranks_reads_the_switch_when_it_runs(asked):
    def program():
        q, k, v, dout = small()
        out = fast.zigzag_attention(q, k, v, mask=Mask.causal(24))
        for state in (False, True, False):
            with deterministic() if state else nullcontext():
                dist.barrier()  # the ranks share the switch
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                dist.barrier()

    process_groups.threads(program, 2)
    number = len(asked) // 3
    assert [how.repeats for how in asked] == [False] * number + [True] * number + [False] * number


def test_a_recomputed_call_reads_it_in_its_backward_pass(asked):
    for reentrant in (False, True):
        with deterministic():
            q, k, v, dout = small()
            out = checkpoint(fast.attention, q, k, v, use_reentrant=reentrant)
        torch.autograd.backward(out, dout)
    assert [how.repeats for how in asked] == [False, False]


def test_a_switch_between_both_kernels_of_a_step_changes_nothing(asked, monkeypatch):
    """Another thread may use it. A method that changes between both kernels would leave dq out, or
    compute it twice.
    """
    dkdv = schedule.StepBackward.dkdv

    def switching(self, *given):
        dkdv(self, *given)
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())

    attend = functools.partial(fast.zigzag_attention, mask=Mask.causal(24))
    run = lambda: process_groups.threads(lambda: differentiate(attend), 2)
    expected = run()
    monkeypatch.setattr(schedule.StepBackward, "dkdv", switching)
    try:
        for before in (True, False):
            torch.use_deterministic_algorithms(before)
            for mine, theirs in zip(run(), expected, strict=True):
                for x, y in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(x, y)
    finally:
        torch.use_deterministic_algorithms(False)


# --- calls, ranks


def disagree():
    """Return the errors of forward and backward passes in which the ranks have different modes."""
    (q, k, v, dout), found = small(), []
    for modes in ((0, 2), (2, 1)):
        out = fast.ring_attention(q, k, v)
        torch.set_deterministic_debug_mode(modes[dist.get_rank()])
        for wrong in (lambda: fast.ring_attention(q, k, v), lambda: out.backward(dout)):
            with pytest.raises(ValueError) as raised:
                wrong()
            found.append(str(raised.value))
        torch.set_deterministic_debug_mode(0)
    return found


def test_ranks_with_different_switches_raise():
    field = "the ranks disagree:\n  torch.use_deterministic_algorithms:"
    off, warning = (
        f"{field} rank 0: {x}; rank 1: {y}"
        for x, y in (("False", "True"), ("True", "True, warn_only=True"))
    )
    errors = process_groups.processes(disagree, 2)
    assert errors == [[off, off, warning, warning]] * 2


# --- compiled functions


COMPILED = """
import torch
from canon import fast
from canon.fast import backward

found = []
backward.automatic = lambda q, k, v, mask, how: found.append(how.repeats) or "split"
q, k, v = (torch.randn(1, 12, 4, 8, requires_grad=True) for _ in range(3))
attend = torch.compile(lambda q, k, v: fast.attention(q, k, v).sum(), backend="aot_eager")
for state in (False, True, False, True):
    torch.use_deterministic_algorithms(state)
    attend(q, k, v).backward()
print(found)
"""


def test_a_compiled_function_reads_the_switch_when_it_runs():
    assert printed(COMPILED).strip() == "[False, True, False, True]"
