"""Inputs, compilation without graph breaks, and comparison with an eager call, for tests of
operators.
"""

import torch
from sharded import whole
from torch._dynamo.utils import counters

from canon import Mask


def inputs(tokens=24, seed=0):
    q, k, v, *_ = whole(Mask.full(tokens), b=2, d=16, dv=12, dtype=torch.float32, seed=seed)
    return [x.requires_grad_() for x in (q, k, v)]


def results(function, leaves, *arguments):
    """Return out, lse and the gradients of all leaves."""
    out, lse = function(*leaves, *arguments)
    return out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)


def assert_same(found, expected, exact):
    torch.testing.assert_close(found, expected, **(dict(rtol=0, atol=0) if exact else {}))


def compare(compiled, eager, exact, *given):
    """Fail unless both functions have the same results and gradients."""
    assert_same(results(compiled, *given), results(eager, *given), exact)


def compiled_once(function, backend):
    """Compile without graph breaks, and forget earlier graphs."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend)
