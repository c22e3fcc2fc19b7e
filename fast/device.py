"""Select the kernel backend of a call: the caller's choice (`backend`), which is never replaced, or
the first of "gluon", "triton" and "torch" that serves the inputs
(paper/in_your_program.md#devices-and-backends).
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from canon.fast.kernels.backend import Backend
from canon.fast.kernels.cuda.backend import CUDA
from canon.fast.kernels.gluon.backend import GLUON
from canon.fast.kernels.torch.backend import TORCH
from canon.fast.kernels.triton.backend import TRITON, is_requested_too_late
from canon.masks.plan_cache import are_noted

__all__ = ["backend"]

# the automatic choice is the first one that serves a call
BACKENDS = {x.name: x for x in (GLUON, TRITON, CUDA, TORCH)}

_chosen: ContextVar[str | None] = ContextVar("canon_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use this kernel backend inside the block: "triton", "gluon", "cuda" or "torch".

    A backward pass uses the backend of its call. A function that `torch.utils.checkpoint`
    recomputes must contain the block, or the recomputation raises RuntimeError. A compiled function
    keeps the backend of its compilation: a call with another choice raises RuntimeError. What the
    backend does not support raises ValueError or RuntimeError when a call needs it. Raises
    ValueError for an unknown name. The first kernel of "cuda" raises ModuleNotFoundError without
    the extra cuda.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, BACKENDS))}")
    _used[0] = True
    with computing_with(name):
        yield


@contextmanager
def computing_with(name: str | None) -> Iterator[None]:
    """As `backend`, without a check; None selects by the inputs."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_backend() -> str | None:
    """Return the backend that surrounds this call, or None."""
    return _chosen.get()


_UNCHANGED = nullcontext()
_used = [False]  # whether `backend` was ever used; until then nothing is counted
# calls that a checkpoint may recompute, by key and by chosen or not
_first_runs: Counter[tuple[int, bool]] = Counter()


def settings_of(key: Hashable) -> str | None:
    """Return the chosen backend, for the ``key`` of a call. Raise RuntimeError if its recomputation
    would use another one.
    """
    chosen = _chosen.get()
    if _used[0] and key is not None:
        _count(hash(key), chosen is not None)
    return chosen


def _count(key: int, is_chosen: bool) -> None:
    """Count a first run, or match a recomputation with one. A checkpoint runs a call first without
    gradients (use_reentrant=True), or with hooks that save tensors, and again in a backward pass.
    """
    if torch._C._current_graph_task_id() == -1:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
        if hooks is not None or not torch.is_grad_enabled():
            _first_runs[key, is_chosen] += 1
    elif _first_runs[key, is_chosen]:
        _first_runs[key, is_chosen] -= 1
    elif not is_chosen and _first_runs[key, True]:
        raise RuntimeError(
            "a checkpoint recomputes a call after its `with backend(...)` has ended: put `with "
            "backend(...)` inside the function that is checkpointed"
        )


def restored(settings: str | None) -> AbstractContextManager:
    """Return a context with the backend of a call: the thread of a later pass may have another
    choice.
    """
    return _UNCHANGED if settings == _chosen.get() else computing_with(settings)


def backend_for(q: Tensor, v: Tensor, method: str = "split", extra: str = "") -> Backend:
    """Return the chosen backend, or the first automatic one that serves q and v and has the
    ``extra``. ``method``: of the backward pass; "split" also for the forward.
    """
    return _backend_for(q.device, q.dtype, q.shape[-1], v.shape[-1], method, extra)


def _backend_for(
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    dv: int,
    method: str = "split",
    extra: str = "",
) -> Backend:
    if (chosen := _chosen.get()) is not None:
        return BACKENDS[chosen]
    able = (x for x in BACKENDS.values() if x.automatic and (not extra or extra in x.extras))
    return next((x for x in able if x.serves(device, dtype, d, dv, method)), TORCH)


def kernels_for(q: Tensor, v: Tensor, method: str = "split") -> ModuleType:
    """Return the attention kernels of `backend_for`."""
    return backend_for(q, v, method).module


def rows_for(x: Tensor) -> ModuleType:
    """Return the row operations for x (b, t, h, d)."""
    return backend_for(x, x).rows


def compiles(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> bool:
    """Return whether calls with such tensors need compiled kernels."""
    return _backend_for(device, dtype, d, dv).compiles


def check_inputs(q: Tensor) -> None:
    """Raise RuntimeError or ValueError if no kernel, or none of the chosen backend, supports q."""
    check_device(q)
    if (chosen := _chosen.get()) is not None:
        BACKENDS[chosen].check(q)


def check_device(x: Tensor) -> None:
    """Raise RuntimeError if nothing can run on the device of x."""
    if x.device.type == "meta":
        if not are_noted():
            raise RuntimeError(
                "canon.fast cannot compute with tensors on the meta device: use canon.reference"
            )
    elif (chosen := _chosen.get()) is not None:
        BACKENDS[chosen].check_device(x)
    elif x.device.type == "cpu" and is_requested_too_late():
        raise RuntimeError(
            "canon.fast was imported before TRITON_INTERPRET=1 was set, so it cannot run on CPU "
            "tensors: set the variable before the import, or use canon.reference"
        )
