"""Group cast and group reduce: a rank receives exactly the tokens that its queries need, and sends their gradients back.

`cast_plan` derives the tokens that travel from the mask and the layout. All ranks derive the same plan:

    need of a rank   =  the keys that its queries see  -  its own tokens
    order of receipt =  by source rank, then by row on that rank

    4 ranks       sends to 0   1      2      3         receives
    rank 0        .            a b    .      .         c            (from 1)
    rank 1        c            .      d      .         a b          (from 0)
    rank 2        .            .      .      .         d            (from 1)
    rank 3        .            .      .      .         .            (takes part all the same)

`group_cast` is one all-to-all exchange with its own size for each pair of ranks. A token that two ranks need is sent
twice. The received buffer is not reordered: the mask of a step is given in its order (`CastPlan.local_mask`).

`group_reduce` is the transpose. Gradients of received tokens return to the owners. Each rank adds them to the
gradients of its own tokens in rank order, so the same inputs and the same plan give the same bits.

With ``stages`` > 1 the tokens that one rank sends to another are divided into that many nearly equal parts, one for each
cast. The argument ``stage`` is the number of a cast. In magi attention, step ``stage`` + 1 uses that cast.

Cost of a rank that receives R tokens and sends S in one cast, for N elements a token: one all-to-all for the cast, one for
the reduce. It receives R N elements in the cast and S N in the reduce, and adds S N elements.
Peak memory of a cast: the S rows sent and the R rows received. Peak memory of a reduce beyond ``y`` and ``into``: the S rows
received, again in the dtype of ``into`` if that differs, and the sum for one rank. ``y`` is copied unless contiguous.
Limits: every rank takes part in every exchange. A cast that no rank needs is left out of the plan.

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025): the two collectives, which send no unneeded token.
"""

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.cast_plan import CastPlan, Piece, PlanReport, staged
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.runtime.agreement import named_failures
from canon.runtime.call import agreed_cast
from canon.runtime.group import Group
from canon.runtime.plan_arguments import check_cast, check_rows, checked_chunk

__all__ = ["cast_plan", "group_cast", "group_reduce", "plan_report"]


def cast_plan(mask: Mask, layout: Layout, *, stages: int = 1) -> CastPlan:
    """Return the tokens that each rank receives from each other rank. Pure and cached; nothing is sent.

    Args: ``mask`` over the whole sequence; any ``layout``; ``stages``, the number of casts. There are fewer casts if
        every rank sends fewer than ``stages`` tokens to each other rank. 0 is one cast, used in one step together with
        the rank's own keys.
    Raises ValueError if mask and layout differ in their number of tokens, or ``stages`` is not a whole number >= 0.
    Source: the module's docstring.
    """
    check_cast(mask, layout, stages)
    return _cast_plan(mask, layout, stages)


@cached_plan
def _cast_plan(mask: Mask, layout: Layout, stages: int) -> CastPlan:
    ranks = range(layout.ranks)
    needs = [mask.needed_keys(layout.ranges_per_rank[rank]) for rank in ranks]
    remote = [[_pieces(needs[rank], layout, source) if source != rank else () for source in ranks] for rank in ranks]
    return CastPlan(mask, layout, stages, staged(remote, stages))


