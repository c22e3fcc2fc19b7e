"""The declaration of the Triton backend."""

from importlib.util import find_spec

import torch
from torch import Tensor

from canon.fast.kernels.backend import Backend
from canon.fast.kernels.launcher import is_cpu

ROWS = "canon.fast.kernels.triton.rows"
INSTALLED = find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether kernels are interpreted."""
    return INSTALLED and TRITON.module.INTERPRETED and _is_requested()


def is_requested_too_late() -> bool:
    """Return whether TRITON_INTERPRET was set after the kernels were defined."""
    return INSTALLED and _is_requested() and not TRITON.module.INTERPRETED


def _is_requested() -> bool:
    from canon.fast.kernels.interpreter import is_requested  # only with Triton

    return is_requested()


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on a device."""
    if is_cpu(device):
        return is_interpreted()
    return INSTALLED and device.type in ("cuda", "meta")


def check_device(x: Tensor) -> None:
    """Raise RuntimeError unless kernels run on the device of x."""
    if not INSTALLED:
        raise RuntimeError(
            "the kernels need Triton: pip install 'triton>=3.6' (on Linux), or use "
            'backend("torch")'
        )
    if not runs_on(x.device):
        where = "CPU tensors" if x.device.type == "cpu" else f"a tensor on {x.device}"
        raise RuntimeError(
            f'the Triton kernels need tensors on a CUDA device, got {where}: use backend("torch") '
            "or canon.reference, or on "
            "a CPU set TRITON_INTERPRET=1 before canon.fast is imported (slow: it runs the "
            "kernels in Python)"
        )


TRITON = Backend(
    "triton",
    "canon.fast.kernels.triton.launch",
    ROWS,
    serves=lambda device, dtype, d, dv, method: runs_on(device),
    check_device=check_device,
    check=check_device,
    extras=frozenset({"max_logits", "parts"}),
    parts_module="canon.fast.kernels.triton.parts",
)
