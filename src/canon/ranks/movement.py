"""Movement of tensors between layouts: `Layout.unshard`, `Layout.redistribute` and
`Layout.shard_batch`.

    unshard, forward             all-gather of shards, padded to the largest one
    unshard, backward            take this rank's tokens of the gradient
    unshard, backward, partial   all-to-all: a rank adds W received summands in rank order
    redistribute, both passes    all-to-all: each token moves to its rank in the other layout

For W ranks with t tokens of N elements each, `unshard` receives (W - 1) max(t) N elements and holds
W max(t) N besides the full tensor. `redistribute` receives at most t N and holds 3 t N.

`shard_batch` shifts labels before it divides them, as a rank's last label is on another rank:

    labels, n = 6, documents of 2 and 4      a0 a1 b0 b1 b2 b3
    shift_labels                             a1 -100 b1 b2 b3 -100
    position_ids                             0 1 0 1 2 3
"""

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from canon.masks.arguments import flag, plain_tensor, shown
from canon.masks.cuts import note_cut
from canon.masks.layout import Layout, check_size, positions_on
from canon.masks.mask import Mask
from canon.masks.mask_inputs import Ints, document_ends, position_ends
from canon.masks.plan_cache import cached_plan, keep_for_stream
from canon.ranks.agreement import agree, named_failures, refused_together
from canon.ranks.graph_break import untraced
from canon.ranks.group import Group, place_in


@untraced
def unsharded(layout: Layout, x: Tensor, group: Group, dim: int, partial_grad: bool) -> Tensor:
    """Return the full tensor, as `Layout.unshard`."""
    group, rank, ranks = place_in("unshard", group)
    with refused_together("unshard", group, ranks):
        dim = _checked_dim("unshard", layout, x, dim, rank, ranks)
        flag("unshard: partial_grad", partial_grad)
    x = x.movedim(dim, 0)
    _agree("unshard", group, ranks, x, ("layout", layout), ("partial_grad", partial_grad))
    return Unshard.apply(x, layout, rank, group, partial_grad).movedim(0, dim)


@untraced
def redistributed(layout: Layout, x: Tensor, to: Layout, group: Group, dim: int) -> Tensor:
    """Return this rank's tokens in the layout ``to``, as `Layout.redistribute`."""
    group, rank, ranks = place_in("redistribute", group)
    with refused_together("redistribute", group, ranks):
        dim = _checked_dim("redistribute", layout, x, dim, rank, ranks)
        if not isinstance(to, Layout):
            raise TypeError(
                f"redistribute: to must be a Layout, got {shown(to)}: build one with "
                "Layout.zigzag, ..."
            )
        if (to.tokens, to.ranks) != (layout.tokens, layout.ranks):
            raise ValueError(
                f"redistribute: to has {to.tokens} tokens on {to.ranks} ranks, the layout "
                f"{layout.tokens} on {layout.ranks}"
            )
    return _moved(x.movedim(dim, 0), layout, to, rank, group).movedim(0, dim)


def _moved(
    x: Tensor, layout: Layout, to: Layout, rank: int, group: dist.ProcessGroup | None
) -> Tensor:
    _agree("redistribute", group, layout.ranks, x, ("layout", layout), ("to", to))
    return Redistribute.apply(x, layout, to, rank, group)


def _checked_dim(name: str, layout: Layout, x: Any, dim: Any, rank: int, ranks: int) -> int:
    dim = plain_tensor(name, x, dim)
    if ranks != layout.ranks or x.shape[dim] != layout.size(rank):
        raise ValueError(
            f"{name}: rank {rank} of {ranks} has {x.shape[dim]} tokens along dim {dim}; the layout "
            f"is for {layout.ranks} ranks"
            + (f" and gives it {layout.size(rank)}" if rank < layout.ranks else "")
        )
    return dim


def _agree(name: str, group: Any, ranks: int, x: Tensor, *layouts: tuple[str, Any]) -> None:
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    shape = tuple(x.shape[1:])
    of_x = ("requires_grad", needs_grad), ("shape without tokens", shape)
    agree(name, group, ranks, x, *of_x, *layouts)


class Unshard(torch.autograd.Function):
    """Gather the tokens of all ranks: x (t, ...) -> (tokens, ...). Differentiable once."""

    @staticmethod
    def forward(ctx, x, layout, rank, group, partial_grad):
        ctx.call = layout, rank, group, partial_grad
        sizes = [layout.size(r) for r in range(layout.ranks)]
        shards = [x]
        if layout.ranks > 1:
            padded = x.new_zeros(max(sizes), *x.shape[1:])
            padded[: len(x)] = x
            shards = [torch.empty_like(padded) for _ in sizes]
            with named_failures("unshard", group, layout.ranks):
                dist.all_gather(list(map(_bytes, shards)), _bytes(padded), group=group)
        full = x.new_empty(layout.tokens, *x.shape[1:])
        for r, shard in enumerate(shards):
            full[positions_on(layout, r, x.device)] = shard[: sizes[r]]
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (full,) = grads
        layout, rank, group, partial_grad = ctx.call
        mine = full.index_select(0, positions_on(layout, rank, full.device))
        if partial_grad and layout.ranks > 1:
            places = [positions_on(layout, r, full.device) for r in range(layout.ranks)]
            send = full.index_select(0, torch.cat(places))
            received = mine.new_empty(layout.ranks, *mine.shape)
            sizes = [len(mine)] * layout.ranks, list(map(len, places))
            with named_failures("unshard (backward)", group, layout.ranks):
                dist.all_to_all_single(received.flatten(0, 1), send, *sizes, group=group)
            mine = _sum_in_order(received)
        return mine, None, None, None, None


