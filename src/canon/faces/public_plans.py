"""`dispatch`, `cast_plan` and `plan_report`: layouts and casts for a mask."""

from collections.abc import Callable

from canon.masks.cast_plan import CastPlan, PlanReport
from canon.masks.layout import Layout
from canon.masks.mask import Mask, Masks
from canon.ranks.profiling import recorded
from canon.route.binding import bound
from canon.route.plan_arguments import (
    PLANNED,
    check_cast,
    checked_casts,
    checked_chunk,
    checked_dispatch,
    one_mask,
)


def dispatch(planned: Callable[..., Layout]):
    """Return `dispatch` of a half. ``planned`` takes the results of `one_mask` and
    `checked_dispatch`.
    """

    def dispatch(
        mask: Masks,
        ranks: int,
        *,
        chunk: int | None = None,
        imbalance: float = 1.05,
        cells_per_us: int = 4400,
        tokens_per_us: int = 18,
        swaps_per_chunk: int = 1,
        rank_invariant: bool = False,
    ) -> Layout:
        """Return a layout in which ranks compute equally and move few keys. Deterministic, equal on
        all ranks; cached.

        The plan minimises the time of the slowest rank, max(computing, receiving, sending), down to
        ``imbalance`` times the lower bound of computing, then time x traffic. It is never worse
        than zigzag chunks.

        Args:
            mask: over the whole sequence, with as many queries as keys. A tuple or a list holds a
                mask for each sequence: the layout balances the sum of their areas.
            ranks: the number of ranks. For a mesh ("tokens", "heads"), plan rows, then divide:
                ``dispatch(mask, rows).divided(heads)``.
            chunk: the tokens that stay together; the last chunk may be short. Token counts of ranks
                differ by at most one chunk. None: `canon.route.plan_arguments.default_chunk`.
            imbalance: the accepted ratio of the largest area to its lower bound.
            cells_per_us, tokens_per_us: the assumed rates of a rank in cells (of all heads) and
                received tokens per microsecond, both passes together. Defaults: 64 heads of width
                128 at 500 TFLOP/s; 8 key heads at 300 GB/s (bf16 K, V twice; float32 dk, dv).
            swaps_per_chunk: the largest number of swaps, divided by the number of non-empty chunks.
            rank_invariant: fit ``magi_attention(..., rank_invariant=True)``: the chunk is a
                multiple of 128 tokens, and others raise.

        Raises ValueError if the mask is not square or a number is out of range; TypeError for wrong
        types. Warns if an explicit chunk leaves ranks without tokens, although there are enough.
        Source: Tao and Huang, MagiAttention (2025): the problem and the chunks.
        """
        one, sequences = one_mask(mask)
        checked = checked_dispatch(
            one,
            sequences,
            ranks,
            chunk,
            imbalance,
            cells_per_us,
            tokens_per_us,
            swaps_per_chunk,
            rank_invariant,
        )
        with recorded("dispatch"):
            layout = planned(one, sequences, *checked)
        PLANNED[one, layout.ranks] = layout
        if sequences == 1:
            object.__setattr__(layout, "_planned_for", one)
        return layout

    return bound(dispatch, planned)


def cast_plan(planned: Callable[[Mask, Layout, int, bool | None], CastPlan]):
    """Return `cast_plan` of a half."""

    def cast_plan(
        mask: Mask,
        layout: Layout,
        *,
        casts: int | None = None,
        own_keys_first: bool | None = None,
    ) -> CastPlan:
        """Return the tokens that each rank receives from each other rank. Pure and cached; nothing
        is sent.

        Args: as in `magi_attention`. There are fewer casts if every rank sends fewer than ``casts``
            tokens to each other rank.
        Raises ValueError if mask and layout differ in their tokens, or options do not fit together;
        TypeError for wrong types. Source: Tao and Huang, MagiAttention (2025).
        """
        check_cast(mask, layout)
        with recorded("cast_plan"):
            return planned(mask, layout, *checked_casts(casts, own_keys_first))

    return bound(cast_plan, planned)


def plan_report(reported: Callable[[Mask, Layout, int], PlanReport]):
    """Return `plan_report` of a half."""

    def plan_report(mask: Mask, layout: Layout, *, chunk: int | None = None) -> PlanReport:
        """Return the balance and the traffic of a layout: each rank's visible cells, received and
        sent tokens.

        Args: ``chunk``, that of `dispatch`, in tokens. A chunk is not divided, so its area is a
            lower bound of the largest work.
        Raises ValueError or TypeError as `cast_plan`, or if chunk < 1. Source: Tao and Huang,
        MagiAttention (2025).
        """
        check_cast(mask, layout)
        with recorded("plan_report"):
            return reported(mask, layout, checked_chunk(chunk, layout.tokens, layout.ranks))

    return bound(plan_report, reported)
