"""Which kernel family computes: chosen by the caller with `backend`, and never exchanged for another in silence."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from canon.fast.kernels.triton import launch

__all__ = ["backend"]

FAMILIES = ("triton", "gluon", "cuda")
AVAILABLE = ("triton",)

_chosen: ContextVar[str] = ContextVar("canon_backend", default="triton")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within the block, compute with this kernel family: "triton", "gluon" or "cuda".

    Without it the best family that the device and the arguments allow is taken (for now always "triton").
    Raises ValueError for an unknown name and NotImplementedError for a family that does not exist yet.
    """
    if name not in FAMILIES:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, FAMILIES))}")
    if name not in AVAILABLE:
        raise NotImplementedError(f"backend({name!r}) is not written yet; there is {', '.join(map(repr, AVAILABLE))}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def check_device(x: Tensor) -> None:
    """Raise RuntimeError unless kernels can run where x is."""
    if x.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"canon.fast runs on CUDA devices, got a tensor on {x.device}: use canon.reference")
    if x.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError(
            "canon.fast needs tensors on a CUDA device, got CPU tensors: use canon.reference, or set TRITON_INTERPRET=1 "
            "before Triton is imported (slow: it runs the kernels in Python)"
        )
