"""Compute attention on one rank in one kernel. The queries x keys matrix of scores is never stored.

For each tile of queries, over the tiles of keys that it sees (the online softmax):

    s = scale * q k^T        m' = max(m, rowmax s)        p = exp(s - m')
    total = exp(m - m') total + rowsum p        out = exp(m - m') out + p v
    at the end: out / total, and lse = m + log total

A mask becomes a work table (`tiles.py`): tiles that are visible from end to end need no mask comparisons.
`device.py` selects the kernel backend. `merge` combines two whole results in one kernel. `backward.py` has the backward pass.
In `decode_attention` kernels write this rank's part into the buffer of the one message, and merge the others in place.

Cost: 2 b h area (d + dv) FLOPs, where area is the number of visible cells. Memory beyond inputs and outputs: the work table.
It takes about 1 KB per 1000 tokens, and 32 bytes for each pair of a tile and a band that overlap. A band is a rectangle of
cells, cut by two diagonals (`canon.masks.band`). There is no dropout, bias or soft-cap.

Source: Tri Dao, FlashAttention-2 (2023), algorithm 1.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from canon import reference
from canon.fast.backward import attention_backward, gradients, rank_invariant_method
from canon.fast.device import check_device, kernels_for
from canon.fast.differentiable import call_operator, differentiable, makes_passes
from canon.fast.kernels.placed_mask import PlacedMask, aligned, canonical, in_place
from canon.fast.kernels.triton import launch
from canon.fast.replay.recordings import replayed
from canon.fast.sinks import under_sink
from canon.fast.transport import transport_for
from canon.fast.twins import twin_of
from canon.masks import plan_cache
from canon.masks.mask import Mask
from canon.runtime.agreement import named_failures
from canon.runtime.checks import (
    accumulate_dtype,
    batched,
    check_mask,
    check_method,
    check_parts,
    check_sink,
    check_tensors,
    default_mask,
    default_scale,
    under_autocast,
)
from canon.runtime.decode_call import agreed_decode
from canon.runtime.group import Group
from canon.runtime.operators import is_traced
from canon.runtime.packing import attend_each
from canon.runtime.passes import Passes
from canon.runtime.rank_invariance import check_rank_invariant
from canon.runtime.sink_weights import weighted

__all__ = ["attention", "attention_backward", "attention_forward", "decode_attention", "merge"]


@twin_of(reference.attention)
@under_autocast("q", "k", "v")
def attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask] | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    backward: str = "auto",
    rank_invariant: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Limit scores, scale * q k, to 1e7 in magnitude (6e15 in float64), and values to 1e21.

    If the largest score of a query is beyond this range, its out and lse are NaN. They may also be NaN if one of its scores
    is below -2e9. A NaN or an infinity at one token reaches the tokens that see it, and others in the same tile, even of
    another document or, with a mask for each sequence, another sequence: `canon.fast.kernels.triton.launch` has the table.

    Raises:
        ValueError: the widths need more shared memory than the device has.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    if isinstance(mask, (tuple, list)):
        options = {"scale": scale, "sink": sink, "backward": backward, "rank_invariant": rank_invariant}
        return attend_each(attention, q, k, v, mask, **options, return_lse=return_lse)
    if is_traced():
        check_sink(q, sink)
        options = {"scale": scale, "backward": backward, "rank_invariant": rank_invariant}
        out, lse = call_operator("attention", q, k, v, mask, None, **options)
        return under_sink(out, lse, sink, return_lse)
    call = _checked_call(q, k, v, mask, scale, backward, rank_invariant)
    if sink is None:
        return differentiable(q, k, v, call.forward, call.backward, return_lse=return_lse)
    check_sink(q, sink)
    out, lse = differentiable(q, k, v, call.forward, call.backward, return_lse=True)
    return under_sink(out, lse, sink, return_lse)


@dataclass(eq=False)
class _LocalCall:
    """The arguments of `attention` after all checks, for one kind of q, k and v; both passes of a batch.

    One object serves all calls of its kind, so it can stand for the kind of their tensors.
    """

    mask: Mask  # a PlacedMask with rank_invariant
    scale: float
    method: str
    strides: tuple = ()  # of q, k, v, out and lse in the forward pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = forward_part(*self._aligned(q, k, v), self.mask, self.scale, q.dtype, kind=self)
        if not self.strides:
            self.strides = _strides(q, k, v, out, lse)
        return out, lse

    def backward(self, needs_grad, dout, dlse, q, k, v, out, lse) -> tuple[Tensor | None, ...]:
        kind = None
        given = (dout,) if dlse is None else (dout, dlse)
        # Hooks for saved tensors can move them.
        if _strides(q, k, v, out, lse) == self.strides and _are_aligned(q, k, v, out, lse, *given):
            kind = self, needs_grad, dout.dtype, _strides(*given)
        if dout.dtype is not q.dtype:
            dout = dout.to(q.dtype)
        if isinstance(self.mask, PlacedMask):
            dout, q, k, v = canonical(dout), *self._aligned(q, k, v)
        return gradients(dout, q, k, v, out, lse, dlse, self.mask, self.scale, self.method, needs_grad, kind=kind)

    def _aligned(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, for a placed mask as every number of ranks has them."""
        return tuple(map(aligned, tensors)) if isinstance(self.mask, PlacedMask) else tensors

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the host."""
        return self.mask.nbytes


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple([x.stride() for x in tensors])


def _are_aligned(*tensors: Tensor) -> bool:
    """Return whether all begin at multiples of 16 bytes."""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return not addresses & 15


def _kind_of_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, method: str, rank_invariant: bool
) -> tuple | None:
    """Return a key for calls that need the same checks and the same kernels, None for arguments of unusual types."""
    if not (mask is None or type(mask) is Mask) or not (scale is None or type(scale) is float or type(scale) is int):
        return None
    if type(method) is not str or type(rank_invariant) is not bool:
        return None
    try:
        return (
            _LocalCall, mask, scale, method, rank_invariant,
            type(q), q.shape, q.stride(), q.dtype, q.device, q.data_ptr() & 15,
            type(k), k.shape, k.stride(), k.dtype, k.device, k.data_ptr() & 15,
            type(v), v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without strides or memory (torch.func)
        return None


def _checked_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, method: str, rank_invariant: bool
) -> _LocalCall:
    """Check the arguments of `attention`; those of a kind that was checked before are looked up."""
    key = _kind_of_call(q, k, v, mask, scale, method, rank_invariant)
    if key is not None and (found := plan_cache.PLANS.get(key)) is not None:
        return found
    check_tensors(q, k, v)
    check_method("backward", method)
    check_rank_invariant("attention", rank_invariant, backward=method)
    mask, scale = default_mask(q, k, mask), default_scale(q, scale)
    if rank_invariant:
        call = _LocalCall(in_place(mask), scale, rank_invariant_method(q, k, v, mask, method))
    else:
        call = _LocalCall(mask, scale, method)
    return call if key is None else plan_cache.PLANS.put(key, call)


@makes_passes("attention")
def _passes(
    _: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, __: None, *, scale, backward, rank_invariant
) -> Passes:
    call = _checked_call(q, k, v, mask, scale, backward, rank_invariant)
    return Passes(call.forward, call.backward)


@twin_of(reference.attention_forward)
@under_autocast("q", "k", "v")
def attention_forward(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask],
    *,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    if isinstance(mask, (tuple, list)):
        return attend_each(attention_forward, q, k, v, mask, scale=scale, out_dtype=out_dtype)
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    packed, (q, k, v) = q.ndim == 3, batched(q, k, v)
    out, lse = forward_part(q, k, v, mask, default_scale(q, scale), out_dtype or q.dtype)
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def forward_part(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dtype: torch.dtype, kind: Hashable = None
) -> tuple[Tensor, Tensor]:
    """Return out in ``dtype`` and lse as `attention_forward` does, for a batch and without checks of the arguments.

    ``kind``: as in `replayed`.
    """
    out, lse = empty_result(q, v, dtype)
    forward_into(q, k, v, mask, scale, out, lse, kind)
    return out, lse


def empty_result(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate out (b, t, h, dv) in ``dtype`` and lse (b, h, t) in the accumulation dtype."""
    b, t, h, _ = q.shape
    out = torch.empty(b, t, h, v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.empty(b, h, t, dtype=accumulate_dtype(q.dtype), device=q.device)


def forward_into(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out: Tensor, lse: Tensor, kind: Hashable = None
) -> None:
    """Write a batch's results into ``out``, of any strides and dtype, and ``lse``. Raise RuntimeError for unusable devices.

    ``kind``: as in `replayed`.
    """
    replayed(_forward, (q, k, v, out, lse), mask, scale, kind=kind)


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float) -> None:
    check_device(q)
    kernels_for(q, v).forward(q, k, v, mask, scale, out, lse)


