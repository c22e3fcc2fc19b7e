"""Turn a mask into a work table: the tiles of keys that each tile of queries visits.

    mask          query tiles   spans of key tiles, of BN = 2 keys
    x . . . . .   rows 0:2      partial: keys 0:2
    x x . . . .
    x x x . . .   rows 2:4      partial: keys 2:4     full: keys 0:2
    x x x x . .
    . . . . x .   rows 4:6      partial: keys 4:6     (another document: tiles start where it does)
    . . . . x x

All rows of a tile see all of a *full* span; a *partial* span holds its band. Tiles are cut at the
ends of bands where that saves visits, and the longest come first. The transposed table, for dk and
dv, swaps queries and keys.

Cost: O(overlapping pairs of a band and a tile), in C or NumPy. Device memory: 20 bytes a tile, 32 a
span. Source: the block masks of FlexAttention (Dong et al., 2024); bands replace its callbacks."""

from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from canon.fast.c_modules import optional_c_module
from canon.fast.tables.cells import Cells, Places
from canon.fast.tables.device_plans import device_plan
from canon.fast.tables.index_ranges import counted
from canon.fast.tables.key_order import SPAN_FIELDS, Cut, everywhere_banded, ordered_table
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_part, cached_plan
from canon.route.rank_invariance import TILE

TILE_FIELDS = 5


class WorkTable(NamedTuple):
    """The table that a kernel reads.

    tiles: (n, 5), longest first: start, stop, partial, full, end: rows start:stop, partial spans
        spans[partial:full], full spans spans[full:end]. Fully masked rows are in tiles, too.
    spans: (m, 8): first column, number of tiles (``columns`` wide if full, else ``small``), and the
        band in the table's orientation: row start, stop, column start, stop, lo, hi; zeros if full.
    visits: tiles that a kernel computes; a partial tile counts by its share of ``columns``. With
        places: of all ranks.
    key_order: whether rows sum in the order of keys, with the spans of `key_order`."""

    tiles: Any  # an array, or a tensor on a device
    spans: Any
    visits: float
    key_order: bool


@device_plan
def work_table(
    cells: Cells, rows: int, columns: int, small: int, transposed: bool, chained: bool
) -> WorkTable:
    """Return `host_table` without boxes, as int32. In the order of keys, all spans have a band."""
    table = host_table(cells, rows, columns, small, transposed, chained=chained)
    spans = everywhere_banded(table.spans) if table.key_order else table.spans
    return table._replace(tiles=table.tiles.astype(np.int32), spans=spans.astype(np.int32))


def host_table(
    cells: Cells,
    rows: int,
    columns: int,
    small: int,
    transposed: bool = False,
    boxes: int = 0,
    chained: bool = True,
) -> WorkTable:
    """Return the table of ``cells`` for tiles of ``rows`` x ``columns``: queries x keys, or keys x
    queries if ``transposed``. With places, these are the own tiles of the whole mask's
    `ordered_table`, and tiles and spans begin at multiples of their sizes.

    Args:
        small: columns of partial tiles, a divisor of ``columns``; with places, ``columns`` instead.
        boxes: spans begin at multiples of it, for kernels that load boxes of this many columns;
            else 0. A tile with fewer than ``rows`` rows then has partial spans only, which mask the
            rows behind its end.
        chained: as in `ordered_table`, with places.

    Raises ValueError if the mask is too large for 32-bit coordinates."""
    mask, places = cells
    if places is not None:
        cut = _own_part(places, _even_cut(mask, rows, columns, transposed), transposed)
        table = ordered_table(cut, rows, columns, chained)
        return WorkTable(*places.moved(*table, columns, transposed), cut.visits, True)
    if (native := native_tables()) is not None:
        given = *bands_and_size(mask, rows, columns, transposed), rows, columns, small, boxes
        visited, _, tiles, spans = native.table(*given, False)
        return WorkTable(*arrays(tiles, spans), visited, False)
    cut = _best_cut(mask, rows, columns, small, transposed, boxes)
    return WorkTable(*_table(cut, rows, columns, small, boxes), cut.visits, False)


