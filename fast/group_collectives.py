"""Group-cast and group-reduce at speed: the plans of `canon.reference.group_collectives`, and rows moved by one kernel each.

The plans, the order of rows and the order of sums are the reference's. What is added:

- Needs, areas and transfers are closed forms over NumPy arrays, for all ranks at once.
- Index tables are uploaded once for each (plan, rank, device). They are pure functions of the plan: a rank whose cache has
  dropped one makes it again without a word to the others.
- Rows of K and V are gathered by one kernel for each cast, and gradients added by one, on the stream beside the kernels.
- Casts and reductions have a communicator each on GPUs, so that a cast never queues behind a reduction.

Cost and memory: as `canon.reference.group_collectives`. Tables: 8 bytes for each row sent,
8 more for its reduction, 8 for each own row.

Source: as `canon.reference.group_collectives`.
"""

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.fast.device_plans import device_plan
from canon.fast.kernels.triton.rows import add_rows, take_rows
from canon.fast.planner import merged, seen
from canon.fast.transport import transport_for
from canon.reference.call import agreed_cast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan, Piece, staged
from canon.reference.plan_arguments import check_cast, checked_chunk
from canon.reference.plan_cache import cached_plan
from canon.reference.report import PlanReport

__all__ = ["cast_plan", "group_cast", "group_reduce", "plan_report"]


def cast_plan(mask: Mask, layout: Layout, *, stages: int = 1) -> CastPlan:
    """Who receives which tokens from whom, for all ranks. Pure, cached; nothing is sent.

    Args: ``mask`` over the whole sequence; any ``layout``; ``stages``, into how many casts the tokens are divided (fewer
        if there are not as many); 0 means one cast whose keys are used together with the rank's own.
    Raises ValueError if the mask is not one of the layout's tokens, or ``stages`` is not a whole number >= 0.
    Source: the module's docstring.
    """
    check_cast(mask, layout, stages)
    return _cast_plan(mask, layout, stages)


@cached_plan
def _cast_plan(mask: Mask, layout: Layout, stages: int) -> CastPlan:
    remote: list[list[list[Piece]]] = [[[] for _ in range(layout.ranks)] for _ in range(layout.ranks)]
    for rank, source, first, stop, step, row in zip(*(x.tolist() for x in _transfers(mask, layout)), strict=True):
        remote[rank][source].append(Piece(source, range(first, stop, step), row))
    return CastPlan(mask, layout, stages, staged([[tuple(pieces) for pieces in line] for line in remote], stages))


