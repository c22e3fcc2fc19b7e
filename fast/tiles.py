"""A mask becomes a work table: which tiles of keys each tile of queries has to visit.

    mask                 query tiles    spans of key tiles, of BN = 2 keys
    x . . . . .          rows 0:2       partial: keys 0:2
    x x . . . .
    x x x . . .          rows 2:4       partial: keys 2:4     full: keys 0:2
    x x x x . .
    . . . . x .          rows 4:6       partial: keys 4:6     (another document: tiles start where it does)
    . . . . x x

A *full* span is visible from end to end to every row of its tile, so that a kernel computes it without one compare.
A *partial* span carries its band. Tiles are cut at the ends of bands (documents) where that saves visits, and stand
longest first, so that the last processors to finish are busy with short ones. The transposed table, for dk and dv,
swaps queries and keys: tiles of keys own spans of queries, and a band's lo, hi become -hi, -lo.

Everything is closed form per (band, tile), in NumPy: cost O(tiles touched by bands).
Memory on the device: 20 bytes a tile and 32 a span. Tables are cached by mask content, tile size and device.

Source: block masks with full and partial tiles are FlexAttention's (Dong et al., 2024); bands replace its callbacks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canon.fast.device_plans import device_plan
from canon.reference.mask import Mask

TILE_FIELDS = 5  # first row, row behind the last, first partial span, first full span, span behind the last
SPAN_FIELDS = 8  # first column, number of tiles, then the band's row start, stop, column start, stop, lo, hi


@dataclass(frozen=True)
class WorkTable:
    """What a kernel reads.

    ``tiles`` (n, 5) int32, longest first: the rows start:stop of the tile, then its partial spans
    spans[partial:full] and its full ones spans[full:end]; the tiles hold every row once, rows that see nothing included.
    ``spans`` (m, 8) int32: first column, number of tiles (``columns`` wide if full, else ``partial_columns``), and
    the band in the table's orientation (zeros where full). ``visits``: how often a tile of rows visits one of columns;
    partial ones count by their number of columns.
    """

    tiles: Tensor
    spans: Tensor
    visits: float

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The tensors."""
        return self.tiles, self.spans


@device_plan
def work_table(
    mask: Mask,
    rows: int,
    columns: int,
    partial_columns: int | None = None,
    transposed: bool = False,
    device: torch.device | str = "cpu",
    boxes: int = 0,
) -> WorkTable:
    """The table of ``mask`` for tiles of ``rows`` x ``columns``: queries x keys, or keys x queries if ``transposed``.

    Partial tiles have ``partial_columns`` columns, a divisor of ``columns``, by default as many.
    ``boxes``: for kernels that load whole boxes. Spans begin at multiples of so many columns, and a tile that is short of
    rows has partial spans alone, so that the rows behind its end, which are another tile's, see nothing.
    Raises ValueError if the mask is too large for 32-bit coordinates.
    """
    partial_columns = partial_columns or columns
    if max(mask.queries, mask.keys) + rows + columns >= 2**30:
        raise ValueError(f"the kernels count tokens in 32 bits: {mask.queries} queries x {mask.keys} keys are too many")
    bands, size = _numbers(mask), mask.queries
    if transposed:
        bands, size = bands[:, [2, 3, 0, 1, 5, 4]] * [1, 1, 1, 1, -1, -1], mask.keys
    even, cut = np.arange(0, size, rows), _cut_starts(bands, size, rows)
    candidates = [even] if np.array_equal(even, cut) else [even, cut]
    tables = [_table(bands, size, starts, rows, columns, partial_columns, boxes) for starts in candidates]
    tiles, spans, visits = min(tables, key=lambda table: len(table[0]) + table[2])  # a tile costs about a visit
    upload = lambda array: torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)
    return WorkTable(upload(tiles), upload(spans), visits)


def _numbers(mask: Mask) -> np.ndarray:
    bands = [(b.q_start, b.q_stop, b.k_start, b.k_stop, b.lo, b.hi) for b in mask.bands]
    return np.array(bands, np.int64).reshape(-1, 6)


def _cut_starts(bands: np.ndarray, size: int, rows: int) -> np.ndarray:
    """First rows of tiles that start again where bands begin or end, if at least one whole tile fits before."""
    starts, last = [], 0
    for end in [*np.unique(bands[:, :2]).tolist(), size]:
        if end - last >= rows or (end == size and end > last):
            starts.append(np.arange(last, end, rows))
            last = end
    return np.concatenate(starts) if starts else np.arange(0)


def _table(
    bands: np.ndarray, size: int, starts: np.ndarray, rows: int, columns: int, small: int, boxes: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Tiles, spans and visits, as in WorkTable, of tiles that begin at ``starts``; partial tiles are ``small``."""
    stops = np.append(starts[1:], size)[: len(starts)]
    band, tile = _touched(bands, starts)
    row_start, row_stop, start, stop, lo, hi = bands[band].T
    first, last = np.maximum(row_start, starts[tile]), np.minimum(row_stop, stops[tile])
    begin, end = np.maximum(start, first + lo), np.minimum(stop, last + hi)  # columns that some row of the tile sees
    all_begin, all_end = np.maximum(start, last - 1 + lo), np.minimum(stop, first + hi + 1)  # that every row sees
    whole = (first == starts[tile]) & (last == stops[tile])  # the band holds every row of the tile
    if boxes:
        begin, whole = begin // boxes * boxes, whole & (last - first == rows)
    ratio, count = columns // small, -(-(end - begin) // small)  # in small tiles from here on
    full_from = -(-(all_begin - begin) // small)
    fulls = np.where(whole, np.maximum(0, (all_end - begin - full_from * small) // columns), 0)
    full_from = np.where(fulls > 0, full_from, count)
    full_to = full_from + fulls * ratio

    edges = np.stack([np.zeros_like(count), full_from, full_to, count])
    number = np.diff(edges, axis=0)  # tiles of three spans: partial, full, partial
    number[1] = fulls
    kind = np.broadcast_to(np.array([[0], [1], [0]]), number.shape)
    spans = np.zeros((*number.shape, SPAN_FIELDS), np.int64)
    spans[..., 0], spans[..., 1] = begin + edges[:3] * small, number
    spans[[0, 2], :, 2:] = bands[band]
    if boxes:
        spans[[0, 2], :, 3] = last
    spans, number, kind = spans.reshape(-1, SPAN_FIELDS), number.ravel(), kind.ravel()
    owner = np.tile(tile, 3)
    order = np.lexsort((spans[:, 0], kind, owner))
    order = order[number[order] > 0]
    spans, owner, kind = spans[order], owner[order], kind[order]

    n = len(starts)
    ends = np.cumsum(np.bincount(owner, minlength=n))
    partials = np.bincount(owner, kind == 0, minlength=n).astype(np.int64)
    begins = np.append(0, ends[:-1])[:n]
    tiles = np.stack([starts, stops, begins, begins + partials, ends], 1)
    work = np.bincount(owner, spans[:, 1] * np.where(kind == 1, ratio, 1), minlength=n)
    return tiles[np.argsort(-work, kind="stable")], spans, float(work.sum()) / ratio


def _touched(bands: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(band, tile) of every tile that a band has rows in, band by band."""
    first = np.searchsorted(starts, bands[:, 0], "right") - 1
    count = np.searchsorted(starts, bands[:, 1], "left") - first
    band = np.repeat(np.arange(len(bands)), count)
    return band, np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[band]