def arrays(tiles: bytearray, spans: bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of a table in C."""
    return (
        np.frombuffer(tiles, np.int64).reshape(-1, TILE_FIELDS),
        np.frombuffer(spans, np.int32).reshape(-1, SPAN_FIELDS),
    )


@lru_cache(maxsize=1)
def native_tables() -> ModuleType | None:
    """Return `schedule.c`, or None where it cannot be compiled: NumPy makes the same tables."""
    return optional_c_module(Path(__file__).parent, "tables.c", "schedule.c")


def count_visits(
    cells: Cells, rows: int, columns: int, transposed: bool = False, boxes: int = 0
) -> tuple[float, int]:
    """Return the ``visits`` and number of tiles of `work_table` without the table. With places, the
    whole mask counts.
    """
    if cells.places is not None:
        cut = _even_cut(cells.mask, rows, columns, transposed)
    elif (native := native_tables()) is not None:
        given = *bands_and_size(cells.mask, rows, columns, transposed), rows, columns, columns
        return native.table(*given, boxes, True)
    else:
        cut = _best_cut(cells.mask, rows, columns, columns, transposed, boxes)
    return cut.visits, len(cut.starts)


visits = cached_plan(count_visits)


@cached_plan
def band_array(mask: Mask) -> np.ndarray:
    """Return the bands (n, 6), int64: query start and stop, key start and stop, lo, hi; columns
    contiguous.
    """
    if (native := native_tables()) is not None:
        return np.frombuffer(native.bands(mask.bands), np.int64).reshape(6, -1).T
    numbers = np.fromiter(chain.from_iterable(mask.bands), np.int64, 6 * len(mask.bands))
    return np.asfortranarray(numbers.reshape(-1, 6))


@cached_plan
def area(mask: Mask) -> int:
    """Return ``mask.area``, without a loop."""
    if (native := native_tables()) is not None:
        return native.area(band_array(mask).T)
    q_start, q_stop, k_start, k_stop, lo, hi = band_array(mask).T
    queries, keys = q_stop - q_start, k_stop - k_start
    # diagonals outside the band
    below, above = lo - (k_start - q_stop + 1), (k_stop - 1 - q_start) - hi
    return int(
        (queries * keys - _corners(queries, keys, below) - _corners(queries, keys, above)).sum()
    )


def _corners(queries: np.ndarray, keys: np.ndarray, diagonals: np.ndarray) -> np.ndarray:
    """Return the cells on the first ``diagonals`` diagonals from a corner of each rectangle."""
    triangles = lambda n: np.maximum(n, 0) * (n + 1) // 2
    return triangles(diagonals) - triangles(diagonals - queries) - triangles(diagonals - keys)


@cached_part  # `visits` and the table share a cut
def _best_cut(mask: Mask, rows: int, columns: int, small: int, transposed: bool, boxes: int) -> Cut:
    """Return the cheaper cut: at multiples of ``rows``, or at ends of bands too. A tile costs a
    visit.
    """
    bands, size = bands_and_size(mask, rows, columns, transposed)
    even, at_ends = np.arange(0, size, rows), _cut_starts(bands, size, rows)
    candidates = [even] if np.array_equal(even, at_ends) else [even, at_ends]
    cuts = [_cut(bands, size, starts, columns // small, small, boxes) for starts in candidates]
    return min(cuts, key=lambda cut: len(cut.starts) + cut.visits)


def _even_cut(mask: Mask, rows: int, columns: int, transposed: bool) -> Cut:
    """Return the cut at multiples of ``rows`` and ``columns``. Raises ValueError unless both divide
    128.
    """
    if TILE % rows or TILE % columns:
        raise ValueError(
            f"rank_invariant=True needs tiles with sides that divide {TILE}, got {rows} x {columns}"
        )
    bands, size = bands_and_size(mask, rows, columns, transposed)
    return _cut(bands, size, np.arange(0, size, rows), 1, columns, boxes=columns)


def _own_part(places: Places, cut: Cut, transposed: bool) -> Cut:
    own = places.owned(cut.starts, transposed)[cut.tile]
    kept = {
        name: getattr(cut, name)[own] for name in ("band", "tile", "first", "last", "begin", "end")
    }
    return cut._replace(**kept)


def bands_and_size(mask: Mask, rows: int, columns: int, transposed: bool) -> tuple[np.ndarray, int]:
    """Return the bands (6, n), transposed or not, and the rows of the mask. Raises ValueError if it
    is too large.
    """
    if max(mask.queries, mask.keys) + rows + columns >= 2**30:
        raise ValueError(
            f"the kernels count tokens in 32 bits: {mask.queries} queries x "
            f"{mask.keys} keys are too many"
        )
    q_start, q_stop, k_start, k_stop, lo, hi = bands = band_array(mask).T
    if transposed:
        return np.stack([k_start, k_stop, q_start, q_stop, -hi, -lo]), mask.keys
    return bands, mask.queries


def _cut_starts(bands: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Return first rows of tiles that restart where bands begin or end, if a whole tile fits
    before.
    """
    ends = np.sort(np.append(bands[:2], [0, size]))
    following = np.searchsorted(ends, np.minimum(ends + rows, size)).tolist()
    last, cuts = following[0], [0]
    while last != cuts[-1]:  # 50 ns for each cut
        cuts.append(last)
        last = following[last]
    cuts = ends[cuts]
    owner, place = counted(-(-np.diff(cuts) // rows))
    return cuts[owner] + rows * place


def _cut(
    bands: np.ndarray, size: int, starts: np.ndarray, ratio: int, small: int, boxes: int
) -> Cut:
    """Return the cut into tiles that begin at ``starts``. Visits count ``ratio`` times ``small``
    columns.
    """
    stops = np.append(starts[1:], size)[: len(starts)]
    first_tile = np.searchsorted(starts, bands[0], "right") - 1
    band, place = counted(np.searchsorted(starts, bands[1], "left") - first_tile)
    tile = first_tile[band] + place
    row_start, row_stop, start, stop, lo, hi = bands.take(band, 1)
    first, last = np.maximum(row_start, starts[tile]), np.minimum(row_stop, stops[tile])
    begin, end = np.maximum(start, first + lo), np.minimum(stop, last + hi)
    if boxes:
        begin = begin // boxes * boxes
    number = float((-((begin - end) // small)).sum()) / ratio
    return Cut(bands, starts, stops, band, tile, first, last, begin, end, number)


def _table(
    cut: Cut, rows: int, columns: int, small: int, boxes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tiles and spans. A piece has at most three spans: partial, full, partial."""
    bands, starts, stops, band, tile, first, last, begin, end, _ = cut
    _, _, start, stop, lo, hi = bands.take(band, 1)
    all_begin, all_end = (
        np.maximum(start, last - 1 + lo),
        np.minimum(stop, first + hi + 1),
    )  # columns that every row sees
    whole = (first == starts[tile]) & (last == stops[tile])  # the band holds every row
    if boxes:
        whole &= last - first == rows
    ratio, count = columns // small, -((begin - end) // small)  # in small tiles from here on
    full_from = -((begin - all_begin) // small)
    full = np.where(whole, np.maximum(0, (all_end - begin - full_from * small) // columns), 0)
    full_from = np.where(full > 0, full_from, count)
    full_to = full_from + full * ratio

    # of tiles: all first spans, all second, all third
    number = np.concatenate([full_from, full, count - full_to])
    kept = np.flatnonzero(number)
    kind, piece = np.divmod(kept, len(band)) if len(band) else (kept, kept)
    is_full = kind == 1
    column = begin[piece] + small * np.stack([0 * full_from, full_from, full_to]).ravel()[kept]
    # By tile, partial before full, then by column (below 2**31).
    order = np.argsort((2 * tile[piece] + is_full << 31) + column, kind="stable")
    is_full, piece = is_full[order], piece[order]
    # the last row is of full spans, without a band
    own = np.zeros((bands.shape[1] + 1, SPAN_FIELDS), np.int32)
    own[:-1, 2:] = bands.T
    spans = own.take(np.where(is_full, -1, band[piece]), 0)
    spans[:, 0], spans[:, 1] = column[order], number[kept[order]]
    if boxes:
        spans[:, 3] = np.where(is_full, 0, last[piece])

    n, owner = len(starts), tile[piece]
    ends = np.cumsum(np.bincount(owner, minlength=n))
    begins = np.append(0, ends[:-1])[:n]
    tiles = np.stack(
        [starts, stops, begins, begins + np.bincount(owner[~is_full], minlength=n), ends], 1
    )
    work = np.bincount(tile, count, minlength=n)
    return tiles[np.argsort(-work, kind="stable")], spans