def _bytes(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).view(torch.uint8)  # gloo lacks some dtypes


def _sum_in_order(summands: Tensor) -> Tensor:
    total = summands[0].to(torch.promote_types(summands.dtype, torch.float32), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.to(summands.dtype)


class Redistribute(torch.autograd.Function):
    """Move the tokens of x (t, ...) from one layout to another."""

    @staticmethod
    def forward(ctx, x, layout, to, rank, group):
        ctx.call = layout, to, rank, group
        send, sent, places, received = _route(layout, to, rank, x.device)
        keep_for_stream(send, places)
        rows = x.index_select(0, send)
        arrived = rows if layout.ranks == 1 else x.new_empty(sum(received), *x.shape[1:])
        with named_failures("redistribute", group, layout.ranks):
            if layout.ranks > 1:
                dist.all_to_all_single(_bytes(arrived), _bytes(rows), received, sent, group=group)
        return torch.empty_like(arrived).index_copy_(0, places, arrived)

    @staticmethod
    def backward(ctx, *grads):
        layout, to, rank, group = ctx.call
        return _moved(grads[0], to, layout, rank, group), None, None, None, None


@cached_plan
def _route(
    layout: Layout, to: Layout, rank: int, device: torch.device
) -> tuple[Tensor, list[int], Tensor, list[int]]:
    """Return (rows to send, their number by receiver, rows of the arrived tokens, their number by
    sender). A sender keeps the order of its rows.
    """
    sent = [rows.sort().values for rows in _rows_of(layout, rank, to)]
    received = _rows_of(to, rank, layout)
    sizes, arriving = (list(map(len, parts)) for parts in (sent, received))
    return torch.cat(sent).to(device), sizes, torch.cat(received).to(device), arriving


def _rows_of(layout: Layout, rank: int, other: Layout) -> list[Tensor]:
    """Return the rows of this rank that hold tokens of each rank of another layout, in the order of
    that rank's tokens: int64, on the CPU.
    """
    row = torch.full((layout.tokens,), -1, dtype=torch.int64, device="cpu")
    mine = layout.positions(rank)
    row[mine] = torch.arange(len(mine), device="cpu")
    found = (row[other.positions(owner)] for owner in range(other.ranks))
    return [rows[rows >= 0] for rows in found]


IGNORED = -100  # the label that losses ignore


def sharded_batch(
    layout: Layout,
    batch: Mapping[str, Tensor],
    rank: int,
    cu_seqlens: Ints | Mask | None,
    dims: Mapping[str, int] | None,
) -> dict[str, Tensor]:
    """Return this rank's part of the batch, as `Layout.shard_batch`."""
    dims = _checked_dims(layout, batch, dims)
    ends = None if cu_seqlens is None else ends_of(layout, cu_seqlens)
    note_cut(layout, rank)
    full, starts, token = dict(batch), None, None
    if "labels" in batch and "shift_labels" not in batch:
        starts = _starts(layout, batch, ends)
        full["shift_labels"] = _shifted(batch["labels"], starts.to(batch["labels"].device))
    elif "position_ids" not in batch:
        starts = _at(layout, ends or [])
    if starts is not None and cu_seqlens is not layout._planned_for:
        token = missing_document(layout, starts)
    if token is not None:
        warnings.warn(
            f"shard_batch: in the mask that dispatch has planned this layout for, a document "
            f"begins at token {token}, but none begins there in this batch, so its labels and "
            "positions are those of one with the tokens before: pass the mask as cu_seqlens",
            stacklevel=3,
        )
    part = {
        name: x.index_select(dims.get(name, 1), positions_on(layout, rank, x.device))
        for name, x in full.items()
    }
    if "position_ids" not in batch:
        like = next((x for name, x in batch.items() if dims[name] == 1), None)
        positions = document_positions(layout, rank, ends or [0, layout.tokens])
        rows, device = (1, "cpu") if like is None else (len(like), like.device)
        part["position_ids"] = positions.to(device).repeat(rows, 1)
    return part


def ends_of(layout: Layout, cu_seqlens: Ints | Mask) -> list[int]:
    """Return ``cu_seqlens`` as ints that end at the layout's tokens."""
    if isinstance(cu_seqlens, Mask):
        check_size(cu_seqlens, layout)
        return _document_ends(cu_seqlens)
    ends = document_ends(cu_seqlens)
    if ends[-1] != layout.tokens:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}, the layout has {layout.tokens} tokens")
    return ends