@twin_of(reference.merge)
@under_autocast()
def merge(
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    other_out: Float[Tensor, "*b t h dv"],
    other_lse: Float[Tensor, "*b h t"],
) -> tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    check_parts(out, lse, other_out, other_lse)
    check_device(out)
    new_out, new_lse = torch.empty_like(out), torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    tensors = (out, lse, other_out, other_lse, new_out, new_lse)
    launch.merge(*(x.unsqueeze(0) if out.ndim == 3 else x for x in tensors))
    return new_out, new_lse


@twin_of(reference.decode_attention)
@torch.compiler.disable  # torch.compile breaks its graph here and does not trace plans
@under_autocast("q", "k", "v")
def decode_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    mask: Mask | Sequence[Mask] | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    group, rank, ranks, mask, scale = agreed_decode(q, k, v, mask, scale, sink, group)
    packed, (q, k, v) = q.ndim == 3, batched(q, k, v)
    buffer, parts = _empty_parts(q, v, ranks)
    if isinstance(mask, (tuple, list)):
        result = attention_forward(q, k, v, mask, scale=scale, out_dtype=buffer.dtype)
        for target, source in zip(parts[rank], result, strict=True):
            target.copy_(source)
    else:
        forward_into(q, k, v, mask, scale, *parts[rank])
    (out, lse), *others = parts
    if others and out.numel():
        with named_failures("decode_attention", group, ranks):
            transport_for(group, q.device).all_gather(buffer).wait()
        for other in others:
            merge_into(out, lse, *other)
    with torch.no_grad():
        out = (out if sink is None else weighted(out, lse, sink)).to(q.dtype)
    out, lse = (x.squeeze(0) if packed else x for x in (out, lse))
    return (out, lse) if return_lse else out


def _empty_parts(q: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Allocate out (b, t, h, dv) and lse (b, h, t) of each rank in one flat buffer, the message. Return it and its views."""
    (b, t, h, _), dv = q.shape, v.shape[-1]
    of_out, of_lse = b * t * h * dv, b * h * t
    size = -(-(of_out + of_lse) // 64) * 64  # each part starts at a multiple of 256 bytes, for wide stores
    buffer = torch.empty(ranks * size, dtype=accumulate_dtype(q.dtype), device=q.device)
    rows = buffer.view(ranks, size)
    return buffer, [(x[:of_out].view(b, t, h, dv), x[of_out : of_out + of_lse].view(b, h, t)) for x in rows]


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, rows: Tensor | None = None) -> None:
    """Merge another part into ``out`` and ``lse`` in place, for batches and without checks.

    ``rows``: indices (int64, no duplicates) of the tokens that the other part has; None is all of them.
    """
    replayed(_merge_in_place, (out, lse, other_out, other_lse, rows))


def _merge_in_place(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, rows: Tensor | None) -> None:
    launch.merge(out, lse, other_out, other_lse, out, lse, rows)
