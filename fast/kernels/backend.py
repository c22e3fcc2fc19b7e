"""What a kernel backend declares, so that adding one takes a folder and a line in
`canon.fast.device`.

    kernels    the attention kernels: forward, dq, dkdv and the row statistics (`Kernels`)
    rows       merge, delta, sinks, copies and sums of rows (`Rows`); "gluon" and "cuda" use those
               of "triton"
    serves     the tensors for which the automatic choice may take it
    check      raises for tensors that it does not support, when it was chosen by name

Both modules are imported when they are first used. Passes write into given tensors, of any strides;
work tables, masks and scratch are their own affair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from canon.fast.tables.cells import Cells
from canon.masks.mask import Mask
from canon.route.checks import Scale

# configurations that are forced, by kernel: a dict for each backend that has some
FORCED: list[dict[str, Any]] = []


class Kernels(Protocol):
    """The attention kernels of a backend. q (b, t, h, d), k (b, s, g, d), v (b, s, g, dv); lse and
    delta (b, h, t).
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cells: Cells,
        scale: Scale,
        out: Tensor,
        lse: Tensor,
        /,
    ) -> None:
        """Write out (b, t, h, dv) and lse; raise an eighth argument (h,) to the largest scores if
        "max_logits" is an extra.
        """
        ...

    def dq(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        statistics: Any,
        cells: Cells,
        scale: Scale,
        dq: Tensor,
        /,
    ) -> None:
        """Write dq (b, t, h, d)."""
        ...

    def dkdv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        statistics: Any,
        cells: Cells,
        scale: Scale,
        dk: Tensor,
        dv: Tensor,
        dq: Tensor | None = None,
        ordered: bool = False,
        /,
    ) -> None:
        """Write dk and dv of key heads or query heads. Fused: also add to ``dq``, in a fixed order
        if ``ordered``.
        """
        ...

    def choose_method(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        multiprocessors: int,
        repeats: bool,
        sends: bool,
        /,
    ) -> str:
        """Return the backward method for "auto". ``repeats``, ``sends``: as in
        `canon.fast.backward.Method`.
        """
        ...

    def empty_statistics(self, lse: Tensor, /) -> Tensor | None:
        """Allocate what `row_statistics` writes, if it writes anything."""
        ...

    def row_statistics(self, lse: Tensor, delta: Tensor, statistics: Any = None, /) -> Any:
        """Return lse and delta as `dq` and `dkdv` read them."""
        ...

    def make_row_statistics(
        self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, /
    ) -> Any:
        """Compute delta, and return the same."""
        ...


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
    "parts" if few queries over many keys are summed in parts, by ``parts_module``. ``automatic``:
    whether it is taken without being asked for. ``compiles``: whether `canon.fast.ahead` compiles
    its kernels. ``replayable``: whether `launcher.launch` sees all it does, or it is an operator of
    PyTorch; others run as written in each call.
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
    replayable: bool = True

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
