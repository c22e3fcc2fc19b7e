"""What both halves ask before they compute: do the arguments fit, and do all ranks mean the same call?

Ranks that disagree on a mask or a head count would wait for each other for ever, or compute nonsense without a word.
So the first call with a plan gathers one digest per field from every rank; where they differ, every rank raises and
names the field and the ranks. What has been compared is remembered per group and never forgotten: a memory that could
be evicted on one rank and not on another would bring the waiting back. Later calls compare nothing.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.layout import Layout
from canon.reference.mask import Mask

METHODS = ("auto", "fused", "split", "head_parallel")

_compared: WeakKeyDictionary[Any, set[tuple]] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


@dataclass(frozen=True)
class Call:
    """One call of a distributed function, with every default filled in; equal on all ranks but for ``rank``."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    mask: Mask
    layout: Layout
    scale: float
    reduce_dtype: torch.dtype
    backward: str

    def local_mask(self, owner: int) -> Mask:
        """What this rank's queries see of the keys of ``owner``, in local coordinates."""
        return self.layout.local_mask(self.mask, self.rank, owner)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results and of lse: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors (t, h, d) as a batch of one; others as they are."""
    return tuple(x.unsqueeze(0) if x.ndim == 3 else x for x in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q (b, t, h, d), k (b, s, g, d), v (b, s, g, dv), or all packed, belong together."""
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        wrong = "expected q, k, v all (b, t, heads, width) or all packed (t, heads, width)"
    elif q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1]:
        wrong = "q, k, v must share the batch, and k, v their tokens and heads"
    elif q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], v.shape[-1]):
        wrong = "q and k must have one width, and no width may be 0"
    elif 0 in (q.shape[-2], k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    elif not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    elif not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    else:
        return
    raise ValueError(f"{wrong}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")


def check_mask(q: Tensor, k: Tensor, mask: Mask) -> None:
    """Raise ValueError unless the mask is one of q's tokens x k's tokens."""
    if (mask.queries, mask.keys) != (q.shape[-3], k.shape[-3]):
        raise ValueError(
            f"the mask is {mask.queries} queries x {mask.keys} keys, q holds {q.shape[-3]} tokens and k {k.shape[-3]}"
        )


def check_gradients(
    dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor | None
) -> None:
    """Raise ValueError unless what `attention_backward` is given besides q, k, v fits them."""
    rows = (*q.shape[:-1], v.shape[-1])
    columns = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, x, shape in (
        ("dout", dout, rows),
        ("out", out, rows),
        ("lse", lse, columns),
        ("dlse", dlse, columns),
        ("delta", delta, columns),
    ):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
    if dlse is not None and delta is not None:
        raise ValueError("give dlse or delta, not both: delta = rowsum(dout * out) - dlse holds dlse already")


def check_method(name: str, method: str) -> None:
    """Raise ValueError unless ``method`` is one of the backward methods."""
    if method not in METHODS:
        raise ValueError(f"{name}={method!r}: expected one of {', '.join(map(repr, METHODS))}")


def default_mask(q: Tensor, k: Tensor, mask: Mask | None) -> Mask:
    """``mask``, or causal attention; ValueError if it does not fit q and k."""
    if mask is None:
        if q.shape[-3] != k.shape[-3]:
            raise ValueError(f"mask=None is causal and needs as many queries as keys, got {q.shape[-3]}, {k.shape[-3]}")
        return Mask.causal(q.shape[-3])
    check_mask(q, k, mask)
    return mask


def default_scale(q: Tensor, scale: float | None) -> float:
    """``scale``, or one over the square root of the width."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def agreed_call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    *,
    scale: float | None,
    group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype | None,
    backward: str,
    **options: Any,
) -> Call:
    """The call with its defaults filled in, after all ranks have agreed on it. A collective, the first time.

    Args: ``layout``, a layout, or what makes one of (tokens, ranks), contiguous by default; ``options``, whatever else
        all ranks must agree on.
    Raises ValueError on every rank if the arguments of one rank do not fit, or differ from the others'.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    try:
        call, problem = _filled(rank, ranks, group, q, k, v, mask, layout, scale, reduce_dtype, backward), ""
    except ValueError as error:
        call, problem = None, str(error)
    if ranks > 1:
        fields = {
            "function": function,
            "arguments": problem,
            "mask": mask if call is None else call.mask,
            "layout": layout if call is None else call.layout,
            "dtype": q.dtype,
            "batch, heads and width of q": (*q.shape[:-3], *q.shape[-2:]),
            "batch, heads and width of k": (*k.shape[:-3], *k.shape[-2:]),
            "batch, heads and width of v": (*v.shape[:-3], *v.shape[-2:]),
            "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
            "scale": scale if call is None else call.scale,
            "reduce_dtype": reduce_dtype if call is None else call.reduce_dtype,
            "backward": backward,
            "options": options,
        }
        _compare(dist.group.WORLD if group is None else group, rank, ranks, fields, q.device)
    if call is None:
        raise ValueError(problem)
    return call


def _filled(rank, ranks, group, q, k, v, mask, layout, scale, reduce_dtype, backward) -> Call:
    check_tensors(q, k, v)
    check_method("backward", backward)
    if q.shape[-3] != k.shape[-3]:
        raise ValueError(f"a rank holds the queries and keys of the same tokens, got {q.shape[-3]} and {k.shape[-3]}")
    given = mask.queries if mask is not None else layout.tokens if isinstance(layout, Layout) else ranks * q.shape[-3]
    layout = layout if isinstance(layout, Layout) else _made(layout or Layout.contiguous, given, ranks)
    mask = _made(Mask.causal, given) if mask is None else mask
    if (mask.queries, mask.keys) != (layout.tokens, layout.tokens):
        raise ValueError(f"the mask is {mask.queries} x {mask.keys}, the layout has {layout.tokens} tokens")
    if layout.ranks != ranks:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {ranks}")
    if q.shape[-3] != layout.size(rank):
        raise ValueError(f"the layout gives rank {rank} {layout.size(rank)} tokens, q holds {q.shape[-3]}")
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ValueError(f"reduce_dtype must be a floating dtype, got {reduce_dtype}")
    travels = accumulate_dtype(q.dtype) if reduce_dtype is None else reduce_dtype
    return Call(rank, ranks, group, mask, layout, default_scale(q, scale), travels, backward)


@lru_cache(maxsize=256)
def _made(make: Callable[..., Any], *sizes: int) -> Any:
    """A default mask or layout: made once, whatever the number of layers that ask for it."""
    return make(*sizes)


def _compare(group: Any, rank: int, ranks: int, fields: dict[str, Any], device: torch.device) -> None:
    """Raise ValueError on every rank, naming the fields and the ranks, unless all ranks hold the same fields."""
    texts = [getattr(value, "digest", None) or repr(value) for value in fields.values()]
    key = tuple(texts)
    with _lock:
        compared = _compared.setdefault(group, set())
    if key in compared:
        return
    digests = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") for text in texts]
    mine = torch.tensor(digests, device=device)
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group=group)
    table = torch.stack(everyone)
    equal = (table == table[0]).all(0).tolist()  # of the whole table: every rank must come to the same verdict
    if not all(equal):
        raise ValueError(_disagreement(group, ranks, fields, equal))
    compared.add(key)


def _disagreement(group: Any, ranks: int, fields: dict[str, Any], equal: list[bool]) -> str:
    """Every rank sees the same table of digests, so all of them come here and exchange what they hold."""
    mine = {
        name: value if isinstance(value, str) else repr(value)
        for (name, value), same in zip(fields.items(), equal, strict=True)
        if not same
    }
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine, group=group)
    lines = ["the ranks disagree:"]
    for name in mine:
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            holders.setdefault(theirs[name], []).append(rank)
        told = "; ".join(f"rank {', '.join(map(str, who))}: {value or 'fine'}" for value, who in holders.items())
        lines.append(f"  {name}: {told}")
    return "\n".join(lines)
