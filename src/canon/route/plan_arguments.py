"""Checks and defaults of the arguments of `dispatch`, `cast_plan`, `group_cast` and `group_reduce`.
Types of errors are those of `canon.route.checks`.
"""

from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from warnings import warn
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from canon.masks.arguments import flag, shown, whole
from canon.masks.cast_plan import CastPlan
from canon.masks.cuts import only_others_cut
from canon.masks.layout import TILE, Layout, check_size
from canon.masks.mask import Mask, Masks
from canon.masks.plan_cache import are_noted
from canon.ranks.group import place_in
from canon.ranks.movement import missing_document
from canon.route.checks import refuse_numbers
from canon.route.packing import block_diagonal, differ

USUAL_CHUNK = 1024  # tokens
FEWEST_CHUNKS, MOST_CHUNKS = 8, 32  # of a rank


# of `dispatch`, by mask and ranks
PLANNED: WeakValueDictionary[tuple[Mask, int], Layout] = WeakValueDictionary()


@dataclass(frozen=True)
class Sizes:
    """The tokens that a rank sends to and receives from each rank in one cast."""

    sent: list[int]
    received: list[int]


def check_rows(
    name: str,
    x: Tensor,
    plan: CastPlan,
    stage: int,
    group: dist.ProcessGroup | None,
    received: bool = False,
) -> tuple[int, Sizes]:
    """Return this rank and the sizes of its cast. Raise ValueError unless group, plan and the rows
    of ``x``, sent or ``received``, fit.
    """
    _, rank, ranks = place_in(name.partition(":")[0], group)
    if ranks != plan.layout.ranks:
        raise ValueError(
            f"{name}: the plan is for {plan.layout.ranks} ranks, the group has {ranks}"
        )
    if not 0 <= stage < plan.casts:
        raise ValueError(
            f"{name}: stage {stage} is not one of the plan's {plan.casts} casts, counted from 0"
        )
    sizes = Sizes(plan.send_sizes(stage, rank), plan.receive_sizes(stage, rank))
    expected = sum(sizes.received) if received else plan.layout.size(rank)
    if x.shape[0] != expected:
        raise ValueError(
            f"{name} has {x.shape[0]} rows, rank {rank} of the plan has {expected} tokens here"
        )
    return rank, sizes


def check_into(into: Tensor, y: Tensor, plan: CastPlan, rank: int) -> None:
    """Raise ValueError unless ``into`` has a row like those of ``y`` for each token."""
    expected = (plan.layout.size(rank), *y.shape[1:])
    if tuple(into.shape) != expected:
        raise ValueError(
            f"group_reduce: into must be {expected}, the tokens of rank {rank}, got "
            f"{tuple(into.shape)}"
        )


