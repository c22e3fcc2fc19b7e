"""The tiles of a pass in PyTorch: which rows visit which columns.

    mask                 rows 128:256 of a causal mask visit
    x x .                columns   0:128    all cells: no band
    x x /                columns 128:256    the cells of a band

Rows are queries, and columns are keys; in the transposed tables they change roles. A step joins
neighbouring tiles, as each operator costs the host time. In the order of keys each step is one tile
of 128 x 128, filled up with zeros.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import host_table
from canon.masks.plan_cache import cached_plan
from canon.route.checks import accumulate_dtype
from canon.route.rank_invariance import TILE

WIDEST = 1024  # columns of a step
Band = tuple[int, ...]  # row start, stop, column start, stop, lo, hi


class Step(NamedTuple):
    """Columns ``begin:end``, and the ``bands`` of visible cells; () if all are visible."""

    begin: int
    end: int
    bands: tuple[Band, ...]


class RowTile(NamedTuple):
    """Rows ``start:stop`` and their steps, in order."""

    start: int
    stop: int
    steps: tuple[Step, ...]


@cached_plan
def row_tiles(cells: Cells, transposed: bool) -> tuple[RowTile, ...]:
    """Return the tiles of all rows, fully masked ones included; with places the buffer's."""
    tiles, spans, _, whole = host_table(cells, TILE, TILE, TILE, transposed)
    spans = spans.tolist()
    return tuple(
        RowTile(
            start,
            stop,
            tuple(x for span in spans[first:end] for x in _steps(start, stop, span, spans, whole)),
        )
        for start, stop, first, _, end in tiles.tolist()
    )


def _steps(
    start: int, stop: int, span: list[int], spans: list[list[int]], whole: bool
) -> Iterator[Step]:
    begin, number, first, last = span[:4]
    bands = (
        (tuple(span[2:]),) if last > 0 else tuple(tuple(x[2:]) for x in spans[first : first - last])
    )
    end = begin + number * TILE
    if bands and not whole:  # columns outside the band may hold anything
        _, _, column, column_stop, lo, hi = bands[0]
        begin, end = max(begin, column, start + lo), min(end, column_stop, stop + hi)
    width = TILE if whole else WIDEST
    for at in range(begin, end, width):
        yield Step(at, at + width if whole else min(end, at + width), bands)


def visible(rows: RowTile, step: Step, size: int, device: torch.device) -> Tensor | None:
    """Return the visible cells (size, columns), bool; None if all are visible."""
    row = torch.arange(rows.start, rows.start + size, device=device)
    if not step.bands:
        return None if size == rows.stop - rows.start else (row < rows.stop)[:, None]
    column = torch.arange(step.begin, step.end, device=device)
    cells = torch.zeros(size, len(column), dtype=torch.bool, device=device)
    for start, stop, begin, end, lo, hi in step.bands:
        left, right = (row + lo).clamp(min=begin), (row + hi + 1).clamp(max=end)
        right = torch.where((row >= start) & (row < stop), right, left)
        cells |= (column >= left[:, None]) & (column < right[:, None])
    return cells


class Operands:
    """Tensors of a call with their heads first, in the accumulation dtype: (b, g, share, tokens,
    width). A tensor with fewer than ``owners`` heads is repeated. If tiles are ``whole`` (128 x
    128), each query head has its own, and widths are filled up with zeros to multiples of 8, as in
    `canon.reference.tiles.in_whole_tiles`. Else heads that share a key head are rows of one
    product.
    """

    def __init__(self, cells: Cells, q: Tensor, k: Tensor, owners: int):
        self.whole = cells.places is not None
        self.owners = q.shape[2] if self.whole else owners
        self.dtype = accumulate_dtype(q.dtype)

    def of_inputs(self, *inputs: Tensor) -> list[Tensor]:
        """Return q, k, v or dout with heads first. Whole tiles have the width of a product."""
        filled = lambda x: pad(x, (0, -x.shape[3] % 8)) if self.whole and x.shape[3] % 8 else x
        return [self.heads_first(filled(x)) for x in inputs]

    def heads_first(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).to(self.dtype)
        if x.shape[1] < self.owners:
            x = x.repeat_interleave(self.owners // x.shape[1], 1)
        return x.contiguous().unflatten(1, (self.owners, x.shape[1] // self.owners))

    def rows(self, x: Tensor, tile: RowTile, value: float = 0.0) -> Tensor:
        x = x[..., tile.start : tile.stop, :]
        if self.whole and x.shape[3] < TILE:
            x = pad(x, (0, 0, 0, TILE - x.shape[3]), value=value)
        return x.flatten(2, 3).contiguous()

    def columns(self, x: Tensor, step: Step) -> Tensor:
        """Return the columns of a step: 0 where no band has one."""
        if not (self.whole and step.bands):
            return x[..., step.begin : step.end, :].flatten(2, 3).contiguous()
        tile = x.new_zeros(*x.shape[:3], TILE, x.shape[4])
        for _, _, begin, end, _, _ in step.bands:
            begin, end = max(begin, step.begin), min(end, step.end)
            if begin < end:
                tile[..., begin - step.begin : end - step.begin, :] = x[..., begin:end, :]
        return tile.flatten(2, 3)
