"""Mutants of the Hopper kernels: kernels with one change, and the reasons of those that survive.

A *mutant* lacks a wait, an arrival, a fence, a ping-pong barrier, a published work tile or a
ticket. Or it waits for the other parity, or for one MMA fewer. Or it stores rows of other work
tiles. Or it counts two adders where there is one, or one of two."""

import ast
import copy
import textwrap
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from triton.experimental.gluon._runtime import GluonJITFunction

from canon.fast.kernels.gluon import (
    dkdv,
    dkdv_hdim256,
    dq,
    few_queries,
    few_queries_sums,
    forward,
    forward_plain,
)
from canon.fast.kernels.gluon.config import Config

Branches = Mapping[str, bool]  # values of compile-time conditions, without "c."


class Kernel(NamedTuple):
    """A kernel to mutate, its configuration, and head width d."""

    function: GluonJITFunction
    config: Config
    d: int = 64
    branches: Branches = MappingProxyType({})


def of_forward(config: Config, after: bool = False) -> Kernel:
    branches = {"STALE_MAXIMUM": config.stale_maximum, "P_AFTER_O": after}
    return Kernel(forward.forward_kernel, config, branches=branches)


def of_fused(columns: int, stages: int, ordered: bool = False, early: bool = True) -> Kernel:
    wide = columns == 64 and stages == 2
    branches = {"FUSED": True, "D_PAD > 64": wide, "ORDERED": ordered, "EARLY": early}
    return Kernel(dkdv.dkdv_kernel, Config(128, columns, stages), 80 if wide else 64, branches)


KERNELS = {
    "forward": of_forward(Config(128, 64, 4, 2)),
    "forward by three": of_forward(Config(192, 64, 3), after=True),
    "forward, stale maximum": of_forward(Config(128, 64, 2, stale_maximum=True)),
    "forward, plain": Kernel(forward_plain.forward_plain_kernel, Config(128, 64, 2, plain=True)),
    "few queries, weights": Kernel(few_queries.weights_kernel, Config(64, 64, 2)),
    "few queries, sums": Kernel(few_queries_sums.sums_kernel, Config(64, 64, 2)),
    "dq": Kernel(dq.dq_kernel, Config(128, 64, 2)),
    "dq, one V": Kernel(dq.dq_kernel, Config(128, 64, 2, v_stages=1)),
    "dkdv": Kernel(
        dkdv.dkdv_kernel,
        Config(128, 64, 4, 2),
        branches={"FUSED": False, "ORDERED": False, "EARLY": True},
    ),
    "fused": of_fused(128, 2, early=False),
    "fused by halves": of_fused(64, 2),
    "ordered": of_fused(64, 3, ordered=True),
    "ordered by halves": of_fused(64, 2, ordered=True),
    "dkdv_hdim256": Kernel(dkdv_hdim256.dkdv_hdim256_kernel, Config(64, 64, 2), d=144),
}

FENCE = (
    "makes mbarrier.init visible to the async proxy; in the simulator, new barriers are "
    "visible at once"
)
HELD_BACK = (
    "the previous wait of the loader implies it: the buffer of that wait is released "
    "later in the same step"
)
ONE_V = "the wait for V, just before, implies it: the same MMAs read dO and the only buffer of V"
FOR_THE_ASSEMBLER = (
    "complete already: it keeps the assembler from waiting for dP before the exponentials"
)
ARRIVED = (
    "the arrival just before implies it: it has synchronised the warps, which have all "
    "waited for their MMA"
)
SURVIVORS = {
    "few queries, weights": {
        "weights_kernel: fence_async_shared() is left out": FENCE,
        "weights_kernel: mbarrier.wait(k.free.index(ring.slot), ring.parity) is left out": ARRIVED,
    },
    "few queries, sums": {},
    "forward": {
        "forward_kernel: fence_async_shared() is left out": FENCE,
    },
    "forward, plain": {
        "forward_plain_kernel: fence_async_shared() is left out": FENCE,
    },
    "dq": {
        "dq_kernel: fence_async_shared() is left out": FENCE,
        "load_tiles: mbarrier.wait(v.free.index(v_slot), t // V_STAGES & 1 ^ 1) is left "
        "out": HELD_BACK,
        "differentiate: mbarrier.wait(buffers.v.full.index(v_slot), t // V_STAGES & 1) is left "
        "out": FOR_THE_ASSEMBLER,
    },
    "dkdv": {
        "dkdv_kernel: fence_async_shared() is left out": FENCE,
        "load_tiles: mbarrier.wait(dout.free.index(slot), parity ^ 1) is left out": HELD_BACK,
    },
    "dkdv_hdim256": {
        "dkdv_hdim256_kernel: fence_async_shared() is left out": FENCE,
    },
}
SURVIVORS["dq, one V"] = {
    mutant: why for mutant, why in SURVIVORS["dq"].items() if why != HELD_BACK
} | {"load_tiles: mbarrier.wait(dout.free.index(w), done & 1 ^ 1) is left out": ONE_V}
for forwards in ("forward by three", "forward, stale maximum"):
    SURVIVORS[forwards] = SURVIVORS["forward"]
