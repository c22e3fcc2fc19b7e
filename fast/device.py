"""Select the kernel backend of a call: the caller's choice (`backend`), or the fastest one that supports the inputs.

    "gluon"     Hopper (sm_90): bfloat16 and float16, heads up to 256 wide; "fused" up to 128
    "triton"    portable: any GPU that Triton supports, any dtype and width
    "cuda"      sm_80 and later: bfloat16 and float16, heads of 16 to 256 in multiples of 16; no "fused". Needs the extra cuda

Without `backend`, "gluon" is used where it supports the inputs. Otherwise "cuda" is used up to the widths of `CUDA_WIDTHS`,
if its compiler is installed, and "triton" elsewhere. A chosen backend that does not support the inputs raises: it is never
replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from torch import Tensor

from canon.fast.kernels.gluon import config
from canon.fast.kernels.interpreter import is_requested
from canon.fast.kernels.launcher import capability, is_cpu
from canon.fast.kernels.triton import launch
from canon.fast.recomputation import note_choice
from canon.masks.plan_cache import are_noted

__all__ = ["backend"]

AVAILABLE = ("triton", "gluon", "cuda")
# The largest width at which "auto" takes the CUDA kernels, by capability. No such GPU was at hand, so this follows from
# compiled resources in bfloat16 (notebooks/cuda_resources.py, canon.testing.compile). "8 x 32": 8 warps of 32 rows on an SM.
#
#                     forward               dq                    dk and dv
#     sm_80    64     8 x 32   8 x 16       8 x 32   8 x 16       8 x 32   8 x 16       first the CUDA kernel, then Triton's
#             128     8 x 32   8 x 16       8 x 16   8 x 16       8 x 32   8 x 16
#             256     8 x 16   8 x 16       8 x 16   8 x 16       8 x 16   8 x 16, with 5 MMAs a tile instead of 4
#     sm_86    64     as sm_80
#             128     8 x 16   4 x 16       8 x 16   8 x 16       4 x 16   8 x 16
#
# A warp reads every visited tile from shared memory, so 32 rows of a warp halve these reads. Where an SM holds fewer warps of
# a CUDA kernel, "auto" keeps Triton.
CUDA_WIDTHS = {(8, 0): 256, (8, 6): 64, (8, 9): 64}

_chosen: ContextVar[str | None] = ContextVar("canon_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use this kernel backend inside the block: "triton", "gluon" or "cuda".

    A backward pass and a recomputation by `torch.utils.checkpoint` use the backend of the original call. Without `backend`,
    calls use "gluon" on Hopper where its kernels support the dtype and width. On sm_80, sm_86 and sm_89 they use "cuda" up to
    the widths of `CUDA_WIDTHS`, if it is installed. All others use "triton". A dtype, width or device that the backend does
    not support raises ValueError when a call needs it. A compiled function keeps the backend of its compilation, so `backend`
    surrounds its calls. A call with another choice raises RuntimeError.
    Raises ValueError for an unknown name. The first kernel of "cuda" raises ModuleNotFoundError without the extra cuda.
    """
    if name not in AVAILABLE:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, AVAILABLE))}")
    note_choice()
    with computing_with(name):
        yield


@contextmanager
def computing_with(name: str | None) -> Iterator[None]:
    """Use this backend inside the block, or select one by the inputs (None). Overrides the choice outside the block."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_backend() -> str | None:
    """Return the backend that surrounds this call, or None."""
    return _chosen.get()


def kernels_for(q: Tensor, v: Tensor, method: str = "split") -> ModuleType:
    """Return the launch module of the backend for q and v. ``method``: of the backward pass; "split" also for the forward."""
    chosen = _chosen.get()
    if chosen == "gluon" or (chosen is None and _gluon_supports(q, v, method)):
        from canon.fast.kernels.gluon import launch as hopper  # imported only here: other GPUs do not need it

        return hopper
    if chosen == "cuda" or (chosen is None and _cuda_is_faster(q, v, method)):
        from canon.fast.kernels.cuda import launch as cuda

        return cuda
    return launch


def _gluon_supports(q: Tensor, v: Tensor, method: str) -> bool:
    if (
        is_cpu(q.device)
        or (launch.INTERPRETED and q.device.type == "cuda")
        or capability(q.device) != config.CAPABILITY
    ):
        return False
    kernel = "fused" if method == "fused" else "forward"  # all other kernels support the widths of "forward"
    return q.dtype in config.DTYPES and bool(config.padded_to(kernel, q.shape[-1], v.shape[-1]))


def _cuda_is_faster(q: Tensor, v: Tensor, method: str) -> bool:
    """Return whether "auto" takes the CUDA kernels, which must support the inputs and be installed."""
    if is_cpu(q.device) or launch.INTERPRETED or method == "fused" or q.dtype not in config.DTYPES:
        return False
    most = CUDA_WIDTHS.get(capability(q.device), 0)
    if any(width % 16 or not 16 <= width <= most for width in (q.shape[-1], v.shape[-1])):
        return False
    from canon.fast.kernels.cuda.program import is_installed

    return is_installed()


def check_device(x: Tensor) -> None:
    """Raise RuntimeError if no kernel can run on the device of x. Nothing runs while plans are made ahead."""
    if x.device.type == "meta" and are_noted():
        return
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
