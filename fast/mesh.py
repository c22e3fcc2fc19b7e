"""The passes of `canon.reference.mesh`, with one packed message each way.

A message has a row for each token: the values of all tensors and sequences for the heads of one
column, side by side. A column reads q, k and v in place in the rows that it receives, unless the
parts of the row of the mesh do not arrive by position. On NCCL the exchange inside a row has a
communicator of its own.

Cost: as the reference. A row is padded to 16 bytes for each tensor, and to 16 elements. Memory: a
message that is sent and one that is received; the views of q, k and v keep theirs until the
backward pass.

Sources: as `canon.reference.mesh`.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from canon.fast.device import rows_for
from canon.fast.replay.recordings import replayed
from canon.fast.tables.device_plans import META, device_plan
from canon.fast.transport.messages import transport_for
from canon.masks.layout import Layout
from canon.masks.plan_cache import PLANS
from canon.masks.rows import arrival_order
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.call import Call

__all__: list[str] = []  # the passes belong to the public functions

ALIGNMENT = 16  # bytes, of each tensor in a row
Kind = tuple[int, int, torch.dtype]  # heads of a column, width and dtype of a tensor


def mesh_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    schedule, column = call.computed, call.rank % call.columns
    tensors = to_column(call, q, k, v)
    mine = {} if max_logits is None else {"max_logits": max_logits.chunk(call.columns)[column]}
    out, lse, *others = schedule.passes[0](schedule, *tensors, **mine)
    return *to_tokens(call, out, lse), *tensors, out, lse, *others


def mesh_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Tensor,
) -> Gradients:  # fmt: skip
    schedule = call.computed
    b, t, h, _ = call.shapes[0]
    # every rank sends dlse: others may need it
    dlse = lse.new_zeros(b, h, t) if dlse is None else dlse
    of_results = to_column(call, dout, dlse)
    if q.shape[2] == h:  # a compiled call keeps the rank's own
        q, k, v, out, lse = to_column(call, q, k, v, out, lse)
    grads = schedule.passes[1](schedule, needs_grad, *of_results, q, k, v, out, lse, *others)
    returned = iter(to_tokens(call, *(x for x in grads if x is not None)))
    return tuple(None if x is None else next(returned) for x in grads)


def to_column(call: Call, *tensors: Tensor) -> list[Tensor]:
    """Return (b, sum of t, n / H, width) of each tensor (b, t, n, width), and contiguous statistics
    (b, n / H, sum of t) of (b, n, t).
    """
    given = [as_tokens(x) for x in tensors]
    rows = rows_of(call, *((x.shape[2] // call.columns, x.shape[3], x.dtype) for x in given))
    received = rows.exchange(_divide_heads, given, [rows.tokens] * call.columns, rows.sizes)
    tokens, ordered = sum(rows.sizes), rows.orders(received.device)
    views = rows.views(received, tokens)
    results = [
        view if x.ndim == 4 and not ordered else _room(x, tokens, view.shape[2])
        for x, view in zip(tensors, views, strict=True)
    ]
    copies = [
        None if result is view else as_tokens(result)
        for result, view in zip(results, views, strict=True)
    ]
    if any(x is not None for x in copies):
        replayed(_order_tokens, (received, *copies), rows)
    return results


def to_tokens(call: Call, *tensors: Tensor) -> list[Tensor]:
    """Return (b, t, n, width) of each tensor (b, sum of t, n / H, width), and (b, n, t) of
    statistics (b, n / H, sum of t).
    """
    if not tensors:
        return []
    given = [as_tokens(x) for x in tensors]
    rows = rows_of(call, *((*x.shape[2:], x.dtype) for x in given))
    received = rows.exchange(_reorder_tokens, given, rows.sizes, [rows.tokens] * call.columns)
    results = [
        _room(x, rows.tokens, call.columns * heads)
        for x, (heads, *_) in zip(tensors, rows.kinds, strict=True)
    ]
    replayed(_join_heads, (received, *map(as_tokens, results)), rows)
    return results


def as_tokens(x: Tensor) -> Tensor:
    """Return a statistic (b, h, t) as a view (b, t, h, 1), and x (b, t, h, d) itself."""
    return x.transpose(1, 2).unsqueeze(-1) if x.ndim == 3 else x


def _room(x: Tensor, tokens: int, heads: int) -> Tensor:
    size = (tokens, heads, x.shape[3]) if x.ndim == 4 else (heads, tokens)
    return x.new_empty(x.shape[0], *size)


class TokenRows:
    """Messages of one kind: a row has a token's heads of one column, in all sequences and tensors.
    ``sizes``: the tokens of each rank of this row of the mesh. ``nbytes``: of a row.
    """

    def __init__(self, call: Call, kinds: tuple[Kind, ...]):
        self.call, self.kinds, self.batch = call, kinds, call.shapes[0][0]
        self.row, column = divmod(call.rank, call.columns)
        first = self.row * call.columns
        self.sizes = [call.layout.size(rank) for rank in range(first, first + call.columns)]
        self.tokens = self.sizes[column]
        sizes = (self.batch * heads * width * dtype.itemsize for heads, width, dtype in kinds)
        *self.starts, end = accumulate((_aligned(size) for size in sizes), initial=0)
        # 16 elements: kernels on views of the rows are those of contiguous tensors
        self.nbytes = _aligned(end, 16 * kinds[0][2].itemsize)

    def views(self, message: Tensor, rows: int) -> list[Tensor]:
        views = []
        for (heads, width, dtype), start in zip(self.kinds, self.starts, strict=True):
            shape = self.batch, rows, heads, width
            strides = heads * width, self.nbytes // dtype.itemsize, width, 1
            views.append(message.view(dtype).as_strided(shape, strides, start // dtype.itemsize))
        return views

    def orders(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return (arrived row of each token, token of each arrived row), int64, or nothing if parts
        arrive by position.
        """
        return _orders(self.call.layout, self.call.columns, self.row, device)

    def exchange(
        self, pack: Callable[..., None], tensors: list[Tensor], *sizes: list[int]
    ) -> Tensor:
        """Exchange rows in the row of the mesh. ``pack`` copies the tensors into the message.
        ``sizes``: the rows that each rank gets, and sends.
        """
        nbytes = [[rows * self.nbytes for rows in some] for some in sizes]
        sent, received = (tensors[0].new_empty(sum(x), dtype=torch.uint8) for x in nbytes)
        replayed(pack, (sent, *tensors), self)
        transport = transport_for(self.call.mesh.row, sent.device)
        transport.all_to_all(received, sent, *reversed(nbytes)).wait()
        return received


