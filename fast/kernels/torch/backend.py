"""The declaration of the PyTorch backend: every tensor that no other backend serves."""

from canon.fast.kernels.backend import Backend
from canon.route.checks import any_device

TORCH = Backend(
    "torch",
    "canon.fast.kernels.torch.launch",
    "canon.fast.kernels.torch.rows",
    serves=lambda *_: True,
    check_device=any_device,
    check=any_device,
    extras=frozenset({"max_logits"}),
    compiles=False,
)
