"""Compute attention on one rank in one kernel, by the online softmax of `canon.reference.local`.

A mask becomes a work table (`tables/work_tables.py`): tiles that are visible from end to end need
no mask comparisons. Few queries over many keys are computed in parts of the keys
(`tables/key_parts.py`).

Source: Tri Dao, FlashAttention-2 (2023), algorithm 1.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from canon.faces import public_attention, public_parts
from canon.fast.backward import attention_backward, gradients, rank_invariant_method
from canon.fast.device import backend_for, check_device, kernels_for, rows_for
from canon.fast.half import FAST, Part
from canon.fast.replay.recordings import replayed
from canon.fast.tables.cells import Cells, aligned, canonical, in_place
from canon.fast.tables.key_parts import has_parts
from canon.masks.mask import Mask
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.checks import Scale, accumulate_dtype

__all__ = ["attention", "attention_backward", "attention_forward", "merge"]


class LocalPlan:
    """The cells and the backward method of one kind of call, and its forward pass's strides."""

    def __init__(self, call: Call):
        self.cells, self.method, self.strides = Cells(call.mask), call.backward, ()
        if call.options["rank_invariant"]:
            self.cells = Cells(call.mask, in_place(call.mask))
            self.method = rank_invariant_method(call.backward)

    def aligned(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, with places as every number of ranks has them."""
        return tensors if self.cells.places is None else tuple(map(aligned, tensors))


def local_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    plan = call.plan
    out, lse = empty_result(q, v, q.dtype)
    q, k, v = plan.aligned(q, k, v)
    whole = plan.cells.places is None
    forward_into(
        q, k, v, plan.cells, call.scale, out, lse, whole=whole, kind=call, max_logits=max_logits
    )
    if not plan.strides:
        plan.strides = _strides(q, k, v, out, lse)
    return out, lse


def local_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> Gradients:  # fmt: skip
    plan, kind = call.plan, None
    # Hooks for saved tensors can give them other strides.
    if _strides(q, k, v, out, lse) == plan.strides:
        kind = call, needs_grad, dout.dtype, dout.stride(), None if dlse is None else dlse.stride()
    if dout.dtype is not q.dtype:
        dout = dout.to(q.dtype)
    if plan.cells.places is not None:
        dout, q, k, v = canonical(dout), *plan.aligned(q, k, v)
    return gradients(
        dout, q, k, v, out, lse, dlse, plan.cells, call.scale, plan.method, needs_grad, kind=kind
    )


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple([x.stride() for x in tensors])


def forward_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: Scale, out_dtype: torch.dtype,
    max_logits: Tensor | None = None, whole: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out in ``out_dtype`` and lse as `attention_forward`, without checks."""
    out, lse = empty_result(q, v, out_dtype)
    forward_into(q, k, v, Cells(mask), scale, out, lse, max_logits=max_logits, whole=whole)
    return out, lse


def empty_result(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate out (b, t, h, dv) in ``dtype`` and lse (b, h, t) in the accumulation dtype."""
    b, t, h, _ = q.shape
    out = torch.empty(b, t, h, v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.empty(b, h, t, dtype=accumulate_dtype(q.dtype), device=q.device)


def forward_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Cells,
    scale: Scale,
    out: Tensor,
    lse: Tensor,
    *,
    whole: bool = False,
    kind: Hashable = None,
    max_logits: Tensor | None = None,
) -> None:
    """Write a batch's results into ``out``, of any strides and dtype, and ``lse``.

    ``max_logits`` (h,) is raised to the largest scores. ``whole``: as in `forward_for`. ``kind``:
    as in `replayed`.
    """
    replayed(launch_forward, (q, k, v, out, lse, max_logits), cells, scale, whole, kind=kind)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
    cells: Cells,
    scale: Scale,
    whole: bool = False,
) -> None:
    """Launch what `forward_into` replays, inside another recorded pass."""
    check_device(q)
    forward = forward_for(q, v, cells.mask, whole, max_logits is not None)
    forward(q, k, v, cells, scale, out, lse, *(() if max_logits is None else (max_logits,)))


def forward_for(
    q: Tensor, v: Tensor, mask: Mask, whole: bool = True, with_max_logits: bool = False
) -> Callable[..., None]:
    """Return the launch function. In ``whole`` calls, few queries over many keys are computed in
    parts. Raises ValueError if the chosen backend does not take ``max_logits``.
    """
    if whole and has_parts(mask) and "parts" in (found := backend_for(q, v, extra="parts")).extras:
        return found.forward_in_parts
    if not with_max_logits:
        return kernels_for(q, v).forward
    found = backend_for(q, v, extra="max_logits")
    if "max_logits" not in found.extras:
        raise ValueError(
            f'the {found.name} kernels do not support return_max_logits=True: use backend("triton")'
        )
    return found.module.forward


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    check_device(out)
    new_out = torch.empty_like(out)
    new_lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    tensors = (out, lse, other_out, other_lse, new_out, new_lse)
    rows_for(out).merge(*(x.unsqueeze(0) if out.ndim == 3 else x for x in tensors))
    return new_out, new_lse


def merge_into(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    rows: Tensor | None = None,
    result: Tensor | None = None,
) -> None:
    """Merge another part into ``out`` and ``lse``. ``rows``: indices (int64, distinct) of its
    tokens; None is all. ``result``: out is written there, in any dtype.
    """
    replayed(launch_merge, (out, lse, other_out, other_lse, rows, result))


def launch_merge(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    rows: Tensor | None = None,
    result: Tensor | None = None,
) -> None:
    """Launch what `merge_into` replays, inside another recorded pass."""
    rows_for(out).merge(
        out, lse, other_out, other_lse, out if result is None else result, lse, rows
    )


NOTES = """
    1 to 128 queries over at least 4,096 keys are summed in parts of the keys
    (`canon.fast.tables.key_parts`). The option ``rank_invariant`` and a forced backend other than
    "triton" exclude parts.

    With ``return_max_logits`` the forward pass runs on the Triton or PyTorch kernels; "gluon" and
    "cuda", if chosen, raise ValueError.

    Limit scores, scale * q k, to 1e7 in magnitude (6e15 in float64), and values to 1e21. In float16
    also limit P (dout v^T - delta), the gradient of the scores, to 65504: beyond, dq of the query
    and dk of the key are infinite or NaN.

    If the largest score of a query is beyond this range, its out and lse are NaN. They may also be
    NaN if one of its scores is below -2e9. A NaN or an infinity at one token reaches the tokens
    that see it, and others in the same tile, even of another document or, with a mask for each
    sequence, another sequence: paper/in_your_program.md#where-a-nan-goes has the table.

    Raises:
        ValueError: the widths need more shared memory than the device has.
        RuntimeError: the device is not one of the chosen backend.
    """
VARIANTS = (
    "whole_forward",
    "whole_backward",
    "masked_rows",
    "few_queries",
    "few_queries_in_order",
    "sinks",
)


LOCAL = Algorithm(
    FAST,
    public_attention.ATTENTION,
    local_forward,
    local_backward,
    plan=LocalPlan,
    parts=lambda call, backward: iter([Part(call.mask, call.shapes[1][2], whole=True)]),
    variants=VARIANTS,
    notes=NOTES,
)
attention = public_attention.attention(LOCAL)
attention_forward = public_parts.attention_forward(
    lambda q, k, v, mask, **options: forward_part(q, k, v, mask, whole=True, **options)
)
merge = public_parts.merge(merged)
