"""Capture both passes of attention in a CUDA graph, as a training loop captures a layer.

The capture has new leaves: autograd synchronises with the stream on which it first saw one.
"""

import torch

WARM_UPS = 3
# relative; one rounding to bfloat16 is 2^-8, and some backward passes add to dq in any order
DIFFERENT = 2**-7


def check_replay(attend, q, k, v, dout):
    """Assert that a replayed graph of both passes has the results of an eager call."""

    def both():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [both() for _ in range(WARM_UPS)][-1]
    torch.cuda.synchronize()
    # The default mode forbids CUDA calls of other threads, but NCCL's watchdog queries events.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = both()
    for x in results:
        x.zero_()
    graph.replay()
    for name, replayed, eager in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        error, size = (
            torch.linalg.vector_norm(x, dtype=torch.float32) for x in (replayed - eager, eager)
        )
        assert error <= DIFFERENT * size, name
