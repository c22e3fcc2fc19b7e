"""The backward pass of attention, from what the forward leaves (out and lse), in two kernels or one.

    method           kernels                                           products a tile    memory
    "split"          dk and dv over tiles of keys, the query heads     4 + 3              delta: 4 b h t bytes
                     of a group in turn; dq over tiles of queries
    "head_parallel"  dk and dv of each *query* head, then summed       4 + 3              also 4 b h s (d + dv) bytes; above
                     over the group, in head order; dq as before                          256 MB, chunk by chunk of keys
    "fused"          one over tiles of keys, which adds to dq by       5                  delta, and 4 b h t d bytes
                     atomics in any order: not the same bits twice                        unless dq is float32 itself

The Hopper kernels can also add to dq *in order*: a tile of keys waits until the one before it has added. That repeats its
bits; under `torch.use_deterministic_algorithms(True)` "fused" does so, and is a RuntimeError (or a warning) where it cannot.

dq comes last, so that ranks can send gradients of keys under its kernel (`begin_backward`).

"auto" repeats its bits always. It is "head_parallel" where "split" would leave processors idle: where heads share keys, and
the busiest processor would have a quarter more to do than it has with an owner for every query head. With the Hopper kernels
it is "fused", in order, where sequences are long: order costs less than two products there. Else it is "split". Rules from
counts, measured on twelve shapes 128 wide (paper/data/kernels_auto_h200.json), on sequences of 512 to 131072 tokens 64 to 256
wide (kernels_sweep_widths_h200.json), on packed documents (paper/deterministic_dq.md) and on shards (pairs_h200.json).

delta = rowsum(dout * out) - dlse is made by a kernel of its own, or given: once per call, whatever the number of steps.

Sources: FlashAttention-2 (Tri Dao, 2023), algorithm 2; split: jax-ml/jax-triton pull request 177; head-parallel:
TensorAuto/OpenTau pull request 376.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from canon.fast.device import check_device, kernels_for
from canon.fast.kernels.gluon.config import choose, padded_to
from canon.fast.kernels.gluon.tile_scheduler import followers_wait_little, unevenness
from canon.fast.kernels.launcher import processors as processors_of
from canon.fast.kernels.triton import launch as portable
from canon.reference.checks import (
    accumulate_dtype,
    batched,
    check_gradients,
    check_mask,
    check_method,
    check_tensors,
    default_scale,
    under_autocast,
)
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan

__all__ = ["attention_backward"]

TILE = 128, 64  # keys x queries, by which work is counted
PARTIAL_BYTES = 1 << 28  # of the parts of dk and dv by query head, at a time


@under_autocast("dout", "q", "k", "v", "out")
def attention_backward(
    dout: Float[Tensor, "*b t h dv"],
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b s g d"],
    v: Float[Tensor, "*b s g dv"],
    out: Float[Tensor, "*b t h dv"],
    lse: Float[Tensor, "*b h t"],
    mask: Mask,
    *,
    scale: float | None = None,
    dlse: Float[Tensor, "*b h t"] | None = None,
    delta: Float[Tensor, "*b h t"] | None = None,
    method: str = "split",
    grad_dtype: torch.dtype | None = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Float[Tensor, "*b t h d"] | None, Float[Tensor, "*b s g d"] | None, Float[Tensor, "*b s g dv"] | None]:
    """Return dq, dk and dv of these queries and keys, where ``out`` and ``lse`` are of *all* keys, held here or elsewhere.

    The parts of the gradient that the ranks of a ring compute add up: lse already normalises over all of them.
    Not differentiable by itself.

    Args:
        dout, dlse: gradients of out (b, t, h, dv) and of lse (b, h, t); None: zero.
        delta: rowsum(dout * out) - dlse, (b, h, t), if it is known already; then dlse must be None.
        method: "split", "fused", "head_parallel", or "auto": see the module's docstring.
        grad_dtype: of the results, that of the inputs by default; float32 comes straight from the accumulators.
        needs_grad: which of q, k and v need a gradient. The others' are None and cost nothing; dk and dv share their cost.

    Raises:
        ValueError: shapes, dtypes or the mask do not fit together, dlse and delta both given, unknown method, or
            widths beyond what the device has shared memory for.
        RuntimeError: CPU tensors without Triton's interpreter; "fused" under `torch.use_deterministic_algorithms(True)`
            where it cannot repeat its bits.

    Source: Dao, FlashAttention-2 (2023), algorithm 2; the methods: see the module's docstring.
    """
    check_tensors(q, k, v)
    check_mask(q, k, mask)
    check_gradients(dout, q, v, out, lse, dlse, delta)
    check_method("method", method)
    check_device(q)
    packed, scale, grad_dtype = q.ndim == 3, default_scale(q, scale), grad_dtype or q.dtype
    q, k, v, dout, out = batched(q, k, v, dout.to(q.dtype), out)
    lse = lse.unsqueeze(0) if packed else lse
    dlse, delta = (x.unsqueeze(0) if packed and x is not None else x for x in (dlse, delta))
    needed = needs_grad[0], any(needs_grad[1:]), any(needs_grad[1:])  # one kernel makes dk and dv
    new = lambda x: torch.empty(x.shape, dtype=grad_dtype, device=x.device)
    grads = [new(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True)]
    kernels, chosen, ordered = _choose(q, k, v, mask, method, *grads[:2])
    if delta is None:
        statistics = kernels.make_row_statistics(dout, out, lse, dlse)
    else:
        statistics = kernels.row_statistics(lse, delta)
    _begin(kernels, chosen, ordered, (q, k, v, dout, statistics, mask, scale), *grads)()
    grads = [x if wanted else None for x, wanted in zip(grads, needs_grad, strict=True)]
    return tuple(x.squeeze(0) if packed and x is not None else x for x in grads)


def begin_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: Mask, scale: float, method: str,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
) -> Callable[[], None]:  # fmt: skip
    """Write dk and dv of a batch, and return a function that writes dq, so that messages can leave before it.

    ``dq``, ``dk`` and ``dv`` have any strides and dtypes. No kernel runs for dq, or for dk and dv, if they are None.
    """
    kernels, chosen, ordered = _choose(q, k, v, mask, method, dq, dk)
    arguments = q, k, v, dout, kernels.row_statistics(lse, delta), mask, scale
    return _begin(kernels, chosen, ordered, arguments, dq, dk, dv)


def _choose(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, method: str, dq: Tensor | None, dk: Tensor | None
) -> tuple[ModuleType, str, bool]:
    """Return the kernel backend, the method, and whether the fused method must repeat its bits."""
    chosen = automatic(q, k, v, mask) if method == "auto" else method
    if chosen == "fused" and (dq is None or dk is None):
        chosen = "split"  # the fused kernel computes both
    ordered = method == "auto" or torch.are_deterministic_algorithms_enabled()
    return kernels_for(q, v, chosen), chosen, ordered


def _begin(
    kernels: ModuleType, chosen: str, ordered: bool, arguments: tuple,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
) -> Callable[[], None]:  # fmt: skip
    """Launch the kernels for dk and dv, and return a function that launches the kernel for dq."""
    q, k = arguments[:2]
    if chosen == "fused":
        _fused(kernels, arguments, dq, dk, dv, ordered)
        return lambda: None
    if dk is None:
        pass
    elif chosen == "split" or q.shape[2] == k.shape[2]:
        kernels.dkdv(*arguments, dk, dv)
    else:
        _head_parallel(kernels, arguments, dk, dv)
    return (lambda: None) if dq is None else lambda: kernels.dq(*arguments, dq)


def make_delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, (b, h, t), and 0 in rows that see no key, whatever dout holds there."""
    delta = torch.empty(lse.shape, dtype=accumulate_dtype(lse.dtype), device=lse.device)
    portable.delta(dout, out, lse, dlse, delta)
    return delta


