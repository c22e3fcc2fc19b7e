"""Launches: the cache of compiled kernels is used for equal calls only,
and captured graphs replay.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hopper import captured, inputs
from sharded import all_equal, shards

from canon import Mask, fast
from canon.fast.kernels import launcher
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted

GPU = torch.device("cuda", 0)


class Kernel:
    """A kernel (x, n, scale, D). It counts compilations and records all launches."""

    arg_names = ("x", "n", "scale", "D")

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self._compile(grid, arguments, constants)

    def _compile(self, grid, arguments, constants):
        self.compiled += 1
        self.launched.append((grid[0], *arguments, constants["D"]))
        return Compiled(self.compiled, self.launched)


class Compiled:
    """A compiled kernel, which records later launches."""

    def __init__(self, number, launched):
        self.number, self.launched = number, launched

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((self.number, grid, *arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(launcher, "_compiled", {})
    return Kernel()


def test_a_kernel_is_hashed_after_triton_was_told_the_order(kernel, monkeypatch):
    """Else it gets another key in the disk cache than in the process that compiled it."""
    done = []
    monkeypatch.setattr(launcher, "_hash_helpers_first", lambda: done.append("told"))
    monkeypatch.setattr(Kernel, "__hash__", lambda kernel: done.append("hashed") or id(kernel))
    launcher.launch(kernel, 3, GPU, (torch.zeros(8),), D=64)
    assert done[:2] == ["told", "hashed"]


def test_a_second_equal_call_uses_the_compiled_kernel(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    launcher.launch(kernel, 3, GPU, (x, 5, 0.5), D=64, num_warps=4)
    launcher.launch(kernel, 7, GPU, (y, 5, 0.25), D=64, num_warps=4)
    assert kernel.compiled == 1
    first, second = kernel.launched
    assert first == (3, x, 5, 0.5, 64)
    assert second[:2] == (1, (7, 1, 1))
    assert second[2] is y
    assert second[3:] == (5, 0.25, 64), "constants in the kernel's order, and no compiler options"


@pytest.mark.parametrize(
    "other",
    [
        dict(x=torch.zeros(8, dtype=torch.float16)),
        dict(x=torch.zeros(9)[1:]),  # not aligned to 16 bytes
        dict(n=1),
        dict(n=(5,)),
        dict(D=32),
        dict(num_warps=8),
        dict(x=SimpleNamespace(base=torch.zeros(8), block_shape=[4, 2])),
        dict(device=torch.device("cuda", 1)),
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_different_call_is_compiled_anew(kernel, other):
    call = dict(device=GPU, x=torch.zeros(8), n=5, D=64, num_warps=4)
    for changed in (call, call | other, call, call | other):
        arguments = changed["x"], changed["n"], 0.5
        launcher.launch(
            kernel, 1, changed["device"], arguments, D=changed["D"], num_warps=changed["num_warps"]
        )
    assert kernel.compiled == 2


def test_the_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launcher, "CACHE_LIMIT", 4)
    for n in range(20):
        launcher.launch(kernel, 1, GPU, (torch.zeros(8), n, 0.5), D=64)
    assert len(launcher._compiled) <= 4


SCHEDULES = "ring_attention", "strided_attention", "magi_attention"


def replayed():
    """Return for each of three replays whether a captured graph of all schedules gives the results
    of eager calls.
    """
    mask = Mask.documents([0, 700, 701, 2048], window=(900, 0))
    layout = fast.dispatch(mask, dist.get_world_size(), chunk=128)
    *held, dout = shards(layout, inputs(mask, h=8, g=4)[:4])

    def both():
        results, leaves = [], [x.detach().requires_grad_() for x in held]
        for name in SCHEDULES:
            out = getattr(fast, name)(*leaves, mask, layout)
            results += [out, *torch.autograd.grad(out, leaves, dout)]
        return results

    both()
    (graph, results), same = captured(both), []
    for turn in range(3):
        for x in held:
            x.mul_(0.5 + turn)
        expected = [x.clone() for x in both()]
        for x in results:
            x.detach().zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        same.append(all_equal(results, expected))
    return same


@pytest.mark.gpus(2)
def test_a_captured_graph_replays_schedules():
    assert process_groups.gpus(replayed, 2) == [[True] * 3] * 2
