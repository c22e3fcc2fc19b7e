"""Run both passes of attention in simulated Hopper kernels, on the CPU."""

from contextlib import nullcontext

import torch
import verdicts
from torch import Tensor
from torch.overrides import TorchFunctionMode

from canon import fast
from canon.bench import peers
from canon.masks.mask import Mask
from canon.testing import simulated_kernels
from canon.testing.judge import Attended

# order and seed of `simulator.simulated`
INTERLEAVINGS = (("late", 0), ("early", 1), ("random", 2), ("random", 3))


def simulated_passes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, method: str,
    *, order: str = "random", seed: int = 0, log: list | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return out, dq, dk and dv in float32, by name, from one interleaving of the Gluon kernels.

    ``method``: that of `attention_backward`, or "fused in order" for the fixed order of the sums of
    dq. ``order``, ``seed`` and ``log``: those of `simulator.simulated`. Triton's interpreter must
    be on (``TRITON_INTERPRET=1``)."""
    name = method.removesuffix(" in order")
    fixed = nullcontext() if name == method else peers.deterministic()
    with fast.backend("gluon"), simulated_kernels.simulated(order, seed, log), fixed:
        out, lse = fast.attention_forward(q, k, v, mask, out_dtype=torch.float32)
        grads = fast.attention_backward(
            dout, q, k, v, out, lse, mask, method=name, grad_dtype=torch.float32
        )
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))


def agree_with_reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, method: str
) -> None:
    """Print the errors of a simulated run over their bounds. Raise AssertionError that names the
    first difference.
    """
    found = simulated_passes(q, k, v, dout, mask, method)
    verdicts.require(f"gluon, {method}", Attended(**found), q, k, v, dout, mask)


def different_bits(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, method: str
) -> dict[str, int]:
    """Return for each result how many different tensors four interleavings give: 1 means that all
    have the same bits.
    """
    runs = [
        simulated_passes(q, k, v, dout, mask, method, order=order, seed=seed)
        for order, seed in INTERLEAVINGS
    ]
    return {name: len({run[name].numpy().tobytes() for run in runs}) for name in runs[0]}


class _Allocations(TorchFunctionMode):
    """Count the bytes of the float32 tensors from `new_empty`."""

    nbytes = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.__name__ == "new_empty" and result.dtype == torch.float32:
            self.nbytes += result.nbytes
        return result


def allocated_bytes(method: str, mask: Mask, *, b: int, h: int, g: int, d: int, dv: int) -> int:
    """Return the bytes of the float32 parts that a simulated backward pass allocates, for random
    bfloat16 inputs.
    """
    widths = (mask.queries, h, d), (mask.keys, g, d), (mask.keys, g, dv), (mask.queries, h, dv)
    q, k, v, dout = (torch.randn(b, *x).bfloat16() for x in widths)
    with fast.backend("gluon"), simulated_kernels.simulated(), _Allocations() as allocations:
        out, lse = fast.attention_forward(q, k, v, mask)
        fast.attention_backward(dout, q, k, v, out, lse, mask, method=method)
    return allocations.nbytes
