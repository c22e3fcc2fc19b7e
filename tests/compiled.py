"""Inputs, compilation without graph breaks, and comparison with an eager call, for tests of
operators.
"""

import torch
from torch._dynamo.utils import counters


def inputs(tokens=24, seed=0):
    draw = torch.Generator().manual_seed(seed)
    widths = ((4, 16), (2, 16), (2, 12))
    return [
        torch.randn(2, tokens, heads, width, generator=draw).requires_grad_()
        for heads, width in widths
    ]


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
