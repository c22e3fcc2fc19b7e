"""Which kernel family computes: chosen by the caller with `backend`, else the fastest that can.

    "gluon"     Hopper (sm_90): bfloat16 and float16, heads up to 256 wide; "fused" up to 128
    "triton"    portable: any GPU that Triton supports, any dtype and width
    "cuda"      not written

Without `backend`, "gluon" computes what it can and "triton" the rest. A family that was asked for is never exchanged for
another in silence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType

from torch import Tensor

from canon.fast.kernels.gluon import config
from canon.fast.kernels.interpreter import is_requested
from canon.fast.kernels.launching import capability
from canon.fast.kernels.triton import launch

__all__ = ["backend"]

FAMILIES = ("triton", "gluon", "cuda")
AVAILABLE = ("triton", "gluon")

_chosen: ContextVar[str | None] = ContextVar("canon_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block, compute with this kernel family: "triton", "gluon" or "cuda".

    A backward pass computes with the family of its forward pass, wherever it runs. Without `backend` it is "gluon" on
    Hopper for what the Hopper kernels can do, else "triton". What a family cannot do (a dtype, a width, a device) is a
    ValueError when it is asked to.
    Raises ValueError for an unknown name and NotImplementedError for a family that does not exist yet.
    """
    if name not in FAMILIES:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, FAMILIES))}")
    if name not in AVAILABLE:
        raise NotImplementedError(f"backend({name!r}) is not written yet; there is {', '.join(map(repr, AVAILABLE))}")
    with _computing_with(name):
        yield


@contextmanager
def _computing_with(name: str | None) -> Iterator[None]:
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


def family(q: Tensor, v: Tensor, method: str = "split") -> ModuleType:
    """The launches of the family that is to compute with heads as wide as those of q and v; ``method`` of the backward."""
    if _chosen.get() == "gluon" or (_chosen.get() is None and _hopper_can(q, v, method)):
        from canon.fast.kernels.gluon import launch as hopper  # only then: other GPUs need not know it

        return hopper
    return launch


def _hopper_can(q: Tensor, v: Tensor, method: str) -> bool:
    if q.device.type != "cuda" or launch.INTERPRETED or capability(q.device) != config.CAPABILITY:
        return False
    widest = "fused" if method == "fused" else "forward"  # the others are for heads as wide as the forward kernel's
    return q.dtype in config.DTYPES and bool(config.padded_to(widest, q.shape[-1], v.shape[-1]))


def check_device(x: Tensor) -> None:
    """Raise RuntimeError unless kernels can run on the device of x."""
    if x.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"canon.fast runs on CUDA devices, got a tensor on {x.device}: use canon.reference")
    if x.device.type == "cpu" and not launch.INTERPRETED:
        if is_requested():
            raise RuntimeError(
                "canon.fast was imported before TRITON_INTERPRET=1 was set, so it cannot run on CPU tensors: set the variable "
                "before the import, or use canon.reference"
            )
        raise RuntimeError(
            "canon.fast needs tensors on a CUDA device, got CPU tensors: use canon.reference, or set TRITON_INTERPRET=1 "
            "before canon.fast is imported (slow: it runs the kernels in Python)"
        )
