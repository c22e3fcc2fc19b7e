"""Attention over two dimensions of ranks: heads are exchanged for tokens inside a row of the mesh,
then any schedule runs over the columns.

The mesh is ("tokens", "heads"). A row has H neighbouring ranks, best on one host; there are T rows:

    T = 2, H = 4   part 4 i + j of the tokens,                 parts 4 i .. 4 i + 3,
                   all heads                                   a quarter of the heads
    row 0          (0,0) (0,1) (0,2) (0,3)     exchange        (0,0) (0,1) (0,2) (0,3)
    row 1          (1,0) (1,1) (1,2) (1,3)     -------->       (1,0) (1,1) (1,2) (1,3)
                                                                 |     |     |     |   column j:
                                                                 a schedule over T ranks

Forward: exchange q, k and v; run the schedule of the call, `Call.computed`; send out and lse back.
Backward: exchange dout and dlse; run its backward pass; send dq, dk and dv back. T = 1 is Ulysses.

A row holds its tokens by position (`canon.masks.rows`), so the parts of ``zigzag(n, T H)`` make the
rows of ``zigzag(n, T)``. Only rows need equal work: ``dispatch(mask, T).divided(H)``. No sum
crosses a column, so rank_invariant=True gives the bits of one rank.

Cost of a rank with t tokens, for elements of e bytes, E in partial results: in each pass it sends
(1 - 1 / H) t b ((h + g) (d + dv) e + h E) bytes inside its row, and receives as many, beside the
schedule of T ranks with h / H and g / H heads.

Limits: H divides the key heads g. Nothing hides the exchanges.

Sources: Jacobs et al., DeepSpeed Ulysses (2023), the exchange; Fang and Zhao, USP (2024), both
dimensions.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.plan_cache import cached_plan
from canon.masks.rows import arrival_order
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.call import Call

__all__: list[str] = []  # the passes belong to the public functions


def mesh_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, max_logits: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return out (b, t, h, dv) and lse (b, h, t), then the tensors of the column for the backward
    pass.
    """
    schedule, column = call.computed, call.rank % call.columns
    tensors = [to_column(call, x) for x in (q, k, v)]
    mine = {} if max_logits is None else {"max_logits": max_logits.chunk(call.columns)[column]}
    out, lse, *others = schedule.passes[0](schedule, *tensors, **mine)
    results = to_tokens(call, out), statistic(to_tokens(call, statistic(lse)))
    return *results, *tensors, out, lse, *others


def mesh_backward(
    call: Call, needs_grad: NeedsGrad, dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Tensor,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, from tensors of the column (q and all after it)."""
    schedule = call.computed
    if q.shape[2] == call.shapes[0][2]:  # a compiled call keeps the rank's own
        q, k, v, out = (to_column(call, x) for x in (q, k, v, out))
        lse = statistic(to_column(call, statistic(lse)))
    # every rank sends dlse: others may need it
    b, t, h, _ = call.shapes[0]
    dlse = lse.new_zeros(b, h, t) if dlse is None else dlse
    of_results = to_column(call, dout), statistic(to_column(call, statistic(dlse)))
    grads = schedule.passes[1](schedule, needs_grad, *of_results, q, k, v, out, lse, *others)
    return tuple(None if x is None else to_tokens(call, x) for x in grads)


def to_column(call: Call, x: Tensor) -> Tensor:
    """Return (b, sum of t, n / H, d): the row's tokens, this column's heads, of x (b, t, n, d)."""
    row, column = divmod(call.rank, call.columns)
    sizes = sizes_of_row(call)
    rows = x.unflatten(2, (call.columns, -1)).permute(2, 1, 0, 3, 4)  # (H, t, b, n / H, d)
    arrived = all_to_all(call, rows.flatten(0, 1), [sizes[column]] * call.columns, sizes)
    for order in order_of_row(call.layout, call.columns, row, x.device):
        arrived = arrived[order]
    return arrived.transpose(0, 1)


def to_tokens(call: Call, x: Tensor) -> Tensor:
    """Return the inverse: all heads (b, t, n, d) of this rank's tokens."""
    row, column = divmod(call.rank, call.columns)
    sizes, rows = sizes_of_row(call), x.transpose(0, 1)
    for order in order_of_row(call.layout, call.columns, row, x.device):
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
    arrived = all_to_all(call, rows, sizes, [sizes[column]] * call.columns)
    return arrived.unflatten(0, (call.columns, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def statistic(x: Tensor) -> Tensor:
    """Return x (b, h, t) as (b, t, h, 1), or the other way."""
    return x.transpose(1, 2).unsqueeze(-1) if x.ndim == 3 else x.squeeze(-1).transpose(1, 2)


def all_to_all(call: Call, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send ``sent[j]`` rows to rank j of this row of the mesh. Return those of all its ranks."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=call.mesh.row)
    return arrived


def sizes_of_row(call: Call) -> list[int]:
    """Return the tokens of each rank of this row."""
    first = call.rank - call.rank % call.columns
    return [call.layout.size(rank) for rank in range(first, first + call.columns)]


@cached_plan
def order_of_row(layout: Layout, heads: int, row: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return `arrival_order` on a device, or nothing if parts arrive by position."""
    return tuple(torch.from_numpy(x).to(device) for x in arrival_order(layout, heads, row))
