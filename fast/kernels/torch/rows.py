"""Row operations in plain PyTorch, on tensors (b, t, h, d) and statistics (b, h, t)."""

import torch
from torch import Tensor

from canon.route.checks import accumulate_dtype
from canon.route.sink_weights import over_width, sigmoid, sink_weight, weighted


@torch.no_grad()
def merge(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    new_out: Tensor,
    new_lse: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Write new_out and new_lse, which may be out and lse: the merge of two parts. ``rows`` (int64,
    distinct): the tokens of the other part.
    """
    accumulate, token = accumulate_dtype(new_lse.dtype), slice(None) if rows is None else rows
    parts = (out[:, token], lse[:, :, token]), (other_out, other_lse)
    top = torch.maximum(*[x.to(accumulate) for _, x in parts])
    finite = top.masked_fill(top == -torch.inf, 0.0)
    weights = [torch.exp(x.to(accumulate) - finite) for _, x in parts]
    total = weights[0] + weights[1]
    total.masked_fill_(total == 0, 1.0)
    both = 0.0
    for (x, part_lse), weight in zip(
        parts, weights, strict=True
    ):  # a part's out may hold anything where its lse is -inf
        x = x.to(accumulate).masked_fill(over_width(part_lse == -torch.inf), 0.0)
        both = both + x * over_width(weight / total)
    new_out[:, token] = both.to(new_out.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    new_lse[:, :, token] = torch.where(top == -torch.inf, top, finite + total.log()).to(
        new_lse.dtype
    )


@torch.no_grad()
def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, result: Tensor) -> None:
    """Write result = rowsum(dout * out) - dlse, and 0 where lse is -inf."""
    total = (dout.to(result.dtype) * out.to(result.dtype)).contiguous().sum(-1).transpose(1, 2)
    total = total if dlse is None else total - dlse
    result.copy_(total.masked_fill(lse == -torch.inf, 0.0))


@torch.no_grad()
def sum_heads(dk_parts: Tensor, dv_parts: Tensor | None, dk: Tensor, dv: Tensor | None) -> None:
    """Write dk (b, s, g, d) and, if given, dv: sums over each group of the parts, in head order."""
    for parts, total in ((dk_parts, dk), (dv_parts, dv)):
        if parts is not None and total is not None:
            first, *others = parts.unflatten(2, (total.shape[2], -1)).unbind(3)
            total.copy_(sum(others, first))


@torch.no_grad()
def take_rows(k: Tensor, v: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write out (b, n, g, d + dv): the ``rows`` of k and v, side by side."""
    out.copy_(torch.cat([k[:, rows], v[:, rows]], -1))


@torch.no_grad()
def copy_rows(x: Tensor, part: Tensor, rows: Tensor) -> None:
    """Write part (b, n, h, d) = x[:, rows]."""
    part.copy_(x[:, rows])


@torch.no_grad()
def copy_statistics(lse: Tensor, delta: Tensor, parts: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Write parts[0] (b, h, n) = lse[:, :, rows] and parts[1] = delta[:, :, rows]."""
    for x, part in zip((lse, delta), parts, strict=True):
        part.copy_(x[:, :, rows])


@torch.no_grad()
def add_to_rows(total: Tensor, rows: Tensor, part: Tensor) -> None:
    """Update total[:, rows] += part, at distinct rows."""
    total[:, rows] = (total[:, rows] + part).to(total.dtype)


@torch.no_grad()
def add_rows(x: Tensor, received: Tensor, first: Tensor, places: Tensor, total: Tensor) -> None:
    """Write total, which may be x: x plus received[:, places[first[i] : first[i + 1]]],
    in order.
    """
    sums, number = x.to(accumulate_dtype(x.dtype), copy=True), first[1:] - first[:-1]
    for i in range(int(number.max()) if len(number) else 0):
        more = (number > i).nonzero()[:, 0]
        sums[:, more] += received[:, places[first[more] + i]].to(sums.dtype)
    total.copy_(sums)


@torch.no_grad()
def copy_tokens(x: Tensor, copy: Tensor) -> None:
    """Write copy = x, in the dtype of the copy."""
    copy.copy_(x)


@torch.no_grad()
def sum_ranks(received: Tensor, total: Tensor) -> None:
    """Write total (b, t, h, d): received (b, W, t, h, d) summed over W in rank order, in float32
    (float64 for float64), rounded once.
    """
    first, *others = received.to(accumulate_dtype(received.dtype)).unbind(1)
    total.copy_(sum(others, first))


@torch.no_grad()
def apply_sink(out: Tensor, lse: Tensor, sink: Tensor, result: Tensor) -> None:
    """Write result: out under the sink (h,), from lse over all keys."""
    result.copy_(weighted(out, lse, sink.to(lse.dtype)))


@torch.no_grad()
def differentiate_sink(
    dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor, dout_keys: Tensor | None, dlse: Tensor
) -> None:
    """Write dlse and, unless None, dout_keys. ``out`` is that of the keys."""
    sink, seen = sink.to(lse.dtype), lse != -torch.inf
    a, dout = sink_weight(lse, sink), dout.to(lse.dtype).masked_fill(~over_width(seen), 0.0)
    r = (dout * out).contiguous().sum(-1).transpose(1, 2)
    dlse.copy_(torch.where(seen, a * sigmoid(sink[:, None] - lse) * r, 0.0))  # 1 - a would cancel
    if dout_keys is not None:
        dout_keys.copy_(over_width(a) * dout)
