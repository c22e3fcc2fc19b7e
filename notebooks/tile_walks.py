"""Record the walk of a backward pass of `canon.reference` over tiles: its products, its order, and
the owner of each addition.

    walk = recorded_walk("fused", Mask.causal(512))
    walk.products, walk.exponentials            for each visited tile of scores
    walk.owners(by_keys=True)["dq"][3]          the tiles of keys that add to tile 3 of dq

An *owner* is the tile of the outer loop. On a GPU it is one work tile of a CTA.
"""

from collections import Counter
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from canon.masks.mask import Mask
from canon.reference import backward
from canon.reference.local import attention_forward
from canon.reference.tiles import TILE


class TileWalk(TorchFunctionMode):
    """A recorded backward pass. ``visits`` lists (by keys, row, column) of the tiles of scores, in
    order.

    ``added`` lists (by keys, name, tile, owner) of the additions to gradients. ``operations``
    counts FLOPs.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.operations, self._adds_to_keys = Counter(), 0, 0
        self.visits: list[tuple[bool, int, int]] = []
        self.added: list[tuple[bool, str, int, int]] = []
        self._visible_tiles = backward.visible_tiles

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.counts[function.__name__] += 1
        if function.__name__ == "__setitem__" and args[0].dim() == 4:
            by_keys, row, column = self.visits[-1]
            name = "dk, dv" if self._adds_to_keys > 0 else "dq"
            self._adds_to_keys -= 1
            self.added.append((by_keys, name, args[1][2].start // TILE, column if by_keys else row))
        return function(*args, **(kwargs or {}))

    def visible_tiles(
        self, mask: Mask, device: torch.device, by_keys: bool = False, whole_tiles: bool = False
    ):
        """Replace `canon.reference.tiles.visible_tiles`."""
        for outer, strip in self._visible_tiles(mask, device, by_keys, whole_tiles):
            yield outer, self._recorded(outer, strip, by_keys)

    def _recorded(self, outer, strip, by_keys):
        for inner, cells in strip:
            row, column = (x.start // TILE for x in ((inner, outer) if by_keys else (outer, inner)))
            self.visits.append((by_keys, row, column))
            self._adds_to_keys = 2 if by_keys else 0  # dv and dk are added first
            yield inner, cells

    @property
    def tiles(self) -> int:
        """The number of visible tiles of scores."""
        return len({visit[1:] for visit in self.visits})

    @property
    def products(self) -> int:
        """Matrix products for each visible tile."""
        return self.counts["matmul"] // self.tiles

    @property
    def exponentials(self) -> int:
        """How often the exponentials of a visible tile are computed."""
        return self.counts["exp"] // self.tiles

    def order(self, by_keys: bool) -> list[tuple[int, int, int]]:
        """Return (row, column, owner) of the tiles of one loop, in order."""
        return [
            (row, column, column if by_keys else row)
            for loop, row, column in self.visits
            if loop == by_keys
        ]

    def owners(self, by_keys: bool) -> dict[str, dict[int, list[int]]]:
        """Return the owners that add to each tile of a gradient in one loop:
        ``owners[name][tile]``.
        """
        found: dict[str, dict[int, list[int]]] = {}
        for loop, name, tile, owner in self.added:
            if loop == by_keys:
                owners = found.setdefault(name, {}).setdefault(tile, [])
                owners += [] if owner in owners else [owner]
        return found

    @property
    def most_owners(self) -> int:
        """The largest number of owners that add to one tile of a gradient."""
        both = (self.owners(by_keys) for by_keys in (False, True))
        return max(
            len(owners) for found in both for tiles in found.values() for owners in tiles.values()
        )


def recorded_walk(
    method: str, mask: Mask, *, h: int = 4, g: int = 2, d: int = 8, dv: int = 6
) -> TileWalk:
    """Return the walk of one backward pass with this method, on random float64 inputs."""
    q, dout = (torch.randn(1, mask.queries, h, width).double() for width in (d, dv))
    k, v = (torch.randn(1, mask.keys, g, width).double() for width in (d, dv))
    out, lse = attention_forward(q, k, v, mask)
    walk, flops = TileWalk(), FlopCounterMode(display=False)
    with walk, flops, mock.patch.object(backward, "visible_tiles", walk.visible_tiles):
        backward.attention_backward(dout, q, k, v, out, lse, mask, method=method)
    walk.operations = flops.get_total_flops()
    return walk
