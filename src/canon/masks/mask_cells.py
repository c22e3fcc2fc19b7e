"""The cells of a mask: storage as sorted disjoint bands, content, slices and moves. `Mask` adds the constructors.

    mask.dense()                      the matrix, for tests and pictures
    mask.crop(rows, columns)          a slice of the matrix, again as bands
    mask.shift(queries, keys)         the matrix moved down and right
    mask.windowed(left, right)        the cells near the diagonal
    mask.needed_keys(rows)            the keys that some queries see

Every operation turns bands into bands, which are disjoint by construction. Only `Mask(...)` and `Mask.ranges` prove it.
"""

import hashlib
from array import array
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from canon.masks.arguments import list_of, whole
from canon.masks.band import Band, tight_bands
from canon.masks.band_lists import IntervalIndex, check_disjoint, picked, union, visible_keys
from canon.masks.mask_inputs import crop_range, window_bounds

M = TypeVar("M", bound="MaskCells")


class MaskCells:
    """The visible cells of a matrix ``queries`` x ``keys``: the part of a `Mask` that does not construct masks."""

    __slots__ = ("_digest", "_hash", "_rows", "bands", "keys", "queries")
    bands: tuple[Band, ...]
    queries: int
    keys: int

    def __init__(self, bands: Iterable[Band], queries: int, keys: int):
        bands = list_of("bands", bands, Band)
        queries, keys = whole("queries", queries, 0), whole("keys", keys, 0)
        bands = tuple(sorted(band for band in bands if band.q_start < band.q_stop))
        for band in bands:
            if min(band.q_start, band.k_start) < 0 or band.q_stop > queries or band.k_stop > keys:
                raise ValueError(f"{band} leaves the mask of {queries} queries and {keys} keys")
        check_disjoint(bands)
        self._fill(bands, queries, keys)

    @classmethod
    def of_disjoint(cls: type[M], bands: list[Band], queries: int, keys: int) -> M:
        """Return the mask of bands that are disjoint, inside the matrix and not empty. None of this is checked."""
        mask = object.__new__(cls)
        mask._fill(tuple(sorted(bands)), whole("queries", queries, 0), whole("keys", keys, 0))
        return mask

    def _fill(self, bands: tuple[Band, ...], queries: int, keys: int) -> None:
        write = partial(object.__setattr__, self)
        write("bands", bands)
        write("queries", queries)
        write("keys", keys)
        write("_hash", hash((bands, queries, keys)))
        write("_digest", None)
        write("_rows", None)

    def __setattr__(self, name, value):
        raise AttributeError(f"a Mask is immutable: cannot set {name}")

    def __eq__(self, other) -> bool:
        if not isinstance(other, MaskCells):
            return NotImplemented
        mine, others = ((m._hash, m.queries, m.keys, m.bands) for m in (self, other))
        return self is other or mine == others

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        numbers = array("q", chain.from_iterable(self.bands))  # much faster to pickle than objects
        return self._of_numbers, (numbers, self.queries, self.keys, self._digest)

    @classmethod
    def _of_numbers(cls: type[M], numbers: array, queries: int, keys: int, digest: str | None) -> M:
        """Return a pickled mask again: six numbers for each band. They were disjoint and tight, so nothing is checked."""
        mask = cls.of_disjoint(tight_bands(zip(*[iter(numbers)] * 6, strict=True)), queries, keys)
        object.__setattr__(mask, "_digest", digest)
        return mask

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.bands[:4])) + (", ..." if len(self.bands) > 4 else "")
        return f"Mask({self.queries} x {self.keys}, {len(self.bands)} bands: {first})"

    @property
    def digest(self) -> str:
        """SHA-256 of the content, as hexadecimal digits. Equal masks have equal digests in every process."""
        if self._digest is None:
            content = array("q", chain((self.queries, self.keys), *self.bands))
            object.__setattr__(self, "_digest", hashlib.sha256(content).hexdigest())
        return self._digest

    @property
    def nbytes(self) -> int:
        """The memory of the mask on the host, in bytes (an estimate)."""
        return 200 + 300 * len(self.bands)

    @property
    def area(self) -> int:
        """The number of visible cells: the query-key pairs that attention computes for each head."""
        return sum(band.area for band in self.bands)

    def dense(self) -> Tensor:
        """Return the mask as a matrix: bool [queries, keys] on the CPU, True where the query sees the key."""
        matrix = torch.zeros(self.queries, self.keys, dtype=torch.bool, device="cpu")
        for b in self.bands:
            keys, queries = (torch.arange(*x, device="cpu") for x in ((b.k_start, b.k_stop), (b.q_start, b.q_stop)))
            offset = keys - queries[:, None]
            matrix[b.q_start : b.q_stop, b.k_start : b.k_stop] |= (offset >= b.lo) & (offset <= b.hi)
        return matrix

    def crop(self: M, queries: range | None = None, keys: range | None = None) -> M:
        """Return the mask between these queries and keys, numbered from 0: ``dense()[queries][:, keys]``.

        None keeps a whole side. Both ranges may have the same step: every W-th query and every W-th key.
        ``causal(8).crop(range(4, 8), range(2, 6))`` sees j' <= i' + 2, because row 0 is query 4 and column 0 is key 2.

        Raises ValueError if a range leaves the mask or runs backwards, or if the two steps differ.
        """
        rows, columns = crop_range("queries", queries, self.queries), crop_range("keys", keys, self.keys)
        step = rows.step if queries is not None else columns.step
        if keys is not None and queries is not None and rows.step != columns.step:
            raise ValueError(f"crop needs one step for queries and keys, got {rows.step} and {columns.step}")
        if step != 1 and (queries is None or keys is None):
            raise ValueError(f"crop with step {step} needs queries and keys: one alone would not leave bands")
        return self.of_disjoint(picked(self.bands_near(rows), rows, columns), len(rows), len(columns))

    def shift(self: M, queries: int = 0, keys: int = 0) -> M:
        """Return the mask moved down by ``queries`` and right by ``keys``.

        The new rows and columns at the start see nothing and are not seen. A negative number cuts off that many rows or
        columns at the start. The sizes change by ``queries`` and ``keys``, but never below 0.
        """
        queries, keys = whole("queries", queries), whole("keys", keys)
        sizes = whole("queries", max(0, self.queries + queries), 0), whole("keys", max(0, self.keys + keys), 0)
        kept = picked(self.bands, range(-queries, self.queries), range(-keys, self.keys))
        return self.of_disjoint(kept, *sizes)

    def windowed(self: M, left: int | None = None, right: int | None = None) -> M:
        """Return the mask of the visible cells with -left <= j - i <= right, for query i and key j.

        None and -1 mean no bound, as in `Mask.window`. ``prefix(n, p).windowed(left=w)`` is a prefix mask with a window.
        Raises ValueError if a bound is < -1.
        """
        low, high = window_bounds(left, right)
        cut = (
            Band(
                *band[:4],
                band.lo if low is None else max(low, band.lo),
                band.hi if high is None else min(high, band.hi),
            )
            for band in self.bands
        )
        return self.of_disjoint([band for band in cut if band.q_stop], self.queries, self.keys)

    def needed_keys(self, query_ranges: Iterable[range]) -> tuple[range, ...]:
        """Return the keys that some query of the ranges sees, as ascending ranges of step 1 that do not touch.

        ``causal(8).needed_keys([range(2, 4), range(6, 7)])`` is ``(range(0, 7),)``. The query ranges may have any step.
        Raises ValueError for a range that runs backwards.
        """
        intervals: list[tuple[int, int]] = []
        for rows in list_of("query_ranges", query_ranges, range):
            if rows.step < 1:
                raise ValueError(f"needed_keys takes ascending ranges, got {rows}")
            intervals += visible_keys(self.bands_near(rows), rows)
        return tuple(range(start, stop) for start, stop in union(intervals))

    def bands_near(self, rows: range) -> tuple[Band, ...]:
        """Return a slice of ``bands`` that holds all bands with queries in ``rows``. Others may be among them.

        It is found by bisection, so that planning does not look at every band for every range.
        """
        if self._rows is None:
            object.__setattr__(self, "_rows", IntervalIndex(self.bands))
        return self.bands[self._rows.near(rows.start, rows.stop)]
