"""Group cast and group reduce: a rank receives exactly the tokens that its queries need, and sends
their gradients back.

    need of a rank   =  the keys that its queries see  -  its own tokens
    order received   =  by source rank, then by row on that rank

    4 ranks       sends to 0   1      2      3         receives
    rank 0        .            a b    .      .         c            (from 1)
    rank 1        c            .      d      .         a b          (from 0)
    rank 2        .            .      .      .         d            (from 1)
    rank 3        .            .      .      .         nothing      (takes part all the same)

All ranks derive this table from mask and layout (`cast_plan`), so no rank sends a request.

`group_cast` is one all-to-all with its own size for each pair of ranks. `CastPlan.local_mask` is
the mask in the order of the received buffer. With ``casts`` > 1 the tokens from one rank to another
are divided into that many nearly equal parts; ``stage`` is the number of a cast.

`group_reduce` is the transpose: each owner adds the gradients that return to those of its own
tokens, in rank order. So the same inputs and the same plan give the same bits.

Cost of a rank that receives R and sends S tokens of N elements in one cast:

             messages         elements received   peak memory
    cast     one all-to-all   R N                 the S rows sent and the R rows received
    reduce   one all-to-all   S N, then added     the S rows received, again if ``into`` has another
                                                  dtype; the sum for one rank; a copy of ``y``
                                                  unless it is contiguous

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025): the two collectives, which send
no unneeded token.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from canon.faces import public_group_collectives, public_plans
from canon.masks.cast_plan import CastPlan, Piece, PlanReport, RankCasts, planned_casts, tokens_in
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.checks import accumulate_dtype
from canon.route.plan_arguments import check_rows

__all__ = ["cast_plan", "group_cast", "group_reduce", "plan_report"]


@cached_plan
def _cast_plan(mask: Mask, layout: Layout, casts: int, own_keys_first: bool | None) -> CastPlan:
    moved = _moved(mask, layout)
    most, total = max(map(max, moved)), sum(map(sum, moved))
    return planned_casts(mask, layout, casts, own_keys_first, most, total, _casts_of)


@cached_plan
def _casts_of(plan: CastPlan, rank: int) -> RankCasts:
    needs, layout = _needs(plan.mask, plan.layout), plan.layout
    received = [
        _pieces(needs[rank], layout, other) if other != rank else ()
        for other in range(layout.ranks)
    ]
    sent = [
        _pieces(needs[other], layout, rank) if other != rank else ()
        for other in range(layout.ranks)
    ]
    return RankCasts.of(received, sent, plan.casts)


def _needs(mask: Mask, layout: Layout) -> list[tuple[range, ...]]:
    return [mask.needed_keys(ranges) for ranges in layout.ranges_per_rank]


def _moved(mask: Mask, layout: Layout) -> list[list[int]]:
    """Return the number of tokens that move, by [receiver][source]."""
    needs, ranks = _needs(mask, layout), range(layout.ranks)
    return [
        [tokens_in(_pieces(needs[to], layout, source)) if to != source else 0 for source in ranks]
        for to in ranks
    ]


def _pieces(need: tuple[range, ...], layout: Layout, source: int) -> tuple[Piece, ...]:
    """Return the tokens of the ascending ranges ``need`` that ``source`` holds, in the order of its
    rows.
    """
    pieces, row = [], 0
    for owned in layout.ranges_per_rank[source]:
        for keys in need:
            first, last = (
                max(0, -((owned.start - end) // owned.step)) for end in (keys.start, keys.stop)
            )
            if common := owned[first:last]:
                pieces.append(Piece(source, common, row + first))
        row += len(owned)
    return tuple(pieces)


def _plan_report(mask: Mask, layout: Layout, chunk: int) -> PlanReport:
    moved = _moved(mask, layout)
    areas = tuple(sum(_area(mask, rows) for rows in ranges) for ranges in layout.ranges_per_rank)
    largest = max(
        (
            _area(mask, range(a, min(a + chunk, layout.tokens)))
            for a in range(0, layout.tokens, chunk)
        ),
        default=0,
    )
    received, sent = (tuple(map(sum, table)) for table in (moved, zip(*moved, strict=True)))
    return PlanReport(layout.tokens, areas, received, sent, largest)


def _area(mask: Mask, rows: range) -> int:
    """Return the visible cells of ``rows``. `Band.pick` needs one stride for queries and keys."""
    columns = [range(residue, mask.keys, rows.step) for residue in range(rows.step)]
    touched = [band for band in mask.bands if band.q_start <= rows[-1] and band.q_stop > rows.start]
    return sum(band.pick(rows, some).area for band in touched for some in columns)


class GroupCast:
    """A group cast in flight."""

    def __init__(self, x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None):
        rank, sizes = check_rows("group_cast: x", x, plan, stage, group)
        # keeps the memory until the exchange ends
        self.sent = x[plan.send_rows(stage, rank).to(x.device)]
        self.received = x.new_empty(sum(sizes.received), *x.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, self.sent, sizes.received, sizes.sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


class GroupReduce:
    """A group reduce in flight."""

    def __init__(
        self, y: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, into: Tensor
    ):
        rank, self.sizes = check_rows("group_reduce: y", y, plan, stage, group, received=True)
        self.into = into
        self.rows = plan.send_rows(stage, rank).to(y.device)  # the rows that the cast sent
        self.sent = y.contiguous()
        self.received = y.new_empty(sum(self.sizes.sent), *y.shape[1:])
        self.work = dist.all_to_all_single(
            self.received,
            self.sent,
            self.sizes.sent,
            self.sizes.received,
            group=group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        """Add the received rows to this rank's tokens in rank order, and return these."""
        self.work.wait()
        total = self.into.to(accumulate_dtype(self.into.dtype))
        parts = self.received.to(total.dtype).split(self.sizes.sent)
        for rows, part in zip(self.rows.split(self.sizes.sent), parts, strict=True):
            total[rows] += part  # each rank sends at most one row for a token
        return self.into.copy_(total)


def _group_cast(
    x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, *_: Any
) -> Tensor:
    return GroupCast(x, plan, stage, group).wait()


def _group_reduce(
    y: Tensor, plan: CastPlan, stage: int, into: Tensor, group: dist.ProcessGroup | None, *_: Any
) -> Tensor:
    return GroupReduce(y, plan, stage, group, into).wait()


cast_plan = public_plans.cast_plan(_cast_plan)
plan_report = public_plans.plan_report(_plan_report)
group_cast = public_group_collectives.group_cast(_group_cast)
group_reduce = public_group_collectives.group_reduce(_group_reduce)
