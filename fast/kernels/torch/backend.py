"""The declaration of the PyTorch backend: every tensor that no other backend serves."""

from torch import Tensor

from canon.fast.kernels.backend import Backend


def _any_device(x: Tensor) -> None:
    """Accept every tensor."""


TORCH = Backend(
    "torch",
    "canon.fast.kernels.torch.launch",
    "canon.fast.kernels.torch.rows",
    serves=lambda *_: True,
    check_device=_any_device,
    check=_any_device,
    extras=frozenset({"max_logits"}),
    compiles=False,
)