def _pieces(need: tuple[range, ...], layout: Layout, source: int) -> tuple[Piece, ...]:
    """Return the tokens of the ascending ranges ``need`` that ``source`` holds, in the order of its rows."""
    pieces, row = [], 0
    for owned in layout.ranges_per_rank[source]:
        for keys in need:
            first, last = (max(0, -((owned.start - end) // owned.step)) for end in (keys.start, keys.stop))
            if common := owned[first:last]:
                pieces.append(Piece(source, common, row + first))
        row += len(owned)
    return tuple(pieces)


def plan_report(mask: Mask, layout: Layout, *, chunk: int | None = None) -> PlanReport:
    """Return the balance and the traffic of a layout: each rank's visible cells, and the tokens that it receives and sends.

    Args: ``chunk``, the length of a chunk of `dispatch`, in tokens; None is its default. A chunk is not divided, so its
        area is a lower bound of the largest work.
    Raises ValueError if mask and layout differ in their number of tokens, or chunk < 1. Wrong types raise TypeError.
    Source: the module's docstring.
    """
    plan = cast_plan(mask, layout, stages=0)
    chunk = checked_chunk(chunk, layout.tokens, layout.ranks)
    areas = tuple(sum(_area(mask, rows) for rows in ranges) for ranges in layout.ranges_per_rank)
    largest = max(
        (_area(mask, range(a, min(a + chunk, layout.tokens))) for a in range(0, layout.tokens, chunk)), default=0
    )
    return PlanReport(layout.tokens, areas, *plan.tokens_moved(), largest)


def _area(mask: Mask, rows: range) -> int:
    """Return the visible cells of the queries ``rows``.

    `Band.pick` needs one stride for queries and keys. So the keys are divided by their residue modulo the stride.
    """
    columns = [range(residue, mask.keys, rows.step) for residue in range(rows.step)]
    touched = [band for band in mask.bands if band.q_start <= rows[-1] and band.q_stop > rows.start]
    return sum(band.pick(rows, some).area for band in touched for some in columns)


def group_cast(
    x: Float[Tensor, "t ..."], plan: CastPlan, stage: int, *, group: Group = None
) -> Float[Tensor, "received ..."]:
    """Return the tokens that this rank receives in cast ``stage``, by source rank and by row. A collective.

    Args: ``x`` (t, ...), this rank's tokens; ``plan``, equal on all ranks; ``stage``, the number of the cast, from 0;
        ``group``, a ProcessGroup or a DeviceMesh of one dimension, None for all ranks.
    The result is not differentiable; `group_reduce` sends gradients back. Raises ValueError if x, the group or the stage do
    not fit the plan. Source: the module's docstring.
    """
    group, *_ = agreed_cast("group_cast", x, plan, stage, group)
    with named_failures("group_cast", group, plan.layout.ranks):
        return GroupCast(x, plan, stage, group).wait()


def group_reduce(
    y: Float[Tensor, "received ..."],
    plan: CastPlan,
    stage: int,
    into: Float[Tensor, "t ..."],
    *,
    group: Group = None,
) -> Float[Tensor, "t ..."]:
    """Add the rows ``y`` of all ranks to the tokens that they were cast from, and return ``into``. A collective.

    Args: ``y`` (received, ...), one row for each token that this rank received in cast ``stage``, in that order;
        ``into`` (t, ...), this rank's tokens, changed in place. The others are those of `group_cast`.
    Rows are sent in the dtype of ``y`` and added in the dtype of ``into``, in rank order.
    Raises ValueError if y, into, the group or the stage do not fit the plan. Source: the module's docstring.
    """
    group, *_ = agreed_cast("group_reduce", y, plan, stage, group, into)
    with named_failures("group_reduce", group, plan.layout.ranks):
        return GroupReduce(y, plan, stage, group, into).wait()


class GroupCast:
    """A group cast in flight."""

    def __init__(self, x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None):
        rank, sizes = check_rows("group_cast: x", x, plan, stage, group)
        self.sent = x[plan.send_rows(stage, rank).to(x.device)]  # keeps the memory until the exchange ends
        self.received = x.new_empty(sum(sizes.received), *x.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, self.sent, sizes.received, sizes.sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Wait for the exchange and return the received rows."""
        self.work.wait()
        return self.received


class GroupReduce:
    """A group reduce in flight."""

    def __init__(self, y: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, into: Tensor):
        rank, self.sizes = check_rows("group_reduce: y", y, plan, stage, group, received=True)
        self.into = into
        self.rows = plan.send_rows(stage, rank).to(y.device)  # the rows that the cast sent
        self.sent = y.contiguous()
        self.received = y.new_empty(sum(self.sizes.sent), *y.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, self.sent, self.sizes.sent, self.sizes.received, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Wait for the exchange, add the received rows to this rank's tokens in rank order, and return these."""
        self.work.wait()
        parts = self.received.to(self.into.dtype).split(self.sizes.sent)
        for rows, part in zip(self.rows.split(self.sizes.sent), parts, strict=True):
            self.into[rows] += part  # each rank sends at most one row for a token
        return self.into
