"""Pictures of layouts: the tokens and the work of each rank."""

from typing import TYPE_CHECKING

import torch

from canon.masks.mask import Mask
from canon.show.mask_figures import cells, sample_step
from canon.show.style import RANKS, colour, mean_line, plt, styled

if TYPE_CHECKING:
    from canon.masks.layout import Layout


def areas(layout: "Layout", mask: Mask) -> list[int]:
    """Return the visible cells of each rank."""
    ranks = range(layout.ranks)
    return [layout.local_mask(mask, rank, tuple(ranks)).area for rank in ranks]


def strides(layout: "Layout") -> set[int]:
    """Return the strides of the ranges."""
    return {piece.step for held in layout.ranges_per_rank for piece in held}


def owners_of(layout: "Layout") -> torch.Tensor:
    """Return the colour index of each token's rank: int64 [tokens]."""
    owner = torch.empty(layout.tokens, dtype=torch.long, device="cpu")
    for rank in range(layout.ranks):
        owner[layout.positions(rank)] = rank % len(RANKS)
    return owner


def bars(ax, values: list[float], ylabel: str) -> None:
    """Draw a bar for each rank."""
    ax.bar(range(len(values)), values, color=[colour(rank) for rank in range(len(values))])
    ax.set(xlabel="rank", ylabel=ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)


@styled
def plot_layout(layout: "Layout", mask: Mask | None = None):
    """Draw the rows of a mask in the colours of their ranks, as `Layout.plot`."""
    mask = Mask.causal(layout.tokens) if mask is None else mask
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.6, 4), width_ratios=[1.2, 1], layout="constrained"
    )
    work = areas(layout, mask)  # raises if mask and layout do not fit
    step = sample_step((layout.tokens,), strides(layout))
    every = range(0, layout.tokens, step)
    cells(
        left,
        mask.crop(every, every).dense() * (1 + owners_of(layout)[::step, None]),
        RANKS,
        mask,
        step,
    )
    left.set_title(
        "rows in the colours of their ranks" + f"\none cell for every {step} tokens" * (step > 1)
    )
    mean = sum(work) / len(work)
    bars(
        right, [area / mean if mean else 0.0 for area in work], "visible cells / mean of the ranks"
    )
    mean_line(right)
    right.set_title(f"largest {max(work) / mean:.2f} of the mean" if mean else "no visible cell")
    return figure