for fused in ("fused", "fused by halves", "ordered", "ordered by halves"):
    SURVIVORS[fused] = SURVIVORS["dkdv"]


# ------------------------------------------------------------------ mutants
def left_out(call):
    return ast.Constant(None)


def other_parity(call):
    call.args[1] = ast.BinOp(call.args[1], ast.BitXor(), ast.Constant(1))
    return call


def one_more_in_flight(call):
    call.args[0] = ast.BinOp(call.args[0], ast.Add(), ast.Constant(1))
    return call


def of_the_other_order(call):
    """One adder for two, and two for one."""
    return ast.BinOp(call, ast.BitXor(), ast.Constant(3))


def all_rows(call):
    call.args[3] = ast.Constant(1 << 20)
    return call


LEFT_OUT = {"is left out": left_out}
CHANGES = {
    "mbarrier.wait": LEFT_OUT | {"waits for the other parity": other_parity},
    "mbarrier.arrive": LEFT_OUT,
    "mbarrier.expect": LEFT_OUT,
    "fence_async_shared": LEFT_OUT,
    "ping_pong_wait": LEFT_OUT,
    "ping_pong_arrive": LEFT_OUT,
    "tma.store_wait": LEFT_OUT,
    "hopper.warpgroup_mma_wait": {"waits for one MMA fewer": one_more_in_flight},
    "publish": LEFT_OUT,
    "wait_for_ticket": LEFT_OUT,
    "wait_for_reductions": LEFT_OUT,
    "fence_async_global": LEFT_OUT,
    "publish_ticket": LEFT_OUT,
    "adders": {"is that of the other order": of_the_other_order},
    "store_tile": {"stores rows behind the work tile's": all_rows},
}


# matter only if several CTAs add to one tile of dq
BETWEEN_CTAS = "wait_for_ticket(", "wait_for_reductions("


class Mutation(ast.NodeTransformer):
    """Makes change ``number`` of a function. Collects all possible changes and names, except in
    branches that are not taken.
    """

    def __init__(self, branches, number):
        self.branches, self.number = branches, number
        self.source = ""
        self.changes: list[str] = []
        self.names: list[str] = []

    def visit_If(self, node):
        test = node.test
        conditions = (
            test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        )
        known = [self.known(condition) for condition in conditions]
        taken = [] if False in known else node.body
        for statement in taken if all(known) else [*taken, *node.orelse]:
            self.visit(statement)
        return node

    def known(self, test):
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return None if (value := self.known(test.operand)) is None else not value
        return self.branches.get(ast.unparse(test).rpartition(".")[2])

    def visit_Name(self, node):
        self.names.append(node.id)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        before = ast.unparse(node)
        for what, change in CHANGES.get(ast.unparse(node.func), {}).items():
            self.changes.append(f"{before} {what}")
            if len(self.changes) - 1 == self.number:
                return change(node)
        return node


def changes(function, branches, number=-1):
    """Return the mutation of a function, with its source after change ``number``, if it has that
    many.
    """
    mutation = Mutation(branches, number)
    tree = mutation.visit(ast.parse(textwrap.dedent("".join(function.raw_src))))
    mutation.source = ast.unparse(tree)
    return mutation


def mutated(function, branches, number):
    """Return the function with change ``number``."""
    mutant = copy.copy(function)
    mutant.raw_src = [changes(function, branches, number).source]
    return mutant


def reached(function, branches):
    """Return a kernel and the kernel functions that it calls."""
    found = {function.fn.__name__: function}
    for name in changes(function, branches).names:
        used = function.fn.__globals__.get(name)
        if isinstance(used, GluonJITFunction) and name not in found:
            found |= reached(used, branches)
    return found


def mutants(kernel):
    """Return the function and the number of each change of a kernel."""
    found = {}
    for name, function in reached(kernel.function, kernel.branches).items():
        times = Counter()
        for number, change in enumerate(changes(function, kernel.branches).changes):
            times[change] += 1
            what = f"{name}: {change}" + (f" ({times[change]})" if times[change] > 1 else "")
            found[what] = function, number
    return found
