"""Compute the gradients of attention from its out and lse, by the methods of
`canon.reference.backward`. Their memory:

    "split"           statistics: 8 b h t bytes
    "head_parallel"   also 4 b h s (d + dv) bytes; above 256 MB in chunks of keys
    "fused"           statistics, and 4 b h t d bytes unless dq is float32 itself

"fused" adds to dq by atomics, in any order. Under `torch.use_deterministic_algorithms(True)` the
Gluon kernel adds in a fixed order (paper/backward_on_hopper.md); the Triton kernel raises
RuntimeError, or warns with ``warn_only=True``.

"auto" is the fastest method, under that switch of those that repeat their bits. Each pass reads the
switch when it runs. The kernel backend chooses by counts of work tiles: `choose_method` of
`canon.fast.kernels.gluon.method` and `canon.fast.kernels.triton.launch`.

Source: FlashAttention-2 (Tri Dao, 2023), algorithm 2.
"""

from collections.abc import Hashable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon.faces import public_parts
from canon.fast.device import check_device, kernels_for, rows_for
from canon.fast.kernels.launcher import is_cpu, multiprocessor_count
from canon.fast.replay.recordings import replayed
from canon.fast.tables.cells import Cells
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.checks import Scale, accumulate_dtype

__all__ = ["attention_backward"]

# the most that "head_parallel" holds of dk and dv by query head at one time
PARTIAL_BYTES = 1 << 28


class Method(NamedTuple):
    """The ``option`` of a call, and what "auto" depends on besides tensors and mask. ``repeats``:
    equal calls must give equal bits. ``sends``: dk and dv travel while a kernel of dq runs.
    """

    option: str
    repeats: bool
    sends: bool = False


def method_now(option: str, sends: bool = False) -> Method:
    """Return the method under the current state of PyTorch's switch."""
    return Method(option, torch.are_deterministic_algorithms_enabled(), sends)


class QueryInputs(NamedTuple):
    """The inputs of a backward pass that belong to queries: dout (b, t, h, dv) and q (b, t, h, d);
    lse and delta (b, h, t), both over *all* keys.
    """

    dout: Tensor
    q: Tensor
    lse: Tensor
    delta: Tensor

    def heads(self, heads: slice) -> "QueryInputs":
        return QueryInputs(
            self.dout[:, :, heads], self.q[:, :, heads], self.lse[:, heads], self.delta[:, heads]
        )


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cells: Cells,
    scale: Scale,
    method: str,
    needs_grad: NeedsGrad,
    dtype: torch.dtype | None = None,
    kind: Hashable = None,
) -> Gradients:
    """Return dq, dk and dv as `attention_backward`, without checks, in one recorded pass. dk and dv
    come together. ``kind``: as in `replayed`, except for the gradients.
    """
    grads = empty_gradients(q, k, v, dtype or q.dtype, needs_grad)
    given = dout, q, k, v, out, lse, dlse, *grads
    replayed(_gradients_now, given, cells, scale, method, kind=kind)
    return grads


def _gradients_now(*given: Any) -> None:
    _gradients(*given[:-1], method_now(given[-1]))


def _gradients(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, cells: Cells, scale: Scale, method: Method
) -> None:
    kernels, chosen = _choose(q, k, v, cells.mask, method, dq, dk)
    if cells.places is not None:  # the kernels that several ranks launch
        delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        rows_for(q).delta(dout, out, lse, dlse, delta)
        statistics = kernels.row_statistics(lse, delta)
    else:
        statistics = kernels.make_row_statistics(dout, out, lse, dlse)
    arguments = q, k, v, dout, statistics, cells, scale
    _launch_dkdv(kernels, chosen, method, arguments, dq, dk, dv)
    if dq is not None and chosen != "fused":
        kernels.dq(*arguments, dq)


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, needs_grad: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Allocate dq, dk and dv, None where they are not needed. One kernel computes dk and dv."""
    empty = partial(torch.empty_like, dtype=dtype, memory_format=torch.contiguous_format)
    dq = empty(q) if needs_grad[0] else None
    return (dq, empty(k), empty(v)) if needs_grad[1] or needs_grad[2] else (dq, None, None)


def plan_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    method: str,
    sends: bool,
) -> None:
    """Look up the plans of `gradients`; "auto" those of both states of
    `torch.use_deterministic_algorithms`.
    """
    grads = empty_gradients(q, k, v, q.dtype, (True, True, True))
    now = method_now(method, sends)
    for repeats in (False, True) if method == "auto" else (now.repeats,):
        how = now._replace(repeats=repeats)
        _gradients(out, q, k, v, out, lse, None, *grads, Cells(mask), 1.0, how)


def backward_into(
    inputs: QueryInputs,
    k: Tensor,
    v: Tensor,
    cells: Cells,
    scale: Scale,
    method: str,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    """Write gradients of any strides and dtypes. dq, or dk and dv together, may be None."""
    dout, q, lse, delta = inputs
    statistics = kernels_for(q, v).empty_statistics(lse)
    given = q, k, v, dout, lse, delta, statistics
    options = cells, scale, method_now(method)
    replayed(_dkdv, (*given, dq, dk, dv), *options)
    if dq is not None and (method != "fused" or dk is None):
        replayed(_dq, (*given, dq, dk), *options)


def _dkdv(
    q, k, v, dout, lse, delta, statistics, dq, dk, dv, cells: Cells, scale: Scale, method: Method
) -> None:
    kernels, chosen = _choose(q, k, v, cells.mask, method, dq, dk)
    arguments = q, k, v, dout, kernels.row_statistics(lse, delta, statistics), cells, scale
    _launch_dkdv(kernels, chosen, method, arguments, dq, dk, dv)


def _dq(
    q, k, v, dout, lse, delta, statistics, dq, dk, cells: Cells, scale: Scale, method: Method
) -> None:
    kernels, chosen = _choose(q, k, v, cells.mask, method, dq, dk)
    if dq is None or chosen == "fused":
        return
    if statistics is None:  # else `_dkdv` has written them
        statistics = kernels.row_statistics(lse, delta)
    kernels.dq(q, k, v, dout, statistics, cells, scale, dq)


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    method: Method,
    dq: Tensor | None,
    dk: Tensor | None,
) -> tuple[ModuleType, str]:
    chosen = automatic(q, k, v, mask, method) if method.option == "auto" else method.option
    if chosen == "fused" and (dq is None or dk is None):
        chosen = "split"  # the fused kernel computes both
    return kernels_for(q, v, chosen), chosen


def _launch_dkdv(
    kernels: ModuleType, chosen: str, method: Method, arguments: tuple, dq, dk, dv
) -> None:
    if chosen == "fused":
        accumulate = accumulate_dtype(arguments[0].dtype)
        whole = dq.dtype == accumulate
        sums = dq if whole else torch.empty(dq.shape, dtype=accumulate, device=dq.device)
        kernels.dkdv(*arguments, dk, dv, sums.zero_(), method.repeats)
        if sums is not dq:
            rows_for(dq).sum_heads(sums, None, dq, None)  # one head a group: a cast
    elif dk is None:
        return
    elif chosen == "split" or arguments[0].shape[2] == arguments[1].shape[2]:
        kernels.dkdv(*arguments, dk, dv)
    else:
        _head_parallel(kernels, arguments, dk, dv)


def make_delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return rowsum(dout * out) - dlse, (b, h, t), and 0 in fully masked rows."""
    delta = torch.empty(lse.shape, dtype=accumulate_dtype(lse.dtype), device=lse.device)
    replayed(_delta, (dout, out, lse, dlse, delta))
    return delta


