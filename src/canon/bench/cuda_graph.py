"""Capture both passes of attention in a CUDA graph, as a training loop captures a layer.

The capture has new leaves: autograd synchronises with the stream on which it first saw one.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UPS = 3
# relative; one rounding to bfloat16 is 2^-8, and some backward passes add to dq in any order
DIFFERENT = 2**-7


@dataclass(frozen=True)
class CapturedPasses:
    """A CUDA graph of both passes, its tensors, and the results of an eager call."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    results: list[Tensor]
    expected: list[Tensor]

    def check(self) -> None:
        for x in self.results:
            x.zero_()
        self.graph.replay()
        for name, replayed, eager in zip(
            ("out", "dq", "dk", "dv"), self.results, self.expected, strict=True
        ):
            error, size = (
                torch.linalg.vector_norm(x, dtype=torch.float32).item()
                for x in (replayed - eager, eager)
            )
            if not error <= DIFFERENT * size:  # NaN fails
                raise RuntimeError(
                    f"{name} of a replayed graph differs by {error:.2e} from the eager call's "
                    f"{size:.2e}"
                )


def captured(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> CapturedPasses:
    """Return both passes as a CUDA graph. Raises the error of a failed capture."""

    def both() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS - 1):
            both()
        expected = both()
    torch.cuda.synchronize()
    try:
        # The default mode forbids CUDA calls of other threads, but NCCL's watchdog queries events.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            results = both()
    except Exception:
        _abandon(before, pool)
        raise
    return CapturedPasses(graph, (q, k, v, dout), results, expected)


def _abandon(before: torch.cuda.Stream, pool) -> None:
    """Restore the stream and close the pool: `torch.cuda.graph` (2.11) leaves it open."""
    torch.cuda.set_stream(before)
    with suppress(RuntimeError):  # the pool is closed: the capture ended, but a call inside raised
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
