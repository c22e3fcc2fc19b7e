"""A mask: the visible cells of a queries x keys matrix, stored as bands.

    Mask.causal(8)                    one band, hi = 0
    Mask.window(8, left=2, right=0)   one band, lo = -2, hi = 0
    Mask.documents([0, 3, 8])         two bands: a causal square for each document
    mask.crop(rows, columns)          the slice of the matrix, again as bands

A mask is immutable, and compared and hashed by content. Plans made from a mask can therefore be cached, and ranks that
hold equal masks make equal plans without communication. `dense` returns the matrix, for tests and pictures.

`Mask(...)` and `Mask.ranges` prove that their bands are disjoint. The other constructors and the methods skip this proof:
their bands are disjoint by construction. This file exceeds 200 lines because most of it documents public methods.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from canon.reference.arguments import list_of, shown, whole
from canon.reference.band import Band, tight_bands
from canon.reference.band_lists import IntervalIndex, check_disjoint, picked, union, visible_keys
from canon.reference.block_causal import bands_of_levels, levels
from canon.reference.mask_arguments import (
    Ints,
    Ranges,
    block_ids,
    crop_range,
    document_ends,
    slice_bands,
    window_bounds,
)
from canon.reference.opaque import OpaqueMeta


class Mask(metaclass=OpaqueMeta):
    """The visible cells of a matrix ``queries`` x ``keys``, as sorted disjoint bands. Empty bands are dropped.

        Mask([Band(0, 2, 0, 3), Band(2, 4, 1, 3)], 4, 3)      x x x
                                                              x x x
                                                              . x x
                                                              . x x

    Args:
        bands: in any order.
        queries, keys: the sizes of the matrix, >= 0. The matrix itself is never stored.

    Attributes: ``bands``, a sorted tuple of `Band`; ``queries``; ``keys``.
    Raises ValueError if a size is negative, a band leaves the matrix, or two bands share a cell; TypeError for wrong types.
    """

    __slots__ = ("__weakref__", "_digest", "_hash", "_rows", "bands", "keys", "queries")
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
    def of_disjoint(cls, bands: list[Band], queries: int, keys: int) -> "Mask":
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
        if not isinstance(other, Mask):
            return NotImplemented
        mine, others = ((m._hash, m.queries, m.keys, m.bands) for m in (self, other))
        return self is other or mine == others

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Mask, (self.bands, self.queries, self.keys)

    def __deepcopy__(self, memo):
        return self

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.bands[:4])) + (", ..." if len(self.bands) > 4 else "")
        return f"Mask({self.queries} x {self.keys}, {len(self.bands)} bands: {first})"

    # ------------------------------------------------------------------ constructors
    @classmethod
    def full(cls, n: int) -> "Mask":
        """Return the n x n mask in which every token sees every token. Raises ValueError if n < 0."""
        return cls.window(n)

    @classmethod
    def causal(cls, n: int) -> "Mask":
        """Return the n x n mask in which token i sees the tokens j <= i. Raises ValueError if n < 0."""
        return cls.window(n, right=0)

    @classmethod
    def window(cls, n: int, left: int | None = None, right: int | None = None) -> "Mask":
        """Return the n x n mask in which token i sees token j iff -left <= j - i <= right.

            window(4, left=1, right=0)      x . . .
                                            x x . .
                                            . x x .
                                            . . x x

        None and -1 mean no bound, as in FlashAttention's ``window_size``. Raises ValueError if n < 0 or a bound is < -1.
        """
        n, bounds = whole("n", n, 0), window_bounds(left, right)
        return cls.of_disjoint([Band(0, n, 0, n, *bounds)] if n else [], n, n)

    @classmethod
    def documents(
        cls, cu_seqlens: Ints, causal: bool = True, window: tuple[int | None, int | None] | None = None
    ) -> "Mask":
        """Return the mask of packed documents: each token sees tokens of its own document only.

            documents([0, 2, 5])      x . . . .
                                      x x . . .
                                      . . x . .
                                      . . x x .
                                      . . x x x

        Args:
            cu_seqlens: 0, then the end of each document, in tokens. A repeated end is an empty document. The values are
                copied: a later change of the tensor does not change the mask.
            causal: hide later tokens.
            window: (left, right) bounds inside each document, as in `window`.

        Raises ValueError if cu_seqlens does not start at 0 or decreases, or a bound is < -1; TypeError for wrong types.
        """
        ends = document_ends(cu_seqlens)
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, got {shown(causal)}")
        if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
            raise TypeError(f"window must be a pair (left, right) or None, got {shown(window)}")
        lo, hi = window_bounds(*window or (None, None))
        low, high = -ends[-1] if lo is None else lo, 0 if causal else ends[-1] if hi is None else hi
        squares = [
            (a, b, a, b, low if low > a - b else a - b + 1, high if high < b - a else b - a - 1)
            for a, b in zip(ends, ends[1:], strict=False)
            if a < b
        ]  # tight, because low <= 0 <= high
        return cls.of_disjoint(tight_bands(squares), ends[-1], ends[-1])

    @classmethod
    def block_causal(
        cls, q_blocks: Ints, k_blocks: Ints | None = None, q_valid: Ints | None = None, k_valid: Ints | None = None
    ) -> "Mask":
        """Return the mask in which query i sees key j iff both are valid and k_blocks[j] <= q_blocks[i].

            block_causal([0, 0, 1, 1])      x x . .
                                            x x . .
                                            x x x x
                                            x x x x

        Args:
            q_blocks, k_blocks: a block id for each query and each key, in any order. Keys have the ids of the queries by
                default. A different id for each token, ascending, is causal. One id for all tokens is full.
            q_valid, k_valid: a boolean for each query and each key. All are valid by default.

        Equal cells make equal masks. Ascending ids in r runs make up to r bands, random ids about r^2 / 9 (see
        `canon.reference.block_causal`). So random ids for every token are expensive.
        Raises ValueError if ids and validity differ in length, or a validity is neither 0 nor 1.
        """
        q_ids, q_flags = block_ids("q", q_blocks, q_valid)
        k_ids, k_flags = block_ids("k", q_blocks if k_blocks is None else k_blocks, k_valid)
        return cls.of_disjoint(bands_of_levels(*levels(q_ids, k_ids, q_flags, k_flags)), len(q_ids), len(k_ids))

    @classmethod
    def prefix(cls, n: int, prefix: int) -> "Mask":
        """Return the n x n mask of a prefix language model: the first ``prefix`` tokens see each other, the rest is causal.

            prefix(4, 2)      x x . .
                              x x . .
                              x x x .
                              x x x x

        Raises ValueError unless 0 <= prefix <= n.
        """
        n, prefix = whole("n", n, 0), whole("prefix", prefix)
        if not 0 <= prefix <= n:
            raise ValueError(f"prefix must be in 0..{n}, got {prefix}")
        bands = [Band(0, prefix, 0, prefix), Band(prefix, n, 0, n, None, 0)]
        return cls.of_disjoint([band for band in bands if band.area], n, n)

    @classmethod
    def ranges(
        cls,
        q_ranges: Ranges,
        k_ranges: Ranges,
        types: Sequence[int | str] | Tensor,
        *,
        queries: int | None = None,
        keys: int | None = None,
    ) -> "Mask":
        """Return the mask of MagiAttention's slices. Each slice is a range of queries, a range of keys and a type.

            type                    sees, in a slice of 2 queries and 3 keys
            0 or "full"             x x x      x x x
            1 or "causal"           x x .      x x x      aligned at the lower right corner
            2 or "inverse_causal"   x x x      . x x      aligned at the upper left corner
            3 or "bi_causal"        x x .      . x x      both

        Args:
            q_ranges, k_ranges: (start, stop) of each slice, as pairs, ranges, or a tensor [slices, 2].
            types: the type of each slice.
            queries, keys: the sizes of the mask. The default is the largest end of the ranges.

        Raises ValueError for an unknown type, a range that runs backwards, lists of different lengths, and slices that
        share a cell.
        """
        bands, q_end, k_end = slice_bands(q_ranges, k_ranges, types)
        return cls(bands, q_end if queries is None else queries, k_end if keys is None else keys)

    @classmethod
    def concat(cls, masks: Sequence["Mask"]) -> "Mask":
        """Return the block-diagonal mask of independent sequences, one after another.

        ``concat([causal(2), causal(3)])`` equals ``documents([0, 2, 5])``. Its sizes are the sums of the sizes of ``masks``.
        """
        bands, queries, keys = [], 0, 0
        for mask in list_of("masks", masks, Mask):
            bands += picked(mask.bands, range(mask.queries), range(mask.keys), queries, keys)
            queries, keys = queries + mask.queries, keys + mask.keys
        return cls.of_disjoint(bands, queries, keys)

    # ------------------------------------------------------------------ properties and methods
    @property
    def digest(self) -> str:
        """SHA-256 of the content, as hexadecimal digits. Equal masks have equal digests in every process."""
        if self._digest is None:
            content = repr((self.bands, self.queries, self.keys))
            object.__setattr__(self, "_digest", hashlib.sha256(content.encode()).hexdigest())
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

    def crop(self, queries: range | None = None, keys: range | None = None) -> "Mask":
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
        return Mask.of_disjoint(picked(self.bands_near(rows), rows, columns), len(rows), len(columns))

    def shift(self, queries: int = 0, keys: int = 0) -> "Mask":
        """Return the mask moved down by ``queries`` and right by ``keys``.

        The new rows and columns at the start see nothing and are not seen. A negative number cuts off that many rows or
        columns at the start. The sizes change by ``queries`` and ``keys``, but never below 0.
        """
        queries, keys = whole("queries", queries), whole("keys", keys)
        sizes = whole("queries", max(0, self.queries + queries), 0), whole("keys", max(0, self.keys + keys), 0)
        kept = picked(self.bands, range(-queries, self.queries), range(-keys, self.keys))
        return Mask.of_disjoint(kept, *sizes)

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