def _delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    rows_for(out).delta(dout, out, lse, dlse, delta)


def rank_invariant_method(method: str) -> str:
    """Return ``method``, for "auto" "split": a choice by mask or heads would change bits."""
    return "split" if method == "auto" else method


def automatic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    method: Method,
    multiprocessors: int | None = None,
) -> str:
    """Return the method for "auto". ``multiprocessors``: by default those of q's device."""
    if multiprocessors is None:
        is_gpu = q.device.type in ("cuda", "meta") and not is_cpu(q.device)
        multiprocessors = multiprocessor_count(q.device) if is_gpu else 1
    if multiprocessors == 1 or not q.shape[0]:
        return "split"
    return kernels_for(q, v).choose_method(q, k, v, mask, multiprocessors, *method[1:])


def _head_parallel(kernels: ModuleType, arguments: tuple, dk: Tensor, dv: Tensor) -> None:
    q, k, v, dout, softmax_stats, cells, scale = arguments
    accumulate, b = accumulate_dtype(q.dtype), q.shape[0]
    bytes_each_key = max(1, b) * q.shape[2] * (dk.shape[3] + dv.shape[3]) * accumulate.itemsize
    for keys, part in _key_chunks(cells, max(1, PARTIAL_BYTES // bytes_each_key)):
        chunk = slice(keys.start, keys.stop)
        parts = [
            q.new_empty(b, len(keys), q.shape[2], x.shape[3], dtype=accumulate) for x in (dk, dv)
        ]
        kernels.dkdv(q, k[:, chunk], v[:, chunk], dout, softmax_stats, part, scale, *parts)
        rows_for(q).sum_heads(*parts, dk[:, chunk], dv[:, chunk])
        del parts  # frees their memory before the next chunk allocates


def _key_chunks(cells: Cells, most: int) -> tuple[tuple[range, Cells], ...]:
    _, size = cells.sizes
    return ((range(size), cells),) if size <= most else _cut_keys(cells, most)


@cached_plan
def _cut_keys(cells: Cells, most: int) -> tuple[tuple[range, Cells], ...]:
    _, size = cells.sizes
    step = most if most < 128 and cells.places is None else max(128, most // 128 * 128)
    ranges = [range(start, min(start + step, size)) for start in range(0, size, step)]
    return tuple((keys, cells.crop_keys(keys)) for keys in ranges)


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor | None,
    mask: Mask,
    *,
    scale: Scale,
    method: str,
    grad_dtype: torch.dtype,
    needs_grad: NeedsGrad,
) -> Gradients:
    check_device(q)
    dout, cells = dout.to(q.dtype), Cells(mask)
    if delta is None:
        grads = gradients(
            dout, q, k, v, out, lse, dlse, cells, scale, method, needs_grad, grad_dtype
        )
    else:
        grads = empty_gradients(q, k, v, grad_dtype, needs_grad)
        backward_into(QueryInputs(dout, q, lse, delta), k, v, cells, scale, method, *grads)
    return tuple(x if wanted else None for x, wanted in zip(grads, needs_grad, strict=True))


NOTES = """
    dk and dv are both computed, if one of them is needed: one kernel writes them.

    Raises:
        ValueError: the widths need more shared memory than the device has.
        RuntimeError: the device is not one of the chosen backend; "fused" under
            `torch.use_deterministic_algorithms(True)` where it cannot repeat its bits.
    """
attention_backward = public_parts.attention_backward(_attention_backward, NOTES)
