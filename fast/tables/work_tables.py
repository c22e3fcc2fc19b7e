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

Cost: O(overlapping pairs of a band and a tile). Device memory: 20 bytes a tile, 32 a span. Source:
the block masks of FlexAttention (Dong et al., 2024); bands replace its callbacks."""

from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from canon.fast.c_modules import optional_c_module
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import device_plan
from canon.fast.tables.index_ranges import counted
from canon.fast.tables.key_order import SPAN_FIELDS, Cut, everywhere_banded, ordered_table
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
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
    native = native_tables() if places is None else None
    if native is not None:
        given = *bands_and_size(mask, rows, columns, transposed), rows, columns, small, boxes
        visited, _, tiles, spans = native.table(*given, False)
        return WorkTable(*arrays(tiles, spans), visited, False)
    if places is None:
        cut = _even_cut(mask, rows, small, transposed, columns // small)
        tiles, spans = ordered_table(cut, rows, small, chained=False)
        return WorkTable(tiles, everywhere_banded(spans), cut.visits, False)
    cut = _whole_cut(mask, rows, columns, transposed)
    own = places.owned(cut.starts, transposed)[cut.tile]
    of_pieces = ("band", "tile", "first", "last", "begin", "end")
    cut = cut._replace(**{name: getattr(cut, name)[own] for name in of_pieces})
    table = ordered_table(cut, rows, columns, chained)
    return WorkTable(*places.moved(*table, columns, transposed), cut.visits, True)


def arrays(tiles: bytearray, spans: bytearray) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of a table in C."""
    return (
        np.frombuffer(tiles, np.int64).reshape(-1, TILE_FIELDS),
        np.frombuffer(spans, np.int32).reshape(-1, SPAN_FIELDS),
    )


@lru_cache(maxsize=1)
def native_tables() -> ModuleType | None:
    """Return `schedule.c`, or None where it cannot be compiled. Then all tiles are partial, in
    order.
    """
    return optional_c_module(Path(__file__).parent, "tables.c", "schedule.c")


def count_visits(
    cells: Cells, rows: int, columns: int, transposed: bool = False, boxes: int = 0
) -> tuple[float, int]:
    """Return ``visits`` and number of tiles of `work_table`; with places, of the whole mask."""
    if cells.places is not None:
        cut = _whole_cut(cells.mask, rows, columns, transposed)
    elif (native := native_tables()) is not None:
        given = *bands_and_size(cells.mask, rows, columns, transposed), rows, columns, columns
        return native.table(*given, boxes, True)
    else:
        cut = _even_cut(cells.mask, rows, columns, transposed)
    return cut.visits, len(cut.starts)


visits = cached_plan(count_visits)


@cached_plan
def band_array(mask: Mask) -> np.ndarray:
    """Return the bands (n, 6), int64, columns contiguous."""
    if (native := native_tables()) is not None:
        return np.frombuffer(native.bands(mask.bands), np.int64).reshape(6, -1).T
    numbers = np.fromiter(chain.from_iterable(mask.bands), np.int64, 6 * len(mask.bands))
    return np.asfortranarray(numbers.reshape(-1, 6))


@cached_plan
def area(mask: Mask) -> int:
    """Return ``mask.area``, without a loop."""
    if (native := native_tables()) is not None:
        return native.area(band_array(mask).T)
    return mask.area


def _whole_cut(mask: Mask, rows: int, columns: int, transposed: bool) -> Cut:
    """Return `_even_cut`, the same on any number of ranks. Raises ValueError unless both sizes
    divide 128.
    """
    if TILE % rows or TILE % columns:
        raise ValueError(
            f"rank_invariant=True needs tiles with sides that divide {TILE}, got {rows} x {columns}"
        )
    return _even_cut(mask, rows, columns, transposed)


def _even_cut(mask: Mask, rows: int, columns: int, transposed: bool, ratio: int = 1) -> Cut:
    """Return the cut at multiples of ``rows`` and ``columns``. A visit has ``ratio`` times
    ``columns``.
    """
    bands, size = bands_and_size(mask, rows, columns, transposed)
    starts = np.arange(0, size, rows)
    stops = np.append(starts[1:], size)[: len(starts)]
    first_tile = np.searchsorted(starts, bands[0], "right") - 1
    band, place = counted(np.searchsorted(starts, bands[1], "left") - first_tile)
    tile = first_tile[band] + place
    row_start, row_stop, start, stop, lo, hi = bands.take(band, 1)
    first, last = np.maximum(row_start, starts[tile]), np.minimum(row_stop, stops[tile])
    begin, end = np.maximum(start, first + lo), np.minimum(stop, last + hi)
    begin = begin // columns * columns
    number = float((-((begin - end) // columns)).sum()) / ratio
    return Cut(bands, starts, stops, band, tile, first, last, begin, end, number)


def bands_and_size(mask: Mask, rows: int, columns: int, transposed: bool) -> tuple[np.ndarray, int]:
    """Return the bands (6, n) and the rows of a mask. Raises ValueError if it is too large."""
    if max(mask.queries, mask.keys) + rows + columns >= 2**30:
        raise ValueError(
            f"the kernels count tokens in 32 bits: {mask.queries} queries x "
            f"{mask.keys} keys are too many"
        )
    q_start, q_stop, k_start, k_stop, lo, hi = bands = band_array(mask).T
    if transposed:
        return np.stack([k_start, k_stop, q_start, q_stop, -hi, -lo]), mask.keys
    return bands, mask.queries
