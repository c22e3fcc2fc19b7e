"""Every synchronisation of the Hopper kernels is needed, and the simulator detects its absence, in any interleaving.

A *mutant* is a kernel with one change. It lacks a wait, an arrival, a fence, a ping-pong barrier, a published work tile or a
ticket. Or it waits for the other parity, or for one MMA fewer. Or it stores rows of other work tiles. The simulator runs it on
a small input for which all rings wrap around and several work tiles follow one another. A mutant is *killed* if every
interleaving ends in a fault or in other bits than those of the kernel. `SURVIVORS` lists the mutants that survive, with
reasons. The test expects exactly these.
"""

import ast
import copy
import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from canon import Mask
from canon.fast.kernels.gluon import (
    config,
    dkdv,
    dkdv_hdim256,
    dq,
    dq_adder,
    dq_order,
    epilogue,
    forward,
    forward_pipeline,
    launch,
    masking,
    ptx,
    softmax,
    stale_maximum,
    tile_queue,
    tile_ring,
    tile_scheduler,
)
from canon.fast.kernels.gluon.config import Config
from canon.testing import simulator
from canon.testing.judge import Attended, agreement, dense, oracle

MODULES = (
    ptx,
    tile_queue,
    tile_ring,
    masking,
    epilogue,
    forward_pipeline,
    softmax,
    stale_maximum,
    forward,
    dq,
    dq_adder,
    dkdv,
    dkdv_hdim256,
    launch,
)
INTERLEAVINGS = [("late", 0), ("early", 1), ("late", 2)]  # not "random", which adds to dq in any order
TOKENS, SCALE = 575, 0.125
MASK = Mask.documents([0, 140, TOKENS])  # the last work tile is so short that all its tiles are loaded at once


Branches = tuple[tuple[str, bool], ...]


class Kernel(NamedTuple):
    """A kernel to mutate, its configuration, head width d, and the values of its compile-time conditions."""

    function: GluonJITFunction
    config: Config
    d: int = 64
    branches: Branches = ()


EARLY = ("EARLY", True), ("not EARLY", False)
LATE = ("EARLY", False), ("not EARLY", True)
WHOLE = ("FUSED", True), ("D_PAD > 64", False)
HALVES = ("FUSED", True), ("D_PAD > 64", True)
PING_PONG = {on: (("PING_PONG", on), ("wg.PING_PONG", on)) for on in (False, True)}
PROMPT = ("LATE", False), ("not LATE", True)  # with two warpgroups
KERNELS = {
    "forward": Kernel(
        forward.forward_kernel,
        Config(128, 64, 4, 2),
        branches=(*PING_PONG[False], ("wg.STALE_MAXIMUM", False), *PROMPT),
    ),
    "forward in turns": Kernel(
        forward.forward_kernel,
        Config(128, 64, 2, turns=True),
        branches=(*PING_PONG[True], ("wg.STALE_MAXIMUM", False), *PROMPT),
    ),
    "forward by three": Kernel(
        forward.forward_kernel,
        Config(192, 64, 3, turns=True),
        branches=(*PING_PONG[True], ("wg.STALE_MAXIMUM", False), ("LATE", True), ("not LATE", False)),
    ),
    "forward, optimistic": Kernel(
        forward.forward_kernel,
        Config(128, 64, 2, turns=True, optimistic=True),
        branches=(*PING_PONG[True], ("wg.STALE_MAXIMUM", True), *PROMPT),
    ),
    "dq": Kernel(dq.dq_kernel, Config(128, 64, 2)),
    "dkdv": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 64, 4, 2),
        branches=(("FUSED", False), ("ORDERED", False), *EARLY),
    ),
    "fused": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 128, 2),
        branches=(*WHOLE, ("ORDERED", False), *LATE),
    ),
    "fused by halves": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 64, 2),
        d=80,
        branches=(*HALVES, ("ORDERED", False), *EARLY),
    ),
    "ordered": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 64, 3),
        branches=(*WHOLE, ("ORDERED", True), *EARLY),
    ),
    "ordered by halves": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 64, 2),
        d=80,
        branches=(*HALVES, ("ORDERED", True), *EARLY),
    ),
    "dkdv_hdim256": Kernel(dkdv_hdim256.dkdv_hdim256_kernel, Config(64, 64, 2), d=144),
}

