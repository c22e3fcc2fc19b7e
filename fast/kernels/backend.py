"""What a kernel backend declares, so that adding one takes a folder and a line in
`canon.fast.device`.

Its two modules, `Kernels` and `Rows`, are imported when they are first used. Their functions write
into given tensors, of any strides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# configurations that are forced, by kernel: a dict for each backend that has some
FORCED: list[dict[str, Any]] = []


class Kernels(Protocol):
    """The attention kernels: `canon.fast.kernels.torch.launch` describes each. q (b, t, h, d),
    k (b, s, g, d), v (b, s, g, dv); lse and delta (b, h, t).
    """

    forward: Callable[..., None]
    dq: Callable[..., None]
    dkdv: Callable[..., None]
    choose_method: Callable[..., str]
    empty_statistics: Callable[[Tensor], Tensor | None]
    row_statistics: Callable[..., Any]
    make_row_statistics: Callable[..., Any]


class Rows(Protocol):
    """The operations on rows (tokens): `canon.fast.kernels.torch.rows` describes each."""

    merge: Callable[..., None]
    delta: Callable[..., None]
    sum_heads: Callable[..., None]
    take_rows: Callable[..., None]
    copy_rows: Callable[..., None]
    copy_statistics: Callable[..., None]
    copy_tokens: Callable[..., None]
    add_to_rows: Callable[..., None]
    add_rows: Callable[..., None]
    sum_ranks: Callable[..., None]
    apply_sink: Callable[..., None]
    differentiate_sink: Callable[..., None]


@dataclass(frozen=True, eq=False)
class Backend:
    """A kernel backend: the modules with its functions, and what they support.

    ``serves(device, dtype, d, dv, method)``: whether the automatic choice may take it; ``method``
    is that of the backward pass, "split" for the forward pass. ``check_device(x)`` raises
    RuntimeError or ValueError if its row operations do not run on the device of x, and ``check(q)``
    if its kernels do not support q. ``extras``: "max_logits" if `Kernels.forward` takes them,
    "parts" if ``parts_module`` sums few queries over many keys in parts. ``automatic``: whether it
    is taken without being asked for. ``compiles``: whether `canon.fast.ahead` compiles its kernels.
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

    @property
    def kernels(self) -> Kernels:
        return cast(Kernels, self.module)

    @property
    def forward_in_parts(self) -> Callable[..., None]:
        """Import the forward pass in parts, with the arguments of `Kernels.forward`."""
        return import_module(self.parts_module).forward_in_parts

    @cached_property
    def rows(self) -> Rows:
        return cast(Rows, import_module(self.rows_module))
