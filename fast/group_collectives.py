"""Group cast and group reduce: one kernel moves the rows of each, on the communication stream.

Index tables are uploaded once for each (plan, rank, device): 8 bytes for each row that is sent, 8
more for its reduction, 8 for each own row.

Cost and source: as `canon.reference.group_collectives`.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces import public_group_collectives, public_plans
from canon.fast.device import check_device, rows_for
from canon.fast.needed_keys import areas_and_needs, union_of_intervals
from canon.fast.replay.recordings import replayed
from canon.fast.tables.device_plans import device_plan
from canon.fast.transport.messages import transport_for
from canon.masks.cast_plan import CastPlan, Piece, PlanReport, RankCasts, planned_casts
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_part, cached_plan
from canon.route.plan_arguments import Sizes

__all__ = ["cast_plan", "group_cast", "group_reduce", "plan_report"]


@cached_plan
def granular_plan(
    mask: Mask, layout: Layout, casts: int, own_keys_first: bool | None, granularity: int = 1
) -> CastPlan:
    """Return the plan of casts that send whole units of ``granularity`` tokens of the sequence."""
    rank, source, first, stop, step, _ = _transfers(mask, layout, granularity)
    moved = -(-(stop - first) // step)
    largest = int(np.bincount(rank * layout.ranks + source, moved).max(initial=0))
    return planned_casts(
        mask, layout, casts, own_keys_first, largest, int(moved.sum()), _casts_of, granularity
    )


@cached_plan
def _casts_of(plan: CastPlan, rank: int) -> RankCasts:
    received, sent = ([[] for _ in range(plan.layout.ranks)] for _ in range(2))
    moves = _transfers(plan.mask, plan.layout, plan.granularity)
    own = (moves[0] == rank) | (moves[1] == rank)
    for receiver, source, *place, row in zip(*(x[own].tolist() for x in moves), strict=True):
        (received[source] if receiver == rank else sent[receiver]).append(
            Piece(source, range(*place), row)
        )
    return RankCasts.of(received, sent, plan.casts)


def _plan_report(mask: Mask, layout: Layout, chunk: int) -> PlanReport:
    held = _Holdings(layout)
    area, *_ = areas_and_needs(mask, *held.runs[:2])
    areas = np.bincount(held.runs[2], area, layout.ranks)  # exact below 2^53
    rank, source, first, stop, step, _ = transfers(mask, layout)
    moved = -(-(stop - first) // step)
    received, sent = (np.bincount(x, moved, layout.ranks) for x in (rank, source))
    starts = np.arange(0, layout.tokens, chunk)
    largest = areas_and_needs(mask, starts, np.minimum(starts + chunk, layout.tokens))[0].max(
        initial=0
    )
    by_rank = (tuple(int(x) for x in values) for values in (areas, received, sent))
    return PlanReport(layout.tokens, *by_rank, int(largest))


class _Holdings:
    """The ranges of all ranks as arrays. ``row``: the local index of a range's first token.
    ``runs``: (start, stop, rank) of contiguous runs of tokens, ascending.
    """

    def __init__(self, layout: Layout):
        ranges = [
            (r.start, len(r), rank)
            for rank, held in enumerate(layout.ranges_per_rank)
            for r in held
        ]
        self.step = next((r.step for held in layout.ranges_per_rank for r in held), 1)
        self.start, self.size, self.rank = np.array(ranges, np.int64).reshape(-1, 3).T
        before = np.cumsum(self.size) - self.size
        first_of_rank = np.searchsorted(self.rank, self.rank)
        self.row = before - before[first_of_rank] if len(ranges) else before
        if self.step == 1:
            runs = self.start, self.start + self.size, self.rank
        else:  # every token is a run
            place = np.arange(self.size.sum()) - np.repeat(before, self.size)
            start = np.repeat(self.start, self.size) + place * self.step
            runs = start, start + 1, np.repeat(self.rank, self.size)
        order = np.argsort(runs[0])
        self.runs = tuple(x[order] for x in runs)


def transfers(mask: Mask, layout: Layout, granularity: int = 1) -> tuple[np.ndarray, ...]:
    """Return (rank, source, first token, stop, step, row there) of all transfers, sorted."""
    held = _Holdings(layout)
    _, run, first, stop = areas_and_needs(mask, *held.runs[:2])
    first = first // granularity * granularity
    stop = np.minimum(-(-stop // granularity) * granularity, layout.tokens)
    rank, first, stop = union_of_intervals(held.runs[2][run], first, stop, layout.tokens)
    # ranges are disjoint, so the ranges that overlap with an interval are neighbours
    if held.step == 1:
        order = np.argsort(held.start)
        start, end = held.start[order], (held.start + held.size)[order]
        low, high = np.searchsorted(end, first, "right"), np.searchsorted(start, stop, "left")
        need = np.repeat(np.arange(len(rank)), high - low)
        piece = order[np.arange(len(need)) - np.repeat(np.cumsum(high - low) - high, high - low)]
    else:
        need, piece = (x.ravel() for x in np.indices((len(rank), len(held.start))))
    moves = rank[need] != held.rank[piece]
    need, piece = need[moves], piece[moves]
    start, size = held.start[piece], held.size[piece]
    low, high = (np.clip(-((start - end[need]) // held.step), 0, size) for end in (first, stop))
    need, piece, start, low, high = (x[low < high] for x in (need, piece, start, low, high))
    step = np.full(len(low), held.step)
    table = (
        rank[need],
        held.rank[piece],
        start + low * step,
        start + (high - 1) * step + 1,
        step,
        held.row[piece] + low,
    )
    order = np.lexsort((table[5], table[1], table[0]))
    return tuple(x[order] for x in table)


_transfers = cached_part(transfers)  # a plan and the pieces of a rank share them


def _group_cast(
    x: Tensor, plan: CastPlan, stage: int, group: Any, rank: int, sizes: Sizes
) -> Tensor:
    received = x.new_empty(sum(sizes.received), *x.shape[1:])
    sent = x.index_select(0, rows_sent(plan, stage, rank, x.device))
    dist.all_to_all_single(
        received, sent, sizes.received, sizes.sent, group=transport_for(group, x.device).gathers
    )
    return received


def _group_reduce(
    y: Tensor, plan: CastPlan, stage: int, into: Tensor, group: Any, rank: int
) -> Tensor:
    total = into.contiguous()
    GroupReduce(y.contiguous(), Transfer(plan, stage, rank), total, group).wait()
    return into if total is into else into.copy_(total)


class Transfer:
    """One cast of a plan for ``rank``: the tokens that it receives and sends, by rank."""

    def __init__(self, plan: CastPlan, cast: int, rank: int):
        self.plan, self.cast, self.rank = plan, cast, rank
        self.receives, self.sends = plan.receive_sizes(cast, rank), plan.send_sizes(cast, rank)
        self.received, self.sent = sum(self.receives), sum(self.sends)

    def rows_sent(self, device: torch.device) -> Tensor:
        return rows_sent(self.plan, self.cast, self.rank, device)


def begin_cast(
    k: Tensor, v: Tensor, transfer: Transfer, rows: Tensor, group: Any, kind: Hashable = None
) -> tuple[dist.Work, Tensor]:
    """Start a group cast of K and V into ``rows`` (received, b, g, d + dv), by source and row.
    Return its work, and the sent rows to be kept until its end. ``kind``: as in `replayed`.
    """
    transport = transport_for(group, k.device)
    sent = k.new_empty(transfer.sent, *rows.shape[1:])
    sizes = transfer.receives, transfer.sends
    with transport.on_communication_stream():
        replayed(_take, (k, v, sent), transfer, kind=kind)
        return dist.all_to_all_single(
            rows, sent, *sizes, group=transport.gathers, async_op=True
        ), sent


def columns(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Return such rows of two tensors as views (b, tokens, heads, width) of each."""
    return rows.transpose(0, 1).split([width, rows.shape[-1] - width], -1)


