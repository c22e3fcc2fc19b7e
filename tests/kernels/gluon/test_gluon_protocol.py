"""Every synchronisation of the Hopper kernels is needed, and the simulator detects its absence, in
any interleaving.

The simulator runs each mutant (gluon_mutants.py) on a small input for which all rings wrap around
and several work tiles follow one another. A mutant is *killed* if an early and a late interleaving
end in a fault or in other bits than those of the kernel. In a sample, one of the two must, in turn.
`SURVIVORS` lists the mutants that survive, with reasons. The test expects exactly these."""

import math
import sys
from functools import cache, lru_cache

import hopper
import pytest
import sampling
import torch
from gluon_mutants import BETWEEN_CTAS, KERNELS, SURVIVORS, mutants, mutated
from hopper import new_schedule
from sampling import covering

from canon import Mask, simulator
from canon.fast.kernels.gluon import (
    config,
    dq_order,
    few_queries_launch,
    few_queries_plan,
    launch,
    tile_scheduler,
)
from canon.fast.kernels.triton.blocks import LOG2E
from canon.fast.tables.cells import Cells, in_place
from canon.fast.tables.device_plans import uploaded
from canon.testing import simulated_kernels
from canon.testing.judge import Attended, agreement, dense, oracle

MODULES = [
    module for name, module in sys.modules.items() if name.startswith("canon.fast.kernels.gluon.")
]
INTERLEAVINGS = [("late", 0), ("early", 1)]  # not "random", which adds to dq in any order
TOKENS, SCALE = 575 if sampling.ALL else 447, 0.125
# the last work tile is so short that all its tiles are loaded at once
MASK = Mask.documents([0, 140, TOKENS])


@pytest.fixture(autouse=True)
def _one_cta(monkeypatch):
    """Run one CTA, and the longest tiles first in every kernel: a short last work tile reveals a
    missing last wait.
    """
    monkeypatch.setattr(launch, "SIMULATED_SMS", 1)
    monkeypatch.setattr(tile_scheduler, "LATE_CTAS", 0)
    monkeypatch.setattr(dq_order, "UNEVEN", math.inf)
    monkeypatch.setattr(launch, "tile_schedule", lru_cache(new_schedule))


@cache
def inputs(d):
    """Return q, k, v, dout with two key heads for four query heads; dv is 64. Keys grow, so row
    maxima change.
    """
    q, k, v, dout, _ = hopper.inputs(MASK, 1, 4, 2, d, 64, torch.float32)
    k *= torch.linspace(0.5, 3, TOKENS)[:, None, None]
    return tuple(x.bfloat16() for x in (q, k, v, dout))


@cache
def answers(d):
    """Return the judge's two results, and the row statistics of a backward pass."""
    q, k, v, dout = inputs(d)
    exact, honest = (attended(q, k, v, dout, MASK, SCALE) for attended in (oracle, dense))
    delta = (dout.float() * honest.out.float()).sum(-1).transpose(1, 2)
    stats = torch.stack([launch.portable.LOG2E * honest.lse, -delta], 2)
    return exact, honest, torch.nn.functional.pad(stats, (0, -TOKENS % 4))


def run(name, order, seed):
    """Return the results of a kernel in tensors that were filled with NaN."""
    kernel, (q, k, v, dout) = KERNELS[name], inputs(KERNELS[name].d)
    stats = answers(kernel.d)[2]
    method = name.split()[0].rstrip(",")
    ordered = method == "ordered"
    method = "fused" if ordered else method
    out, dq, dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in (dout, q, k, v))
    lse = torch.full((1, 4, TOKENS), torch.nan)
    if method == "few":
        with simulated_kernels.simulated(order, seed):
            return few(name, q, k, v, out, lse)
    with config.forced(**{method: kernel.config}), simulated_kernels.simulated(order, seed):
        if method == "forward":
            launch.forward(q, k, v, Cells(MASK), SCALE, out, lse)
            return Attended(out, lse)
        if method == "dq":
            launch.dq(q, k, v, dout, stats, Cells(MASK), SCALE, dq)
            return Attended(dq=dq)
        sums = [dq.zero_()] if method == "fused" else []
        launch.dkdv(q, k, v, dout, stats, Cells(MASK), SCALE, dk, dv, *sums, ordered=ordered)
        return Attended(None, None, *sums or [None], dk, dv)


def few(name, q, k, v, out, lse):
    """Return the results of the kernels for few queries, whose rings have two stages."""
    columns = KERNELS[name].config.columns
    with pytest.MonkeyPatch.context() as patch:
        # tiles of 32 rows: others would be written to the next visit
        patch.setattr(few_queries_plan, "ROWS", 32)
        plan = few_queries_launch.few_queries_plan.__wrapped__(
            Cells(MASK, in_place(MASK)), 2, columns, 100
        )
        plan = uploaded(plan, q.device)
        patch.setattr(few_queries_launch, "WEIGHTS_STAGES", {64: 2})
        patch.setattr(few_queries_launch, "SLICES", {64: 2})
        few_queries_launch.forward_of_few(
            q, k, v, (64, 64), plan, SCALE * LOG2E.value, None, 1, out, lse
        )
    return Attended(out, lse)


def killed_by(name, order, seed, right):
    """Return whether an interleaving ends with a fault or with other bits."""
    try:
        got = run(name, order, seed)
    except simulator.Fault:
        return True
    return not all(x is y or torch.equal(x, y) for x, y in zip(got, right, strict=True))


@cache
def sample():
    """Return kernels and their mutants. Many kernels have functions in common: in a sample, each
    change of a function comes once.
    """
    every = {
        (name, mutant): function.fn.__module__
        for name, kernel in KERNELS.items()
        for mutant, (function, _) in mutants(kernel).items()
    }
    return covering(every, lambda one: {(one[1], every[one])})


def test_the_reasons_are_those_of_mutants():
    for name, kernel in KERNELS.items():
        assert set(SURVIVORS[name]) <= set(mutants(kernel))


@pytest.mark.parametrize("name", KERNELS)
def test_every_synchronisation_is_needed_and_its_absence_is_detected(name, monkeypatch):
    kernel = KERNELS[name]
    right = run(name, "late", 7)
    exact, honest, _ = answers(kernel.d)
    verdict = agreement(right, exact, honest)
    assert verdict.agrees, str(verdict)
    assert not any(killed_by(name, *interleaving, right) for interleaving in INTERLEAVINGS)
    survivors, every = set(), mutants(kernel)
    wanted = {x for of, x in sample() if of == name}
    for place, mutant in enumerate(sorted(wanted)):
        function, number = every[mutant]
        changed = mutated(function, kernel.branches, number)
        with monkeypatch.context() as patch:
            if any(call in mutant for call in BETWEEN_CTAS):
                # with three CTAs, the predecessor always finishes in time
                patch.setattr(launch, "SIMULATED_SMS", 5)
            for module in MODULES:
                for here, value in list(vars(module).items()):
                    if value is function:
                        patch.setattr(module, here, changed)
            # its absence shows if additions are late and in another order
            if "wait_for_reductions(" in mutant:
                killed = [any(killed_by(name, "late", seed, right) for seed in range(8))]
            else:
                both = sampling.ALL or mutant in SURVIVORS[name]
                some = INTERLEAVINGS if both else [INTERLEAVINGS[place % 2]]
                killed = [killed_by(name, *interleaving, right) for interleaving in some]
            if not all(killed):
                survivors.add(mutant)
    assert survivors == wanted & set(SURVIVORS[name])
