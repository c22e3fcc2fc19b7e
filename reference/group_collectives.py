"""Group-cast and group-reduce: a rank receives exactly the tokens that it needs, and sends their gradients back.

`cast_plan` finds, from the mask and the layout alone, who needs what; every rank makes the same plan for all ranks:

    need of a rank   =  the keys that its queries see  -  its own
    it receives      =  need, by source rank and by row there: this is the order in which an exchange delivers

    4 ranks       sends to 0   1      2      3         receives
    rank 0        .            a b    .      .         c            (from 1)
    rank 1        c            .      d      .         a b          (from 0)
    rank 2        .            .      .      .         d            (from 1)
    rank 3        .            .      .      .         .            (and still takes part)

`group_cast` moves them by one exchange (all-to-all with sizes of its own for each pair). A token that two ranks need is
sent twice. The received buffer is used as it came; the mask speaks its coordinates. `group_reduce` is the transpose: gradients
of received tokens go back, and each rank adds what comes to its own, rank by rank, in order: same inputs, same bits.

With ``stages`` > 1 the tokens of each pair of ranks are cut in that many nearly equal parts, one for each cast.

Cost: of N numbers a token, a cast moves N (tokens received) items, a reduce as many back. Memory: what is sent, and what is
received, once. Every rank takes part in every exchange; where no rank at all needs anything there is none.

Source: Zewei Tao and Yunpeng Huang, MagiAttention (SandAI, 2025), whose group collectives and zero-redundant ranges these are.
"""

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.reference.call import agreed_cast
from canon.reference.layout import Layout
from canon.reference.mask import Mask
from canon.reference.plan import CastPlan, Piece, staged
from canon.reference.plan_arguments import check_cast, check_rows, checked_chunk
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
    ranks = range(layout.ranks)
    needs = [mask.needed_keys(layout.ranges_per_rank[rank]) for rank in ranks]
    remote = [[_pieces(needs[rank], layout, source) if source != rank else () for source in ranks] for rank in ranks]
    return CastPlan(mask, layout, stages, staged(remote, stages))


def _pieces(need: tuple[range, ...], layout: Layout, source: int) -> tuple[Piece, ...]:
    """What ``source`` holds of the ascending ranges ``need``, by row."""
    pieces, row = [], 0
    for owned in layout.ranges_per_rank[source]:
        for keys in need:
            first, last = (max(0, -((owned.start - end) // owned.step)) for end in (keys.start, keys.stop))
            if common := owned[first:last]:
                pieces.append(Piece(source, common, row + first))
        row += len(owned)
    return tuple(pieces)


def plan_report(mask: Mask, layout: Layout, *, chunk: int | None = None) -> PlanReport:
    """Return the worth of a layout under a mask: by rank, its area and the tokens that it receives and sends.

    Args: ``chunk``, the number of tokens that a plan keeps together, for the lower bound; by default that of `dispatch`.
    Raises ValueError if the mask is not one of the layout's tokens, or chunk < 1; TypeError for arguments of other types.
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
    """The cells of every step-th row: over the columns of each residue the bands stay bands."""
    columns = [range(residue, mask.keys, rows.step) for residue in range(rows.step)]
    touched = [band for band in mask.bands if band.q_start <= rows[-1] and band.q_stop > rows.start]
    return sum(band.pick(rows, some).area for band in touched for some in columns)


# ---------------------------------------------------------------------- what moves
def group_cast(
    x: Float[Tensor, "t ..."], plan: CastPlan, stage: int, *, group: dist.ProcessGroup | None = None
) -> Float[Tensor, "received ..."]:
    """The tokens of other ranks that this rank receives in cast ``stage``, by source and by row. A collective.

    Args: ``x``, this rank's tokens, outermost; ``plan``, the same on all ranks; ``stage`` of its casts; ``group``, the ranks.
    Not differentiable by itself: `group_reduce` is its transpose. Raises ValueError if x, the group or the stage do not
    fit the plan. Source: the module's docstring.
    """
    agreed_cast("group_cast", x, plan, stage, group)
    return GroupCast(x, plan, stage, group).wait()


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
    agreed_cast("group_reduce", y, plan, stage, group, into)
    return GroupReduce(y, plan, stage, group, into).wait()


class GroupCast:
    """A cast under way; `wait` returns what was received."""

    def __init__(self, x: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None):
        rank, sizes = check_rows("group_cast: x", x, plan, stage, group)
        self.sent = x[plan.send_rows(stage, rank).to(x.device)]  # kept alive until it has left
        self.received = x.new_empty(sum(sizes.received), *x.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, self.sent, sizes.received, sizes.sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


class GroupReduce:
    """A reduction under way; `wait` adds what was received to this rank's tokens."""

    def __init__(self, y: Tensor, plan: CastPlan, stage: int, group: dist.ProcessGroup | None, into: Tensor):
        rank, self.sizes = check_rows("group_reduce: y", y, plan, stage, group, received=True)
        self.into = into
        self.rows = plan.send_rows(stage, rank).to(y.device)  # what had been sent comes back
        self.sent = y.contiguous()
        self.received = y.new_empty(sum(self.sizes.sent), *y.shape[1:])
        self.work = dist.all_to_all_single(
            self.received, self.sent, self.sizes.sent, self.sizes.received, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        self.work.wait()
        parts = self.received.to(self.into.dtype).split(self.sizes.sent)
        for rows, part in zip(self.rows.split(self.sizes.sent), parts, strict=True):
            self.into[rows] += part  # a token comes at most once from each rank
        return self.into