def automatic(q: Tensor, k: Tensor, v: Tensor, mask: Mask, processors: int | None = None) -> str:
    """The method that "auto" stands for: see the module's docstring. ``processors``: those of q's device."""
    (b, _, h, d), g, dv = q.shape, k.shape[2], v.shape[3]
    if processors is None:
        processors = 1 if q.device.type == "cpu" else processors_of(q.device)
    if processors == 1 or not b:
        return "split"
    if h > g:
        split = unevenness(mask, *TILE, b * g, h // g, processors)
        if split > 1.25 * unevenness(mask, *TILE, b * h, 1, processors):
            return "head_parallel"
    if not padded_to("fused", d, dv) or kernels_for(q, v, "fused") is portable:  # Triton's kernel adds in any order
        return "split"
    config, *pads = choose("fused", d, dv)
    little = followers_wait_little(mask, b * h, b * g, processors, max(pads), config.rows, config.columns)
    return "fused" if little else "split"


def _head_parallel(kernels, arguments: tuple, dk: Tensor, dv: Tensor) -> None:
    q, k, v, dout, lines, mask, scale = arguments
    accumulate, b = accumulate_dtype(q.dtype), q.shape[0]
    each_key = max(1, b) * q.shape[2] * (dk.shape[3] + dv.shape[3]) * accumulate.itemsize
    for keys, part in _key_chunks(mask, max(1, PARTIAL_BYTES // each_key)):
        here = slice(keys.start, keys.stop)
        parts = [q.new_empty(b, len(keys), q.shape[2], x.shape[3], dtype=accumulate) for x in (dk, dv)]
        kernels.dkdv(q, k[:, here], v[:, here], dout, lines, part, scale, *parts)
        kernels.sum_heads(*parts, dk[:, here], dv[:, here])
        del parts  # before the next ones are made


@cached_plan
def _key_chunks(mask: Mask, most: int) -> tuple[tuple[range, Mask], ...]:
    """The keys in ranges of at most ``most``, whole tiles where that is possible, and the mask of each."""
    if mask.keys <= most:
        return ((range(mask.keys), mask),)
    step = most if most < 128 else most // 128 * 128
    ranges = [range(start, min(start + step, mask.keys)) for start in range(0, mask.keys, step)]
    return tuple((keys, mask.crop(keys=keys)) for keys in ranges)


def _fused(kernels, arguments: tuple, dq: Tensor, dk: Tensor, dv: Tensor, ordered: bool) -> None:
    accumulate = accumulate_dtype(arguments[0].dtype)
    sums = dq if dq.dtype == accumulate else torch.empty(dq.shape, dtype=accumulate, device=dq.device)
    kernels.dkdv(*arguments, dk, dv, sums.zero_(), ordered)
    if sums is not dq:
        dq.copy_(sums)