def plan_report(mask: Mask, layout: Layout, *, chunk: int | None = None) -> PlanReport:
    """Return the worth of a layout under a mask: by rank, its area and the tokens that it receives and sends.

    Args: ``chunk``, the number of tokens that a plan keeps together, for the lower bound; by default that of `dispatch`.
    Raises ValueError if the mask is not one of the layout's tokens, or chunk < 1; TypeError for arguments of other types.
    Source: the module's docstring.
    """
    check_cast(mask, layout, 0)
    chunk = checked_chunk(chunk, layout.tokens, layout.ranks)
    held = _Held(layout)
    area, *_ = seen(mask, *held.rows[:2])
    areas = np.bincount(held.rows[2], area, layout.ranks)  # exact below 2^53
    rank, source, first, stop, step, _ = _transfers(mask, layout)
    moved = -(-(stop - first) // step)
    received, sent = (np.bincount(x, moved, layout.ranks) for x in (rank, source))
    starts = np.arange(0, layout.tokens, chunk)
    largest = seen(mask, starts, np.minimum(starts + chunk, layout.tokens))[0].max(initial=0)
    by_rank = (tuple(int(x) for x in values) for values in (areas, received, sent))
    return PlanReport(layout.tokens, *by_rank, int(largest))


class _Held:
    """What the ranks of a layout hold, as arrays."""

    def __init__(self, layout: Layout):
        pieces = [(r.start, len(r), rank) for rank, ranges in enumerate(layout.ranges_per_rank) for r in ranges]
        self.step = next((r.step for ranges in layout.ranges_per_rank for r in ranges), 1)
        self.start, self.size, self.rank = np.array(pieces, np.int64).reshape(-1, 3).T
        before = np.cumsum(self.size) - self.size
        first_of_rank = np.searchsorted(self.rank, self.rank)
        self.row = before - before[first_of_rank] if len(pieces) else before
        if self.step == 1:
            rows = self.start, self.start + self.size, self.rank
        else:  # every row is a piece of its own
            place = np.arange(self.size.sum()) - np.repeat(before, self.size)
            start = np.repeat(self.start, self.size) + place * self.step
            rows = start, start + 1, np.repeat(self.rank, self.size)
        order = np.argsort(rows[0])
        self.rows = tuple(x[order] for x in rows)  # (start, stop, rank) of rows that follow one another, ascending


def _transfers(mask: Mask, layout: Layout) -> tuple[np.ndarray, ...]:
    """(rank, source, first token, stop, step, row at the source) of all that moves, sorted by rank, source and row."""
    held = _Held(layout)
    _, piece, first, stop = seen(mask, *held.rows[:2])
    rank, first, stop = merged(held.rows[2][piece], first, stop, layout.tokens)
    if held.step == 1:  # pieces are disjoint: the ones that an interval meets follow one another
        order = np.argsort(held.start)
        start, end = held.start[order], (held.start + held.size)[order]
        low, high = np.searchsorted(end, first, "right"), np.searchsorted(start, stop, "left")
        need = np.repeat(np.arange(len(rank)), high - low)
        piece = order[np.arange(len(need)) - np.repeat(np.cumsum(high - low) - high, high - low)]
    else:
        need, piece = (x.ravel() for x in np.indices((len(rank), len(held.start))))
    need, piece = (x[rank[need] != held.rank[piece]] for x in (need, piece))
    start, size = held.start[piece], held.size[piece]
    low, high = (np.clip(-((start - end[need]) // held.step), 0, size) for end in (first, stop))
    need, piece, start, low, high = (x[low < high] for x in (need, piece, start, low, high))
    step = np.full(len(low), held.step)
    table = rank[need], held.rank[piece], start + low * step, start + (high - 1) * step + 1, step, held.row[piece] + low
    order = np.lexsort((table[5], table[1], table[0]))
    return tuple(x[order] for x in table)


# ---------------------------------------------------------------------- what moves
def group_cast(
    x: Float[Tensor, "t ..."], plan: CastPlan, stage: int, *, group: dist.ProcessGroup | None = None
) -> Float[Tensor, "received ..."]:
    """The tokens of other ranks that this rank receives in cast ``stage``, by source and by row. A collective.

    Args: ``x``, this rank's tokens, outermost; ``plan``, the same on all ranks; ``stage`` of its casts; ``group``, the ranks.
    Not differentiable by itself: `group_reduce` is its transpose. Raises ValueError if x, the group or the stage do not
    fit the plan. Source: the module's docstring.
    """
    rank, sizes = agreed_cast("group_cast", x, plan, stage, group)
    received = x.new_empty(sum(sizes.received), *x.shape[1:])
    sent = x.index_select(0, rows_sent(plan, stage, rank, x.device))
    dist.all_to_all_single(received, sent, sizes.received, sizes.sent, group=transport_for(group, x.device).gathers)
    return received


def group_reduce(
    y: Float[Tensor, "received ..."],
    plan: CastPlan,
    stage: int,
    into: Float[Tensor, "t ..."],
    *,
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "t ..."]:
    """``into``, this rank's tokens, plus what every rank has for them in its ``y``, in rank order. A collective.

    Args: ``y``, one row for each token that this rank received in cast ``stage``, in that order; it travels in its own
        dtype and is added in that of ``into``, in place. The rest as `group_cast`, whose transpose this is.
    Raises ValueError if y, into, the group or the stage do not fit the plan. Source: the module's docstring.
    """
    rank, _ = agreed_cast("group_reduce", y, plan, stage, group, into)
    total = into.contiguous()
    GroupReduce(y.contiguous(), plan, stage, rank, total, group).wait()
    return into if total is into else into.copy_(total)


class GroupCast:
    """A cast of K and V under way: after `wait` they are in ``rows`` (received, b, g, d + dv), by source and by row."""

    def __init__(self, k: Tensor, v: Tensor, plan: CastPlan, cast: int, rank: int, rows: Tensor, group):
        way = transport_for(group, k.device)
        sizes = plan.receive_sizes(cast, rank), plan.send_sizes(cast, rank)
        self.sent = k.new_empty(sum(sizes[1]), *rows.shape[1:])  # held until it has left
        with way.beside():
            index = rows_sent(plan, cast, rank, k.device)
            take_rows(k, v, index, self.sent.transpose(0, 1))
            self.work = dist.all_to_all_single(rows, self.sent, *sizes, group=way.gathers, async_op=True)

    def wait(self) -> None:
        """What is launched from here on may read the rows."""
        self.work.wait()


class GroupReduce:
    """The way back of ``rows``, contiguous ones: `wait` adds what comes to the rows of ``into``, in rank order."""

    def __init__(self, rows: Tensor, plan: CastPlan, cast: int, rank: int, into: Tensor, group):
        self.way, self.into = transport_for(group, rows.device), into
        self.table = plan, cast, rank, rows.device
        sizes = plan.send_sizes(cast, rank), plan.receive_sizes(cast, rank)  # what had been sent comes back
        self.sent, self.received = rows, rows.new_empty(sum(sizes[0]), *rows.shape[1:])
        self.work = dist.all_to_all_single(self.received, rows, *sizes, group=self.way.reductions, async_op=True)

    def wait(self) -> None:
        """What is launched from here on may read the sums. They are made beside what was launched before."""
        total = _lines(self.into)
        with self.way.beside(after_all=False):
            self.work.wait()
            add_rows(total, _lines(self.received), *rows_returned(*self.table), total)
        self.way.join()
        self.work = self.sent = self.received = None  # not before: the memory is the next kernel's


@device_plan
def rows_sent(plan: CastPlan, cast: int, rank: int, device: torch.device) -> Tensor:
    """The rows that a rank sends in a cast, on the device: int64."""
    return plan.send_rows(cast, rank).to(device)


@device_plan
def rows_returned(plan: CastPlan, cast: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For `add_rows`: where what comes back for each row stands, by row and then by the rank that it comes from."""
    rows = plan.send_rows(cast, rank)
    places = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows, minlength=plan.layout.size(rank))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return first.to(device), places.to(device)


def _lines(x: Tensor) -> Tensor:
    """Contiguous (t, *width) as (1, t, lines, at most 128 wide)."""
    width = x[0].numel() if len(x) else 0
    narrow = max((n for n in range(1, 129) if width % n == 0), default=1) if width else 1
    return x.reshape(1, len(x), width // narrow, narrow)