def plan_exchange(call: Call) -> None:
    """Look up the plan of the exchanges of a call."""
    _orders(call.layout, call.columns, call.rank // call.columns, META)


def rows_of(call: Call, *kinds: Kind) -> TokenRows:
    """Return the rows of tensors of these kinds."""
    return PLANS.find((TokenRows, call, kinds), lambda: TokenRows(call, kinds))


def _aligned(nbytes: int, unit: int = ALIGNMENT) -> int:
    return -(-nbytes // unit) * unit


@device_plan
def _orders(layout: Layout, heads: int, row: int) -> tuple[np.ndarray, ...]:
    return tuple(x for order in arrival_order(layout, heads, row) for x in (order, order.argsort()))


def _divide_heads(*given) -> None:
    for own, part in _by_column(*given):
        rows_for(own).copy_tokens(own, part)


def _join_heads(*given) -> None:
    for own, part in _by_column(*given):
        rows_for(own).copy_tokens(part, own)


def _by_column(message: Tensor, *given) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the views (H, t, n / H, width) of each sequence in a tensor and in a message."""
    *tensors, rows = given
    n = rows.call.columns
    for x, packed in zip(tensors, rows.views(message, n * rows.tokens), strict=True):
        for own, part in zip(x, packed, strict=True):
            yield own.unflatten(1, (n, -1)).permute(1, 0, 2, 3), part.unflatten(0, (n, -1))


def _order_tokens(message: Tensor, *given) -> None:
    *copies, rows = given
    for copy, arrived in zip(copies, rows.views(message, sum(rows.sizes)), strict=True):
        if copy is not None:
            _copy(arrived, copy, rows.orders(message.device)[:1])


def _reorder_tokens(message: Tensor, *given) -> None:
    *tensors, rows = given
    for x, target in zip(tensors, rows.views(message, sum(rows.sizes)), strict=True):
        _copy(x, target, rows.orders(message.device)[1:])


def _copy(x: Tensor, copy: Tensor, rows: tuple[Tensor, ...]) -> None:
    if rows:
        rows_for(x).copy_rows(x, copy, *rows)
    else:
        rows_for(x).copy_tokens(x, copy)
