"""The Hopper kernels give the same bits for any interleaving and for any number of CTAs."""

import pytest
from hopper import HOPPER_ONLY, assert_exact, attend, inputs, new_schedule
from sharded import ON_HOPPER, all_equal

from canon import Mask, simulator
from canon.fast.kernels.gluon import dq_order, launch

pytestmark = HOPPER_ONLY


def assert_equal_bits(arguments, mask, monkeypatch, *runs):
    """Fail unless "fused" is exact, and has the same bits in all runs (SMs, order, seed)."""
    first = attend(*arguments, mask, method="fused")
    assert_exact(first, *arguments, mask)
    for sms, order, seed in runs:
        monkeypatch.setattr(launch, "SIMULATED_SMS", sms)
        again = attend(*arguments, mask, method="fused", order=order, seed=seed)
        assert all_equal(first, again), (sms, order)


@pytest.mark.sweep
@pytest.mark.parametrize("d", [64, 80], ids=["all columns in turns", "halves"])
@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(450),
        Mask.window(450, 100, 7),
        Mask.documents([0, 140, 141, 450]),
        Mask.full(300).shift(0, 50),
    ],
    ids=repr,
)
def test_what_is_added_in_order_has_the_same_bits_however_many_add(
    mask, d, deterministic, monkeypatch
):
    arguments = inputs(mask, h=4 if ON_HOPPER else 2, g=2 if ON_HOPPER else 1, d=d, dv=64)
    assert_equal_bits(
        arguments,
        mask,
        monkeypatch,
        (1, "early", 1),
        (3, "random", 2),
        (7, "late", 3),
        (7, "random", 4),
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("some", [1, 2, 3])
def test_short_tiles_and_long_ones_by_turns_add_in_the_order_of_the_list(
    some, deterministic, monkeypatch
):
    """The list of so many programs of a head at a time, done by as many as there are, fewer or
    more.
    """
    mask = Mask.causal(900)  # of 8 tiles
    arguments = inputs(mask, h=4 if ON_HOPPER else 2, g=2, d=128, dv=64)
    monkeypatch.setattr(dq_order, "SMS", 2 * some)
    monkeypatch.setattr(dq_order, "DRIFTING", (0.0, 0.0))  # so both heads are in flight
    monkeypatch.setattr(launch, "tile_schedule", new_schedule)
    assert_equal_bits(
        arguments, mask, monkeypatch, (1, "early", 1), (3, "random", 2), (11, "late", 3)
    )


@pytest.mark.skipif(ON_HOPPER, reason="a GPU finds room for all programs when it likes")
def test_nobody_waits_for_a_program_that_has_not_begun(deterministic, monkeypatch):
    """Another kernel may hold processors: the programs that have begun must come to their ends
    without the others.
    """
    take_turns = simulator.take_turns

    def some_first(programs, *how):
        assert len(programs) in (1, 5)
        for some in (programs[3:], programs[:3]):
            take_turns(some, *how)

    mask = Mask.causal(600)
    arguments = inputs(mask, h=2, g=1, dv=64)
    first = attend(*arguments, mask, method="fused")
    monkeypatch.setattr(launch, "SIMULATED_SMS", 5)
    monkeypatch.setattr(simulator, "take_turns", some_first)
    again = attend(*arguments, mask, method="fused", order="random", seed=1)
    assert all_equal(first, again)