FENCE = "makes mbarrier.init visible to the async proxy; in the simulator, new barriers are visible at once"
HELD_BACK = "the previous wait of the loader implies it: the buffer of that wait is released later in the same step"
FOR_THE_ASSEMBLER = "complete already: it keeps the assembler from waiting for dP before the exponentials"
SURVIVORS = {
    "forward": {
        "forward_kernel: fence_async_shared() is left out": FENCE,
    },
    "dq": {
        "dq_kernel: fence_async_shared() is left out": FENCE,
        "load_tiles: mbarrier.wait(v.free.index(slot), parity ^ 1) is left out": HELD_BACK,
        "differentiate: mbarrier.wait(buffers.v.full.index(slot), parity) is left out": FOR_THE_ASSEMBLER,
    },
    "dkdv": {
        "dkdv_kernel: fence_async_shared() is left out": FENCE,
        "load_tiles: mbarrier.wait(dout.free.index(slot), parity ^ 1) is left out": HELD_BACK,
    },
    "dkdv_hdim256": {
        "dkdv_hdim256_kernel: fence_async_shared() is left out": FENCE,
        "load_tiles: mbarrier.wait(dout.free.index(slot), parity ^ 1) is left out": HELD_BACK,
    },
}
for forwards in ("forward in turns", "forward by three", "forward, optimistic"):
    SURVIVORS[forwards] = SURVIVORS["forward"]
for fused in ("fused", "fused by halves", "ordered", "ordered by halves"):
    SURVIVORS[fused] = SURVIVORS["dkdv"]


# ------------------------------------------------------------------ mutants
def left_out(call: ast.Call) -> ast.expr:
    return ast.Constant(None)


def other_parity(call: ast.Call) -> ast.expr:
    call.args[1] = ast.BinOp(call.args[1], ast.BitXor(), ast.Constant(1))
    return call


def one_more_in_flight(call: ast.Call) -> ast.expr:
    call.args[0] = ast.Constant(ast.literal_eval(call.args[0]) + 1)
    return call


def all_rows(call: ast.Call) -> ast.expr:
    call.args[3] = ast.Constant(1 << 20)
    return call


CHANGES = {
    "mbarrier.wait": {"is left out": left_out, "waits for the other parity": other_parity},
    "mbarrier.arrive": {"is left out": left_out},
    "mbarrier.expect": {"is left out": left_out},
    "fence_async_shared": {"is left out": left_out},
    "ping_pong_wait": {"is left out": left_out},
    "ping_pong_arrive": {"is left out": left_out},
    "tma.store_wait": {"is left out": left_out},
    "hopper.warpgroup_mma_wait": {"waits for one MMA fewer": one_more_in_flight},
    "publish": {"is left out": left_out},
    "wait_for_ticket": {"is left out": left_out},
    "wait_for_reductions": {"is left out": left_out},
    "fence_async_global": {"is left out": left_out},
    "publish_ticket": {"is left out": left_out},
    "store_tile": {"stores rows behind the work tile's": all_rows},
}


BETWEEN_CTAS = "wait_for_ticket(", "wait_for_reductions("  # matter only if several CTAs add to one tile of dq


class Mutation(ast.NodeTransformer):
    """Makes change ``number`` of a function. Collects all possible changes and names, except in branches that are not taken."""

    def __init__(self, branches: Branches, number: int):
        self.branches, self.number = dict(branches), number
        self.changes: list[str] = []
        self.names: list[str] = []

    def visit_If(self, node: ast.If) -> ast.If:
        test = node.test
        conditions = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        known = [self.branches.get(ast.unparse(condition)) for condition in conditions]
        taken = [] if False in known else node.body
        for statement in taken if all(known) else [*taken, *node.orelse]:
            self.visit(statement)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        self.names.append(node.id)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        before = ast.unparse(node)
        for what, change in CHANGES.get(ast.unparse(node.func), {}).items():
            self.changes.append(f"{before} {what}")
            if len(self.changes) - 1 == self.number:
                return change(node)
        return node


def mutated(function: GluonJITFunction, branches: Branches, number: int = -1) -> tuple[str, Mutation]:
    """Return the source of a function with change ``number``, if it has that many, and the mutation."""
    mutation = Mutation(branches, number)
    tree = mutation.visit(ast.parse(textwrap.dedent("".join(function.raw_src))))
    return ast.unparse(tree), mutation


def reached(function: GluonJITFunction, branches: Branches) -> dict[str, GluonJITFunction]:
    """Return a kernel and the kernel functions that it calls."""
    found = {function.fn.__name__: function}
    for name in mutated(function, branches)[1].names:
        used = function.fn.__globals__.get(name)
        if isinstance(used, GluonJITFunction) and name not in found:
            found |= reached(used, branches)
    return found


def mutants(kernel: Kernel) -> Iterator[tuple[str, GluonJITFunction, GluonJITFunction]]:
    """Yield a description of each mutant of a kernel, the original function, and the changed one."""
    for name, function in reached(kernel.function, kernel.branches).items():
        times = Counter()
        for number, change in enumerate(mutated(function, kernel.branches)[1].changes):
            times[change] += 1
            changed = copy.copy(function)
            changed.raw_src = [mutated(function, kernel.branches, number)[0]]
            yield f"{name}: {change}" + (f" ({times[change]})" if times[change] > 1 else ""), function, changed


