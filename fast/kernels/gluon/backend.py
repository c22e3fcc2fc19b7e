"""The Gluon backend: Hopper, elements of two bytes, widths of `config.TABLE`."""

import torch
from torch import Tensor

from canon.fast.kernels.backend import Backend
from canon.fast.kernels.gluon import config
from canon.fast.kernels.launcher import capability, is_cpu
from canon.fast.kernels.triton.backend import ROWS, check_device, is_interpreted, runs_on


def _serves(device: torch.device, dtype: torch.dtype, d: int, dv: int, method: str) -> bool:
    if is_cpu(device) or not runs_on(device) or (is_interpreted() and device.type == "cuda"):
        return False
    # all other kernels support the widths of "forward"
    kernel = "fused" if method == "fused" else "forward"
    supported = capability(device) == config.CAPABILITY and dtype in config.DTYPES
    return supported and bool(config.padded_to(kernel, d, dv))


def _check(q: Tensor) -> None:
    GLUON.module.check(q)
    GLUON.module.check_runs(q)


GLUON = Backend(
    "gluon",
    "canon.fast.kernels.gluon.launch",
    ROWS,
    serves=_serves,
    check_device=check_device,
    check=_check,
)