def _take(k: Tensor, v: Tensor, sent: Tensor, transfer: Transfer) -> None:
    rows_for(k).take_rows(k, v, transfer.rows_sent(k.device), sent.transpose(0, 1))


class GroupReduce:
    """A group reduce of contiguous ``rows`` in flight, to be added to ``into`` in rank order."""

    def __init__(
        self, rows: Tensor, transfer: Transfer, into: Tensor, group, kind: Hashable = None
    ):
        self.transport = transport_for(group, rows.device)
        self.transfer, self.into, self.kind = transfer, into, kind
        sizes = transfer.sends, transfer.receives  # reversed: the cast's rows come back
        self.sent, self.received = rows, rows.new_empty(transfer.sent, *rows.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, rows, *sizes, group=self.transport.reductions, async_op=True
        )

    def wait(self) -> None:
        options = self.transfer.plan, self.transfer.cast, self.transfer.rank
        with self.transport.on_communication_stream(after_compute=False):
            self.work.wait()
            replayed(_add, (self.into, self.received), *options, kind=self.kind)
        self.transport.join()
        self.work = self.sent = self.received = None  # later kernels may use their memory


def _add(into: Tensor, received: Tensor, plan: CastPlan, cast: int, rank: int) -> None:
    total = as_heads(into)
    if len(received):
        rows_for(total).add_rows(
            total, as_heads(received), *rows_returned(plan, cast, rank, into.device), total
        )


@device_plan
def rows_sent(plan: CastPlan, cast: int, rank: int) -> np.ndarray:
    """Return the rows that a rank sends in a cast, int64."""
    return plan.send_rows(cast, rank).numpy()


@device_plan
def rows_returned(plan: CastPlan, cast: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables of `add_rows`: for each own row its entries, and the received rows."""
    rows = plan.send_rows(cast, rank).numpy()
    counts = np.bincount(rows, minlength=plan.layout.size(rank))
    return np.append(0, np.cumsum(counts)), np.argsort(rows, kind="stable")


def as_heads(x: Tensor) -> Tensor:
    """Return contiguous (t, *width) as (1, t, heads, width of at most 128)."""
    width = x[0].numel() if len(x) else 0
    narrow = max((n for n in range(1, 129) if width % n == 0), default=1) if width else 1
    return x.reshape(1, len(x), width // narrow, narrow)


cast_plan = public_plans.cast_plan(granular_plan)
plan_report = public_plans.plan_report(_plan_report)
group_cast = public_group_collectives.group_cast(_group_cast, check_device)
group_reduce = public_group_collectives.group_reduce(_group_reduce, check_device)
