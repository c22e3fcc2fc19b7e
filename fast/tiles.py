"""Turn a mask into a work table: the tiles of keys that each tile of queries visits.

    mask                 query tiles    spans of key tiles, of BN = 2 keys
    x . . . . .          rows 0:2       partial: keys 0:2
    x x . . . .
    x x x . . .          rows 2:4       partial: keys 2:4     full: keys 0:2
    x x x x . .
    . . . . x .          rows 4:6       partial: keys 4:6     (another document: tiles start where it does)
    . . . . x x

All rows of a tile see a *full* span from end to end, so kernels compute it without mask comparisons. A *partial* span
holds its band. Tiles are cut at the ends of bands (documents) where that saves visits. The longest tiles come first, so that
the last SMs to finish work on short tiles. The transposed table, for dk and dv, swaps queries and keys: tiles of keys own
spans of queries, and a band's (lo, hi) become (-hi, -lo).

All entries are closed forms for each (band, tile), in NumPy. Cost: O(pairs of a band and a tile that overlap).
Memory on the device: 20 bytes a tile and 32 a span. Tables are cached by mask content, tile size and device.

Source: FlexAttention (Dong et al., 2024) introduced block masks with full and partial tiles; bands replace its callbacks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canon.fast.device_plans import device_plan
from canon.reference.mask import Mask

TILE_FIELDS = 5  # row start, row stop, first partial span, first full span, end of the spans
SPAN_FIELDS = 8  # first column, number of tiles; then the band's row start, stop, column start, stop, lo, hi


@dataclass(frozen=True)
class WorkTable:
    """The table that a kernel reads.

    tiles: (n, 5) int32, longest first: start, stop, partial, full, end. The tile has the rows start:stop, the partial spans
        spans[partial:full] and the full spans spans[full:end]. Each row is in one tile, fully masked rows included.
    spans: (m, 8) int32: first column, number of tiles (``columns`` wide if full, else ``partial_columns``), and
        the band in the table's orientation (zeros if full).
    visits: the number of pairs (tile of rows, tile of columns) that a kernel computes. A partial tile counts by its share of
        ``columns``.
    """

    tiles: Tensor
    spans: Tensor
    visits: float

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Return the tensors."""
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
    """Return the table of ``mask`` for tiles of ``rows`` x ``columns``: queries x keys, or keys x queries if ``transposed``.

    Args:
        partial_columns: columns of partial tiles, a divisor of ``columns``; None is ``columns``.
        boxes: for kernels that load boxes of this many columns, else 0. Spans then begin at multiples of it. A tile with
            fewer than ``rows`` rows then has partial spans only, which mask the rows behind its end: another tile owns them.

    Raises ValueError if the mask is too large for 32-bit coordinates.
    """
    partial_columns = partial_columns or columns
    if max(mask.queries, mask.keys) + rows + columns >= 2**30:
        raise ValueError(f"the kernels count tokens in 32 bits: {mask.queries} queries x {mask.keys} keys are too many")
    bands, size = _band_array(mask), mask.queries
    if transposed:
        bands, size = bands[:, [2, 3, 0, 1, 5, 4]] * [1, 1, 1, 1, -1, -1], mask.keys
    even, cut = np.arange(0, size, rows), _cut_starts(bands, size, rows)
    candidates = [even] if np.array_equal(even, cut) else [even, cut]
    tables = [_table(bands, size, starts, rows, columns, partial_columns, boxes) for starts in candidates]
    cost = lambda table: len(table[0]) + table[2]  # visits; the overhead of a tile is about one visit
    tiles, spans, visits = min(tables, key=cost)
    upload = lambda array: torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)
    return WorkTable(upload(tiles), upload(spans), visits)


def _band_array(mask: Mask) -> np.ndarray:
    bands = [(b.q_start, b.q_stop, b.k_start, b.k_stop, b.lo, b.hi) for b in mask.bands]
    return np.array(bands, np.int64).reshape(-1, 6)


def _cut_starts(bands: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Return the first rows of tiles. Tiles restart where a band begins or ends, if a whole tile fits before that row."""
    starts, last = [], 0
    for end in [*np.unique(bands[:, :2]).tolist(), size]:
        if end - last >= rows or (end == size and end > last):
            starts.append(np.arange(last, end, rows))
            last = end
    return np.concatenate(starts) if starts else np.arange(0)


def _table(
    bands: np.ndarray, size: int, starts: np.ndarray, rows: int, columns: int, small: int, boxes: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return tiles, spans and visits, as in WorkTable, of tiles that begin at ``starts``. ``small``: partial_columns."""
    stops = np.append(starts[1:], size)[: len(starts)]
    spans, owner, full = _spans(bands, starts, stops, rows, columns, small, boxes)
    order = np.lexsort((spans[:, 0], full, owner))
    order = order[spans[order, 1] > 0]
    spans, owner, full = spans[order], owner[order], full[order]

    n, ratio = len(starts), columns // small
    ends = np.cumsum(np.bincount(owner, minlength=n))
    partials = np.bincount(owner, full == 0, minlength=n).astype(np.int64)
    begins = np.append(0, ends[:-1])[:n]
    tiles = np.stack([starts, stops, begins, begins + partials, ends], 1)
    work = np.bincount(owner, spans[:, 1] * np.where(full == 1, ratio, 1), minlength=n)
    return tiles[np.argsort(-work, kind="stable")], spans, float(work.sum()) / ratio


def _spans(
    bands: np.ndarray, starts: np.ndarray, stops: np.ndarray, rows: int, columns: int, small: int, boxes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spans of every pair (band, tile) that overlaps, the tile that owns each, and whether it is full (0 or 1).

    Each pair has three spans, some of them empty: partial, full, partial.
    """
    band, tile = _overlaps(bands, starts)
    row_start, row_stop, start, stop, lo, hi = bands[band].T
    first, last = np.maximum(row_start, starts[tile]), np.minimum(row_stop, stops[tile])
    begin, end = np.maximum(start, first + lo), np.minimum(stop, last + hi)  # columns that some row of the tile sees
    all_begin, all_end = np.maximum(start, last - 1 + lo), np.minimum(stop, first + hi + 1)  # that every row sees
    whole = (first == starts[tile]) & (last == stops[tile])  # the band has every row of the tile
    if boxes:
        begin, whole = begin // boxes * boxes, whole & (last - first == rows)
    ratio, count = columns // small, -(-(end - begin) // small)  # from here on in small tiles
    full_from = -(-(all_begin - begin) // small)
    fulls = np.where(whole, np.maximum(0, (all_end - begin - full_from * small) // columns), 0)
    full_from = np.where(fulls > 0, full_from, count)
    full_to = full_from + fulls * ratio

    edges = np.stack([np.zeros_like(count), full_from, full_to, count])
    number = np.diff(edges, axis=0)
    number[1] = fulls
    full = np.broadcast_to(np.array([[0], [1], [0]]), number.shape)
    spans = np.zeros((*number.shape, SPAN_FIELDS), np.int64)
    spans[..., 0], spans[..., 1] = begin + edges[:3] * small, number
    spans[[0, 2], :, 2:] = bands[band]
    if boxes:
        spans[[0, 2], :, 3] = last
    return spans.reshape(-1, SPAN_FIELDS), np.tile(tile, 3), full.ravel()


def _overlaps(bands: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (band, tile) of every band that has rows in a tile, band by band."""
    first = np.searchsorted(starts, bands[:, 0], "right") - 1
    count = np.searchsorted(starts, bands[:, 1], "left") - first
    band = np.repeat(np.arange(len(bands)), count)
    return band, np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[band]
