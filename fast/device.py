"""Select the kernel backend of a call: the caller's choice (`backend`), or the fastest one that supports the inputs.

    "gluon"     Hopper (sm_90): bfloat16 and float16, heads up to 256 wide; "fused" up to 128
    "triton"    portable: any GPU that Triton supports, any dtype, heads up to 512 wide; return_max_logits=True
    "cuda"      sm_80 and later: bfloat16 and float16, heads of 16 to 256 in multiples of 16; no "fused", no soft-cap.
                Needs the extra cuda

Without `backend`, "gluon" is used where it supports the inputs, and "triton" elsewhere, and for few queries over many keys
without rank_invariant (`canon.fast.kernels.key_parts`). A chosen backend that does not support the inputs raises: it is never
replaced.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from canon.fast.kernels.gluon import config
from canon.fast.kernels.interpreter import is_requested
from canon.fast.kernels.launcher import capability, is_cpu, refuse_replay
from canon.fast.kernels.triton import launch
from canon.masks.plan_cache import are_noted

__all__ = ["backend"]

AVAILABLE = ("triton", "gluon", "cuda")

_chosen: ContextVar[str | None] = ContextVar("canon_backend", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use this kernel backend inside the block: "triton", "gluon" or "cuda".

    A backward pass uses the backend of its call. A function that `torch.utils.checkpoint` recomputes must contain the block:
    if the block has ended before a call is recomputed, the call raises RuntimeError. Without `backend`, calls use "gluon" on
    Hopper where its kernels support the dtype and width, and "triton" elsewhere. A dtype, width or device that the backend
    does not support raises ValueError when a call needs it. A compiled function keeps the backend of its compilation, so
    `backend` surrounds its calls. A call with another choice raises RuntimeError.
    Raises ValueError for an unknown name. The first kernel of "cuda" raises ModuleNotFoundError without the extra cuda.
    """
    if name not in AVAILABLE:
        raise ValueError(f"backend({name!r}): expected one of {', '.join(map(repr, AVAILABLE))}")
    _used[0] = True
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


_used = [False]  # whether `backend` was ever used; until then nothing is counted
_first_runs: Counter[tuple[int, bool]] = Counter()  # calls that a checkpoint may recompute, by key and by chosen or not


def settings_of(key: Hashable) -> str | None:
    """Return the chosen backend, for the key of a call. Raise RuntimeError if its recomputation would use another one.

    ``key`` is None for a call without a key.
    """
    chosen = _chosen.get()
    if _used[0] and key is not None:
        _count(hash(key), chosen is not None)
    return chosen


def _count(key: int, is_chosen: bool) -> None:
    """Count a first run, or match a recomputation with one.

    A checkpoint recomputes in a backward pass. It runs a call first without gradients (use_reentrant=True), or with hooks that
    save tensors (use_reentrant=False).
    """
    if torch._C._current_graph_task_id() == -1:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
        if hooks is not None or not torch.is_grad_enabled():
            _first_runs[key, is_chosen] += 1
    elif _first_runs[key, is_chosen]:
        _first_runs[key, is_chosen] -= 1
    elif not is_chosen and _first_runs[key, True]:
        raise RuntimeError(
            "a checkpoint recomputes a call after its `with backend(...)` has ended: put `with backend(...)` inside the "
            "function that is checkpointed"
        )


def restored(settings: str | None) -> AbstractContextManager:
    """Return a context with the backend of a call, for its later passes: their thread may have another choice."""
    return nullcontext() if settings == _chosen.get() else computing_with(settings)


def kernels_for(q: Tensor, v: Tensor, method: str = "split") -> ModuleType:
    """Return the launch module of the backend for q and v. ``method``: of the backward pass; "split" also for the forward.

    A pass is replayed only if the module has a true ``REPLAYABLE``: then all its kernels are launched by
    `canon.fast.kernels.launcher` or `canon.fast.kernels.cuda`, which record them.
    """
    kernels = _chosen_kernels(q, v, method)
    if not getattr(kernels, "REPLAYABLE", False):
        refuse_replay(f"the kernel backend {kernels.__name__} is not replayable")
    return kernels


def _chosen_kernels(q: Tensor, v: Tensor, method: str) -> ModuleType:
    chosen = _chosen.get()
    if chosen == "gluon" or (chosen is None and _gluon_supports(q, v, method)):
        from canon.fast.kernels.gluon import launch as hopper  # imported only here: other GPUs do not need it

        return hopper
    if chosen == "cuda":
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


def check_inputs(q: Tensor) -> None:
    """Raise RuntimeError or ValueError if no kernel, or no kernel of the chosen backend, supports q."""
    check_device(q)
    if (chosen := _chosen.get()) in ("gluon", "cuda"):
        kernels = kernels_for(q, q)
        kernels.check(q)
        if chosen == "gluon":
            kernels.check_runs(q)


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