def missing_document(layout: Layout, starts: Tensor | None = None) -> int | None:
    """Return the first token at which a document begins in the mask of `dispatch`, but in no row of
    ``starts`` (b, n). None without documents.
    """
    mask = layout._planned_for
    if mask is None:
        return None
    itself = _sees(mask, 0)  # padding does not
    begins = ~_sees(mask, 1)[1:] & itself[1:] & itself[:-1]
    if starts is not None:
        begins &= ~starts.any(0).cpu()[1:]
    tokens = begins.nonzero().flatten().tolist()
    with suppress(ValueError):
        return 1 + tokens[0] if tokens and _document_ends(mask) else None


def _sees(mask: Mask, back: int) -> Tensor:
    """Return whether each token sees the one ``back`` tokens before it: bool [keys]."""
    seen = torch.zeros(mask.keys, dtype=torch.bool, device="cpu")
    for band in mask.bands:
        if band.lo <= -back <= band.hi:
            start = max(band.q_start, band.k_start + back)
            seen[start : min(band.q_stop, band.k_stop + back)] = True
    return seen


def _document_ends(mask: Mask) -> list[int]:
    """Return the tokens that do not see the one before them, and the end. Raise ValueError if one
    sees others, as in a tree.
    """
    starts = ~_sees(mask, 1)
    ends = [*starts.nonzero().flatten().tolist(), mask.keys]
    for band in mask.bands:
        first = bisect_right(ends, band.q_start) - 1
        for start in ends[first : bisect_left(ends, band.q_stop)]:
            if max(band.k_start, max(start, band.q_start) + band.lo) < start:
                raise ValueError(
                    f"the mask has no documents: token {start} does not see token {start - 1}, but "
                    "it or a later one sees others before it: pass cu_seqlens; for a tree see "
                    "canon.trees"
                )
    return ends


def document_positions(layout: Layout, rank: int, ends: list[int]) -> Tensor:
    """Return the position of each local token in its document: int64 [t], on the CPU."""
    starts = torch.tensor(ends, device="cpu")
    positions = layout.positions(rank)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def _checked_dims(layout: Layout, batch: Any, dims: Any) -> dict[str, int]:
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            f"shard_batch: batch must be a dict of one or more tensors, got {shown(batch)}"
        )
    if not isinstance(dims := {} if dims is None else dims, Mapping):
        raise TypeError(f"shard_batch: dims must be a dict of dims by name, got {shown(dims)}")
    if unknown := sorted(dims.keys() - batch.keys()):
        raise ValueError(
            f"shard_batch: dims names {unknown[0]!r}, expected some of {sorted(batch)}"
        )
    found = {}
    for name, x in batch.items():
        entry = f"shard_batch: entry {name!r}"
        if not isinstance(x, Tensor) or hasattr(x, "to_local"):  # a DTensor
            raise TypeError(
                f"{entry} must be a plain tensor, got {shown(x)}: leave it out, or convert it"
            )
        found[name] = plain_tensor(entry, x, dims[name]) % x.ndim if name in dims else 1
        if x.ndim <= found[name] or x.shape[found[name]] != layout.tokens:
            places = [dim for dim, size in enumerate(x.shape) if size == layout.tokens]
            remedy = "leave it out, or use Layout.shard with the dim of its tokens"
            if len(places) == 1:
                remedy = f"pass dims={{{name!r}: {places[0]}}}" if x.ndim > 1 else "pass x[None]"
            raise ValueError(
                f"{entry} must be (b, {layout.tokens}, ...), with all tokens of the layout on dim "
                f"{found[name]}, got {tuple(x.shape)}: {remedy}"
            )
    labels, kinds = batch.get("labels"), (torch.int64, torch.int32)
    if labels is None or "shift_labels" in batch:
        return found
    if labels.ndim != 2 or found["labels"] != 1 or labels.dtype not in kinds:
        raise ValueError(
            f"shard_batch: labels must be whole numbers (b, n), int64 or int32, got {shown(labels)}"
        )
    return found


def _starts(layout: Layout, batch: Mapping[str, Tensor], ends: list[int] | None) -> Tensor:
    """Return whether each token begins a document: bool (b, n) or (1, n)."""
    labels = batch["labels"]
    if ends is None and "position_ids" in batch:
        positions = batch["position_ids"]
        if positions.ndim != 2 or len(positions) not in (1, len(labels)):
            raise ValueError(
                "shard_batch: position_ids must be (b, n) or (1, n) to find documents, got "
                f"{tuple(positions.shape)}: pass cu_seqlens or the mask"
            )
        position_ends(positions)  # raises unless documents are counted from 0 on
        return positions == 0
    return _at(layout, ends or [])


def _at(layout: Layout, starts: list[int]) -> Tensor:
    """Return whether each token is one of ``starts``: bool (1, n), on the CPU."""
    found = torch.zeros(1, layout.tokens, dtype=torch.bool, device="cpu")
    found[0, [start for start in starts if start < layout.tokens]] = True
    return found


def _shifted(labels: Tensor, starts: Tensor) -> Tensor:
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:].masked_fill(starts[:, 1:], IGNORED)
    return shifted
