"""The declaration of the CUDA C++ backend, which is used only by name."""

from torch import Tensor

from canon.fast.kernels.backend import Backend
from canon.fast.kernels.triton.backend import ROWS, check_device


def _check(q: Tensor) -> None:
    CUDA.module.check(q)


CUDA = Backend(
    "cuda",
    "canon.fast.kernels.cuda.launch",
    ROWS,
    serves=lambda *_: False,
    check_device=check_device,
    check=_check,
    automatic=False,
)
