"""Compile a function without graph breaks, and compare its results with those of an eager call, for tests."""

import torch
from torch._dynamo.utils import counters


def results(function, leaves, *arguments):
    """Return out, lse and the gradients of all leaves."""
    out, lse = function(*leaves, *arguments)
    return out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)


def assert_same(found, expected, exact):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, **(dict(rtol=0, atol=0) if exact else {}))


def compiled_once(function, backend):
    """Compile without graph breaks, and forget earlier graphs."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend)
