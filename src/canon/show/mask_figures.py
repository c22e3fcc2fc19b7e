"""Pictures of masks of any size, with one colour for each band."""

from collections.abc import Iterable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.colors import ListedColormap
from torch import Tensor

from canon.masks.mask import cells_of
from canon.show.style import RANKS, plt, styled

if TYPE_CHECKING:
    from canon.masks.mask import Mask

CELLS = 512  # cells of a picture along each side


def band_numbers(mask: "Mask") -> Tensor:
    """Return int64 [queries, keys]: i + 1 in the cells of band i, and 0 in hidden cells."""
    values = torch.zeros(mask.queries, mask.keys, dtype=torch.long, device="cpu")
    for number, b in enumerate(mask.bands, 1):
        values[b.q_start : b.q_stop, b.k_start : b.k_stop][cells_of(b)] = number
    return values


def sample_step(sizes: Sequence[int], strides: Iterable[int] = ()) -> int:
    """Return the least n such that every n-th token makes at most `CELLS`, coprime to ``strides``:
    samples lie on all ranks. Raises ValueError if a size is 0.
    """
    if min(sizes) < 1:
        raise ValueError(f"there is nothing to draw: {' x '.join(map(str, sizes))} tokens")
    step = -(-max(sizes) // CELLS)
    while any(gcd(step, stride) > 1 for stride in strides):
        step += 1
    return step


def cells(ax, values: Tensor, colours: Sequence[str], mask: "Mask", step: int) -> None:
    """Draw the cells of every ``step``-th query and key by colour index. Axes count tokens."""
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
    """Draw a mask of any size, and return the axes. See `Mask.plot`."""
    if ax is None:
        ax = plt.subplots(figsize=(4.6, 4.6), layout="constrained")[1]
    step = sample_step((mask.queries, mask.keys))
    numbers = band_numbers(mask.crop(range(0, mask.queries, step), range(0, mask.keys, step)))
    cells(ax, torch.where(numbers > 0, (numbers - 1) % len(RANKS) + 1, 0), RANKS, mask, step)
    of = f"\none cell for every {step} queries and keys" if step > 1 else ""
    ax.set_title(f"{counted(len(mask.bands), 'band')}, {counted(mask.area, 'cell')}{of}")
    return ax
