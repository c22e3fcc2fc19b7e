"""Which kernel family computes: chosen by the caller with `backend`, and never exchanged for another in silence.

    "triton"    portable: any GPU that Triton supports, any dtype and width; the default
    "gluon"     Hopper (sm_90): bfloat16 and float16, heads up to 256 wide; "fused" up to 128
    "cuda"      not written

The Hopper kernels have been compiled and simulated (`canon.testing.simulator`), but not yet run on a GPU: until they have
been, and measured, they are taken only where a caller asks for them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType

from torch import Tensor

from canon.fast.kernels.triton import launch

__all__ = ["backend"]

FAMILIES = ("triton", "gluon", "cuda")
AVAILABLE = ("triton", "gluon")

_chosen: ContextVar[str] = ContextVar("canon_backend", default="triton")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block, compute with this kernel family: "triton", "gluon" or "cuda".

    A backward pass computes with the family of its forward pass, wherever it runs. Without `backend` the family is
    "triton". What a family cannot do (a dtype, a width, a device) is a ValueError when it is asked to.
    Raises ValueError for an unknown name and NotImplementedError for a family that does not exist yet.
    """
    if name not in FAMILIES:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, FAMILIES))}")
    if name not in AVAILABLE:
        raise NotImplementedError(f"backend({name!r}) is not written yet; there is {', '.join(map(repr, AVAILABLE))}")
    with _computing_with(name):
        yield


@contextmanager
def _computing_with(name: str) -> Iterator[None]:
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def remember_family(ctx) -> None:
    """Keep the family in the context of an autograd function: its backward pass may run in another thread."""
    ctx.family = _chosen.get()


def with_family(backward: Callable) -> Callable:
    """A backward pass that computes with the family that `remember_family` kept."""

    @wraps(backward)
    def same(ctx, *grads):
        with _computing_with(ctx.family):
            return backward(ctx, *grads)

    return same


def family() -> ModuleType:
    """The launches of the family that is to compute."""
    if _chosen.get() == "gluon":
        from canon.fast.kernels.gluon import launch as hopper  # only then: other GPUs need not know it

        return hopper
    return launch


def check_device(x: Tensor) -> None:
    """Raise RuntimeError unless kernels can run where x is."""
    if x.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"canon.fast runs on CUDA devices, got a tensor on {x.device}: use canon.reference")
    if x.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError(
            "canon.fast needs tensors on a CUDA device, got CPU tensors: use canon.reference, or set TRITON_INTERPRET=1 "
            "before Triton is imported (slow: it runs the kernels in Python)"
        )