def default_chunk(tokens: int, ranks: int) -> int:
    """Return a chunk of 1024 tokens, shorter for 8 chunks a rank, longer for at most 32.

    Fewer than 8 balance badly; planning takes the square of their number. The length is a multiple
    of 128, the tile of a kernel, or else of 16.
    """
    most = min(USUAL_CHUNK, tokens // (FEWEST_CHUNKS * ranks))
    unit = next((unit for unit in (128, 16) if unit <= most), 1)
    least = -(-tokens // (MOST_CHUNKS * ranks * unit))
    return unit * max(1, most // unit, least)


def one_mask(mask: Masks) -> tuple[Mask, int]:
    """Return the mask that `dispatch` plans, and its number of different sequences."""
    refuse_numbers(mask, "dispatch: mask")
    masks = [mask] if isinstance(mask, Mask) else mask
    if not isinstance(masks, (tuple, list)):
        raise TypeError(
            f"dispatch: mask must be a Mask, got {shown(mask)}: pass Mask.causal(tokens), ..."
        )
    for place, each in enumerate(masks):
        name = "mask" if each is mask else f"mask[{place}]"
        if not isinstance(each, Mask):
            raise TypeError(f"dispatch: {name} must be a Mask, got {shown(each)}")
        if each.queries != each.keys:
            raise ValueError(
                f"dispatch needs a key for each query: {name} is {each.queries} x "
                f"{each.keys}, not square"
            )
        if each.queries != masks[0].queries:
            raise ValueError(
                f"dispatch needs masks of one size: mask[0] has {masks[0].queries} tokens, {name} "
                f"{each.queries}"
            )
    if not masks:
        raise ValueError(
            "dispatch: mask holds no Mask: pass one for each sequence, or one Mask for all"
        )
    return (block_diagonal(tuple(masks)), len(masks)) if differ(masks) else (masks[0], 1)


def checked_dispatch(
    mask: Mask,
    sequences: int,
    ranks: int,
    chunk: int | None,
    imbalance: float,
    cells_per_us: int,
    tokens_per_us: int,
    swaps_per_chunk: int,
    rank_invariant: bool,
) -> tuple[int, int, Fraction, int, int, int]:
    """Return (ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk) as ints and
    one fraction. Warn if an explicit chunk leaves a rank empty.
    """
    ranks, swaps = whole("ranks", ranks, 1), whole("swaps_per_chunk", swaps_per_chunk, 0)
    cells_per_us = whole("cells_per_us", cells_per_us, 1)
    tokens_per_us = whole("tokens_per_us", tokens_per_us, 1)
    if isinstance(imbalance, bool) or not isinstance(imbalance, Real):
        raise TypeError(f"imbalance must be a number >= 1, got {shown(imbalance)}: pass a float")
    if not 1 <= imbalance < float("inf"):
        raise ValueError(
            "imbalance is the largest work divided by its lower bound, so at least "
            f"1; got {imbalance}"
        )
    allowed = Fraction(float(imbalance))
    fits = lambda area: max(area * allowed * tokens_per_us, mask.keys * cells_per_us) < 2**62
    if not fits(mask.queries * mask.keys) and not fits(mask.area):
        raise ValueError(
            f"cells_per_us={cells_per_us}, tokens_per_us={tokens_per_us} and "
            f"imbalance={imbalance} are too large for "
            f"{mask.area} cells in 64 bits: only the ratio of the two rates matters, so divide both"
        )
    flag("dispatch: rank_invariant", rank_invariant)
    tokens = mask.queries // sequences
    together, default = checked_chunk(chunk, tokens, ranks), default_chunk(tokens, ranks)
    if rank_invariant:
        if chunk is not None and chunk % TILE:
            raise ValueError(
                f"dispatch: rank_invariant=True needs a chunk that is a multiple of {TILE} tokens, "
                f"got {chunk}: call dispatch(..., chunk={-(-chunk // TILE) * TILE}, "
                "rank_invariant=True), or leave chunk None"
            )
        together, default = (-(-tokens // TILE) * TILE for tokens in (together, default))
    chunks = -(-tokens // together)
    if chunk is not None and chunks < ranks <= tokens and together > default:
        warn(
            f"dispatch: chunk={chunk} leaves {ranks - chunks} of {ranks} ranks without a token, as "
            f"{tokens} tokens make fewer chunks than ranks: pass chunk={default}, the default",
            stacklevel=3,
        )
    return ranks, together, allowed, cells_per_us, tokens_per_us, swaps


def checked_chunk(chunk: int | None, tokens: int, ranks: int) -> int:
    """Return ``chunk``, at most ``tokens`` + 1, or the default if it is None."""
    return (
        default_chunk(tokens, ranks) if chunk is None else min(whole("chunk", chunk, 1), tokens + 1)
    )


def warn_of_planned(
    function: str,
    mask: Mask,
    layout: Layout,
    rank: int,
    columns: int,
    is_default: bool,
    stacklevel: int = 7,
) -> bool:
    """Warn, and return True, if `magi_attention` takes a default layout, but `dispatch` has planned
    another one that fits.
    """
    if not is_default or function != "magi_attention":
        return False
    planned = [(PLANNED.get((mask, layout.ranks // heads)), heads) for heads in {1, columns}]
    divided = [one if heads == 1 else one.divided(heads) for one, heads in planned if one]
    found = any(one != layout and one.size(rank) == layout.size(rank) for one in divided)
    if found:
        warn(
            f"{function}: dispatch has planned a layout for this mask, but none is passed, so "
            "tokens are taken to be contiguous: pass layout=, the result of dispatch, if it "
            "divided them, or layout=Layout.contiguous(tokens, ranks)",
            stacklevel=stacklevel,  # the caller's line
        )
    return found


def warn_of_another_cut(function: str, layout: Layout, rank: int) -> None:
    """Warn if other layouts have divided tensors of this size, but not this one."""
    if not are_noted() and only_others_cut(layout, rank):  # plans may be made before the cut
        warn(
            f"{function}: tensors of {layout.tokens} tokens on {layout.ranks} ranks were divided "
            "here, but none by the layout of this call: pass the layout that divided q, k and v "
            "as layout= of ring_attention, strided_attention or magi_attention, or divide them "
            "by this one",
            stacklevel=7,
        )


def warn_of_documents(function: str, layout: Layout) -> None:
    """Warn if a call without a mask takes a layout planned for documents."""
    if (token := missing_document(layout)) is not None:
        warn(
            f"{function}: mask=None is causal, but in the mask that dispatch has planned this "
            f"layout for, a document begins at token {token}: pass that mask, or else "
            "Mask.causal(tokens)",
            stacklevel=7,
        )


def check_cast(mask: Mask, layout: Layout) -> None:
    """Raise if the mask or the layout of a plan is wrong."""
    for name, value, kind in (("mask", mask, Mask), ("layout", layout, Layout)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}")
    check_size(mask, layout)


def checked_casts(casts: int | None, own_keys_first: bool | None) -> tuple[int, bool | None]:
    """Return the options of a cast plan with their defaults. None is `own_keys_come_first`."""
    casts = 1 if casts is None else whole("casts", casts, 1)
    if own_keys_first is None:
        return casts, True if casts > 1 else None
    if not flag("own_keys_first", own_keys_first) and casts > 1:
        raise ValueError(
            f"casts={casts} needs own_keys_first=True or None: one step uses own "
            "keys and a single cast"
        )
    return casts, own_keys_first
