"""Pictures of masks: bands in colours, several masks side by side, a window of a mask, and masks of
any size.
"""

from collections.abc import Iterable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from torch import Tensor

from canon.show.style import INK, RANKS, colour, matrix, plt, styled

if TYPE_CHECKING:
    from canon.masks.mask import Mask

CELLS = 512  # cells of a picture along each side


def band_numbers(mask: "Mask") -> Tensor:
    """Return the matrix int64 [queries, keys] that has i + 1 in the cells of band i, and 0 in
    hidden cells.
    """
    values = torch.zeros(mask.queries, mask.keys, dtype=torch.long, device="cpu")
    for number, b in enumerate(mask.bands, 1):
        queries, keys = (
            torch.arange(*x, device="cpu") for x in ((b.q_start, b.q_stop), (b.k_start, b.k_stop))
        )
        offset = keys - queries[:, None]
        values[b.q_start : b.q_stop, b.k_start : b.k_stop][(offset >= b.lo) & (offset <= b.hi)] = (
            number
        )
    return values


def bands(ax, mask, title="", colours=RANKS):
    """Draw a small mask with one colour for each band. Return its matrix of colour indices."""
    values = band_numbers(mask)
    values = torch.where(values > 0, (values - 1) % len(colours) + 1, 0)
    matrix(ax, values, colours, title)
    return values


@styled
def gallery(masks, columns=4):
    """Draw masks by name, with one colour for each band."""
    rows = -(-len(masks) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.5 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
    for ax, (name, mask) in zip(axes.flat, masks.items(), strict=False):
        count = len(mask.bands)
        bands(ax, mask, f"{name}\n{count} band{'s' * (count != 1)}, {mask.area} cells")
    for ax in axes.flat[len(masks) :]:
        ax.axis("off")
    for ax in axes[:, 0]:
        ax.set_ylabel("queries")
    for ax in axes[-1]:
        ax.set_xlabel("keys")
    return figure


@styled
def crop(mask, rows, columns):
    """Draw a mask with a window, and the mask of this window in its own coordinates, in the same
    colours.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7, 3.6), width_ratios=[mask.keys, len(columns)]
    )
    values = bands(left, mask, f"mask, {mask.queries} x {mask.keys}")
    frame = (columns.start - 0.5, rows.start - 0.5), len(columns), len(rows)
    left.add_patch(Rectangle(*frame, fill=False, edgecolor=INK, linewidth=2, zorder=5))
    window = mask.crop(rows, columns)
    inside, numbers = values[list(rows)][:, list(columns)], band_numbers(window)
    colours = [
        colour(int(inside[numbers == 1 + place][0]) - 1) for place in range(len(window.bands))
    ]
    bands(right, window, f"crop({rows}, {columns})", colours)
    for ax, height, width in ((left, mask.queries, mask.keys), (right, len(rows), len(columns))):
        ax.set_xticks(range(0, width, -(-width // 10)))
        ax.set_yticks(range(0, height, -(-height // 10)))
        ax.tick_params(labelbottom=True, labelleft=True, labelsize=7)
        ax.set(xlabel="keys", ylabel="queries")
    figure.tight_layout()
    return figure


def sample_step(sizes: Sequence[int], strides: Iterable[int] = ()) -> int:
    """Return the least n such that every n-th of so many tokens are at most `CELLS`.

    n has no factor in common with the ``strides`` of a layout: otherwise all samples could lie on
    one rank. Raises ValueError if a size is 0.
    """
    if min(sizes) < 1:
        raise ValueError(f"there is nothing to draw: {' x '.join(map(str, sizes))} tokens")
    step = -(-max(sizes) // CELLS)
    while any(gcd(step, stride) > 1 for stride in strides):
        step += 1
    return step


def cells(ax, values: Tensor, colours: Sequence[str], mask: "Mask", step: int) -> None:
    """Draw a matrix of colour indices, the cells of every ``step``-th query and key of a mask. Axes
    count tokens.
    """
    right, bottom = (step * size for size in (values.shape[1], values.shape[0]))
    look: dict[str, Any] = dict(
        vmin=0, vmax=len(colours), interpolation="nearest", extent=(0, right, bottom, 0)
    )
    ax.imshow(values.numpy(), cmap=ListedColormap(["white", *colours]), **look)
    ax.set(xlim=(0, mask.keys), ylim=(mask.queries, 0), xlabel="keys", ylabel="queries")
    ax.ticklabel_format(style="plain")
    ax.locator_params(integer=True)  # no tick between two tokens
    for side in ax.spines.values():
        side.set_visible(True)


def counted(number: int, noun: str) -> str:
    """Return "1 band" or "2 bands"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@styled
def plot_mask(mask: "Mask", ax=None):
    """Draw a mask of any size with one colour for each band, and return the axes.
    See `Mask.plot`.
    """
    if ax is None:
        ax = plt.subplots(figsize=(4.6, 4.6), layout="constrained")[1]
    step = sample_step((mask.queries, mask.keys))
    numbers = band_numbers(mask.crop(range(0, mask.queries, step), range(0, mask.keys, step)))
    cells(ax, torch.where(numbers > 0, (numbers - 1) % len(RANKS) + 1, 0), RANKS, mask, step)
    of = f"\none cell for every {step} queries and keys" if step > 1 else ""
    ax.set_title(f"{counted(len(mask.bands), 'band')}, {counted(mask.area, 'cell')}{of}")
    return ax