# ------------------------------------------------------------------ runs
@pytest.fixture(autouse=True)
def _one_cta(monkeypatch):
    """Run one CTA, and the longest tiles first even if dq is ordered: a short last work tile reveals a missing last wait."""
    monkeypatch.setattr(launch, "SIMULATED_SMS", 1)
    monkeypatch.setattr(dq_order, "UNEVEN", math.inf)
    monkeypatch.setattr(launch, "tile_schedule", lru_cache(tile_scheduler.tile_schedule.__wrapped__))


@cache
def inputs(d: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, dout with two key heads for four query heads; dv is 64. Keys grow, so row maxima change."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(4, d), (2, d), (2, 64), (4, 64)]
    q, k, v, dout = (torch.randn(1, TOKENS, *shape, generator=draw) for shape in shapes)
    k *= torch.linspace(0.5, 3, TOKENS)[:, None, None]
    return tuple(x.bfloat16() for x in (q, k, v, dout))


@cache
def answers(d: int) -> tuple[Attended, Attended, torch.Tensor]:
    """Return the judge's two results, and the row statistics of a backward pass."""
    q, k, v, dout = inputs(d)
    exact, honest = (attended(q, k, v, dout, MASK, SCALE) for attended in (oracle, dense))
    delta = (dout.float() * honest.out.float()).sum(-1).transpose(1, 2)
    stats = torch.stack([launch.LOG2E * honest.lse, -delta], 2)
    return exact, honest, torch.nn.functional.pad(stats, (0, -TOKENS % 4))


def run(name: str, order: str, seed: int) -> Attended:
    """Return the results of a kernel in tensors that were filled with NaN."""
    kernel, (q, k, v, dout) = KERNELS[name], inputs(KERNELS[name].d)
    stats = answers(kernel.d)[2]
    method = name.split()[0].rstrip(",")
    ordered = method == "ordered"
    method = "fused" if ordered else method
    out, dq, dk, dv = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in (dout, q, k, v))
    lse = torch.full((1, 4, TOKENS), torch.nan)
    with config.forced(**{method: kernel.config}), simulator.simulated(order, seed):
        if method == "forward":
            launch.forward(q, k, v, MASK, SCALE, out, lse)
            return Attended(out, lse)
        if method == "dq":
            launch.dq(q, k, v, dout, stats, MASK, SCALE, dq)
            return Attended(dq=dq)
        sums = [dq.zero_()] if method == "fused" else []
        launch.dkdv(q, k, v, dout, stats, MASK, SCALE, dk, dv, *sums, ordered=ordered)
        return Attended(None, None, *sums or [None], dk, dv)


def is_killed(name: str, order: str, seed: int, right: Attended) -> bool:
    try:
        got = run(name, order, seed)
    except simulator.Fault:
        return True
    return not all(x is y or torch.equal(x, y) for x, y in zip(got, right, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_every_synchronisation_is_needed_and_its_absence_is_detected(name, monkeypatch):
    kernel = KERNELS[name]
    right = run(name, "late", 7)
    exact, honest, _ = answers(kernel.d)
    verdict = agreement(right, exact, honest)
    assert verdict.agrees, str(verdict)
    assert not any(is_killed(name, *interleaving, right) for interleaving in INTERLEAVINGS)
    number, survivors = 0, set()
    for mutant, function, changed in mutants(kernel):
        with monkeypatch.context() as patch:
            if any(call in mutant for call in BETWEEN_CTAS):
                patch.setattr(launch, "SIMULATED_SMS", 5)  # with three CTAs, the predecessor always finishes in time
            for module in MODULES:
                for here, value in list(vars(module).items()):
                    if value is function:
                        patch.setattr(module, here, changed)
            killed = (is_killed(name, *interleaving, right) for interleaving in INTERLEAVINGS)
            if "wait_for_reductions(" in mutant:  # its absence shows if additions are late and in another order
                killed = [any(is_killed(name, "late", seed, right) for seed in range(8))]
            if not all(killed):
                survivors.add(mutant)
        number += 1
    print(f"{name}: {number} mutants, {len(survivors)} survive")
    assert survivors == set(SURVIVORS[name])


@pytest.mark.parametrize("name", KERNELS)
def test_the_input_is_sufficient(name, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "run", lambda kernel, work_tiles, q, config, arguments, **_: seen.append(arguments))
    run(name, "late", 0)
    work, counter = (x.tolist() for x in seen[0] if isinstance(x, torch.Tensor) and x.dtype == torch.int32)
    kernel = KERNELS[name]
    semaphores = 4 * -(-TOKENS // kernel.config.columns) if "ordered" in name else 0  # of four heads
    assert counter == [0] * (1 + semaphores)
    work_tiles = [work[at : at + 8] for at in range(8, work[0], 8)]
    spans = [work[at : at + 8] for work_tile in work_tiles for at in range(*work_tile[4:6], 8)]
    assert len(work_tiles) > 3 * kernel.config.buffers, "buffers are used several times"
    assert sum(tiles for _, tiles, *_ in spans) > 3 * kernel.config.stages, "the ring wraps around several times"
    assert {stop > 0 for _, _, _, stop, *_ in spans} == {False, True}, "there are full spans and partial ones"
