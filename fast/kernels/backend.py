"""What a kernel backend declares, so that adding one takes a folder and a line in
`canon.fast.device`.

Its two modules are imported when they are first used. They have the functions of the smallest
backend, `canon.fast.kernels.torch.launch` and `canon.fast.kernels.torch.rows`, which write into
given tensors, of any strides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# configurations that are forced, by kernel: a dict for each backend that has some
FORCED: list[dict[str, Any]] = []


@dataclass(frozen=True, eq=False)
class Backend:
    """A kernel backend: the modules with its functions, and what they support.

    ``serves(device, dtype, d, dv, method)``: whether the automatic choice may take it; ``method``
    is "split" for the forward pass. ``check_device(x)`` and ``check(q)`` raise RuntimeError or
    ValueError if row operations do not run on the device of x, or kernels do not support q.
    ``extras``: "max_logits" if `forward` takes them, "parts" if ``parts_module`` sums few queries
    over many keys in parts. ``automatic``: taken without being asked for. ``compiles``:
    `canon.fast.ahead` compiles its kernels.
    """

    name: str
    kernels_module: str
    rows_module: str
    serves: Callable[[torch.device, torch.dtype, int, int, str], bool]
    check_device: Callable[[Tensor], None]
    check: Callable[[Tensor], None]
    extras: frozenset[str] = frozenset()
    parts_module: str = ""
    automatic: bool = True
    compiles: bool = True

    @cached_property
    def module(self) -> ModuleType:
        return import_module(self.kernels_module)

    @cached_property
    def rows(self) -> ModuleType:
        return import_module(self.rows_module)

    @property
    def forward_in_parts(self) -> Callable[..., None]:
        return import_module(self.parts_module).forward_in_parts
