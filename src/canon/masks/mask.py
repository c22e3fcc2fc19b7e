"""A mask: the visible cells of a queries x keys matrix, stored as bands.

    Mask.causal(8)                    one band, hi = 0
    Mask.documents([0, 3, 8])         two bands: a causal square for each document

A mask is compared and hashed by content: ranks with equal masks make equal plans without
communication.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from canon.masks.arguments import flag, list_of, whole, whole_numbers
from canon.masks.band import (
    Band,
    IntervalIndex,
    check_disjoint,
    disjoint,
    picked,
    tight_bands,
    union,
    visible_keys,
)
from canon.masks.block_causal import block_bands
from canon.masks.immutable import Immutable, write
from canon.masks.mask_inputs import (
    Ints,
    Ranges,
    Rows,
    block_squares,
    by_sequence,
    crop_range,
    document_bands,
    position_ends,
    slice_bands,
    tree_bands,
    window_bounds,
)

# of a union; 1.1 times as many would fill the plan cache
MOST_BANDS = 200_000


class Mask(Immutable):
    """The visible cells of a matrix ``queries`` x ``keys``, as sorted disjoint bands.

    Raises ValueError if a band leaves the matrix or two share a cell.
    """

    __slots__ = ("_rows", "bands", "keys", "queries")
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
        self._set(bands, queries, keys)

    @classmethod
    def of_disjoint(cls, bands: list[Band], queries: int, keys: int) -> "Mask":
        """Return the mask of bands that must be disjoint, inside the matrix and not empty."""
        mask = object.__new__(cls)
        mask._set(tuple(sorted(bands)), whole("queries", queries, 0), whole("keys", keys, 0))
        return mask

    def _set(self, bands: tuple[Band, ...], queries: int, keys: int) -> None:
        self._remember((queries, keys, bands))
        write(self, "bands", bands)
        write(self, "queries", queries)
        write(self, "keys", keys)
        write(self, "_rows", None)

    def __reduce__(self):
        numbers = array("q", chain.from_iterable(self.bands))  # much faster to pickle than objects
        return self._unpickled, (self.queries, self.keys, self._digest, numbers)

    @classmethod
    def _unpickled(cls, queries: int, keys: int, digest: str | None, numbers: array) -> "Mask":
        mask = cls.of_disjoint(tight_bands(zip(*[iter(numbers)] * 6, strict=True)), queries, keys)
        write(mask, "_digest", digest)
        return mask

    @classmethod
    def full(cls, queries: int, keys: int | None = None) -> "Mask":
        """Return the mask in which every query sees every key."""
        queries, keys = _sizes(queries, keys)
        bands = [Band(0, queries, 0, keys)] if queries and keys else []
        return cls.of_disjoint(bands, queries, keys)

    @classmethod
    def causal(cls, queries: int, keys: int | None = None) -> "Mask":
        """Return the mask in which query i sees key j iff j <= i + keys - queries. The last query
        sees every key.

            causal(2, 4)      x x x .      causal(3, 2)      . .
                              x x x x                        x .
                                                             x x

        FlashAttention aligns in the same way.
        """
        queries, keys = _sizes(queries, keys)
        band = Band(0, queries, 0, keys, None, keys - queries)
        return cls.of_disjoint([band] if band.area else [], queries, keys)

    @classmethod
    def window(cls, n: int, left: int | None = None, right: int | None = None) -> "Mask":
        """Return the n x n mask in which token i sees token j iff -left <= j - i <= right.

            window(4, left=1, right=0)      x . . .
                                            x x . .
                                            . x x .
                                            . . x x

        None and -1 mean no bound, as in FlashAttention's ``window_size``.
        """
        n, bounds = whole("n", n, 0), window_bounds(left, right)
        return cls.of_disjoint([Band(0, n, 0, n, *bounds)] if n else [], n, n)

    @classmethod
    def documents(
        cls,
        cu_seqlens: Ints,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
    ) -> "Mask":
        """Return the mask of packed documents: a token sees its own document only.

            documents([0, 2, 5])      x . . . .
                                      x x . . .
                                      . . x . .
                                      . . x x .
                                      . . x x x

        ``cu_seqlens``: 0, then the end of each document. ``window``: (left, right) inside each
        document. Raises ValueError if cu_seqlens does not start at 0 or decreases.
        """
        bands, tokens = document_bands(cu_seqlens, causal, window)
        return cls.of_disjoint(bands, tokens, tokens)

    @classmethod
    def tree(cls, parents: Ints, lengths: Ints, starts: Ints | None = None) -> "Mask":
        """Return the mask of packed branches: a token sees the tokens of its node's ancestors and,
        causally, its own node.

            tree([-1, 0, 0], [2, 1, 2])      x . . . .      two branches of 1 and 2 tokens
                                             x x . . .      share a trunk of 2 tokens
                                             x x x . .
                                             x x . x .
                                             x x . x x

        ``parents[i]`` is the node before node i, -1 for a root. Nodes come in depth-first order.
        The ``lengths[i]`` tokens of node i begin at ``starts[i]``, by default where node i - 1
        ends. A token between two nodes is not seen, and sees the ancestors of the node after it.
        A last node of length 0 ends the mask at its start.

        Raises ValueError if nodes overlap or are in another order.
        """
        bands, tokens = tree_bands(parents, lengths, starts)
        return cls.of_disjoint(bands, tokens, tokens)

    @classmethod
    def prefix(cls, n: int, prefix: int) -> "Mask":
        """Return the n x n mask in which the first ``prefix`` tokens see each other, and the rest
        is causal.
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
        """Return the mask of MagiAttention's slices.

            type                    sees, in a slice of 2 queries and 3 keys
            0 or "full"             x x x      x x x
            1 or "causal"           x x .      x x x      aligned at the lower right corner
            2 or "inverse_causal"   x x x      . x x      aligned at the upper left corner
            3 or "bi_causal"        x x .      . x x      both

        Sizes are by default the largest ends. Raises ValueError if slices share a cell.
        """
        bands, q_end, k_end = slice_bands(q_ranges, k_ranges, types)
        return cls(bands, q_end if queries is None else queries, k_end if keys is None else keys)

    @classmethod
    def concat(cls, masks: Sequence["Mask"]) -> "Mask":
        """Return the block-diagonal mask of independent sequences, one after another."""
        bands, queries, keys = [], 0, 0
        for mask in list_of("masks", masks, cls):
            bands += picked(mask.bands, range(mask.queries), range(mask.keys), queries, keys)
            queries, keys = queries + mask.queries, keys + mask.keys
        return cls.of_disjoint(bands, queries, keys)

    @classmethod
    def union(cls, *masks: "Mask") -> "Mask":
        """Return the mask of the cells that one or more of ``masks`` hold.

        Raises ValueError if the sizes differ, or if this takes more than 200,000 bands.
        """
        sizes = sorted({(mask.queries, mask.keys) for mask in list_of("masks", masks, cls)})
        if len(sizes) != 1:
            found = ", ".join(f"{queries} x {keys}" for queries, keys in sizes) or "no mask"
            raise ValueError(f"union needs masks of one size, got {found}")
        bands = chain.from_iterable(mask.bands for mask in masks)
        return cls.of_disjoint(disjoint(bands, MOST_BANDS), *sizes[0])

    @classmethod
    def from_position_ids(cls, position_ids: Ints | Rows) -> "Mask | tuple[Mask, ...]":
        """Return ``documents([0, 2, 5])`` for positions [0, 1, 0, 1, 2]. Positions (b, n) give a
        tuple of b masks.
        """
        ends, several = position_ends(position_ids)
        masks = tuple(cls.of_disjoint(document_bands(e, True, None)[0], e[-1], e[-1]) for e in ends)
        return masks if several else masks[0]

    @classmethod
    def padding(cls, lengths: Ints, n: int, causal: bool = True) -> "tuple[Mask, ...]":
        """Return one n x n mask for each length. Tokens from the length on see nothing and are not
        seen. For padding on the left, `block_causal` has ``q_valid`` and ``k_valid``.
        """
        n, high = whole("n", n, 0), 0 if flag("causal", causal) else None
        lengths = whole_numbers("lengths", lengths)
        for place, length in enumerate(lengths):
            if not 0 <= length <= n:
                raise ValueError(
                    f"lengths[{place}] must be in 0..{n}, the tokens of a sequence, got {length}"
                )
        seen = ([Band(0, end, 0, end, None, high)] if end else [] for end in lengths)
        return tuple(cls.of_disjoint(bands, n, n) for bands in seen)

    @classmethod
    def block_causal(
        cls,
        q_blocks: Ints | Rows,
        k_blocks: Ints | Rows | None = None,
        q_valid: Ints | Rows | None = None,
        k_valid: Ints | Rows | None = None,
    ) -> "Mask | tuple[Mask, ...]":
        """Return the mask in which query i sees key j iff both are valid and k_blocks[j] <=
        q_blocks[i].

        ``k_blocks`` are by default ``q_blocks``. Arguments (b, n) give a tuple of b masks. For pi0,
        `make_att_2d_masks` is ``block_causal(att_masks.cumsum(1), q_valid=pad_masks,
        k_valid=pad_masks)``. Random ids in r runs make about r^2 / 9 bands.
        """
        batch = by_sequence(q_blocks=q_blocks, k_blocks=k_blocks, q_valid=q_valid, k_valid=k_valid)
        if batch is not None:
            return tuple(cls.of_disjoint(*block_bands(**one)) for one in batch)
        return cls.of_disjoint(*block_bands(q_blocks, k_blocks, q_valid, k_valid))

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self.bands[:4])) + (", ..." if len(self.bands) > 4 else "")
        return f"Mask({self.queries} x {self.keys}, {len(self.bands)} bands: {first})"

    @property
    def digest(self) -> str:
        """SHA-256 of the content in hexadecimal, equal in every process."""
        if self._digest is None:
            content = array("q", chain((self.queries, self.keys), *self.bands))
            write(self, "_digest", hashlib.sha256(content).hexdigest())
        return self._digest

    @property
    def nbytes(self) -> int:
        """Bytes on the host (an estimate)."""
        return 200 + 300 * len(self.bands)

    @property
    def area(self) -> int:
        """The number of visible cells: query-key pairs of each head."""
        return sum(band.area for band in self.bands)

    def dense(self) -> Tensor:
        """Return the matrix, bool [queries, keys] on the CPU: True where the query sees the key."""
        matrix = torch.zeros(self.queries, self.keys, dtype=torch.bool, device="cpu")
        for b in self.bands:
            matrix[b.q_start : b.q_stop, b.k_start : b.k_stop] |= cells_of(b)
        return matrix

    def crop(self, queries: range | None = None, keys: range | None = None) -> "Mask":
        """Return the mask between these queries and keys: ``dense()[queries][:, keys]``.

        Raises ValueError if a range leaves the mask or runs backwards, or steps differ.
        """
        rows = crop_range("queries", queries, self.queries)
        columns = crop_range("keys", keys, self.keys)
        if rows.step != columns.step:
            raise ValueError(
                f"crop needs one step for queries and keys, got {rows.step} and {columns.step}"
            )
        return self.of_disjoint(
            picked(self.bands_near(rows), rows, columns), len(rows), len(columns)
        )

    def shift(self, queries: int = 0, keys: int = 0) -> "Mask":
        """Return the mask moved down by ``queries`` and right by ``keys``, which add to its sizes.
        A negative number cuts rows or columns off.
        """
        queries, keys = whole("queries", queries), whole("keys", keys)
        kept = picked(self.bands, range(-queries, self.queries), range(-keys, self.keys))
        return self.of_disjoint(kept, max(0, self.queries + queries), max(0, self.keys + keys))

    def windowed(self, left: int | None = None, right: int | None = None) -> "Mask":
        """Return the visible cells with -left <= j - i <= right, as in `window`."""
        low, high = window_bounds(left, right)
        if low is high is None:
            return self
        window = Band(0, self.queries, 0, self.keys, low, high)
        cut = [both for band in self.bands if (both := band.intersect(window)).q_stop]
        return self.of_disjoint(cut, self.queries, self.keys)

    def with_blocks(self, starts: Ints, stops: Ints) -> "Mask":
        """Return the mask in which the tokens of each block, ``starts[i]`` to ``stops[i]`` - 1,
        also see each other, as those of an image.

        Raises ValueError if the mask is not square, or a block is empty, leaves it or overlaps
        another.
        """
        if self.queries != self.keys:
            raise ValueError(
                f"with_blocks needs a square mask, got {self.queries} x {self.keys}: crop it later"
            )
        squares = block_squares(starts, stops, self.keys)
        return self.union(self, self.of_disjoint(squares, self.queries, self.keys))

    def needed_keys(self, query_ranges: Iterable[range]) -> tuple[range, ...]:
        """Return the keys that some query of the ascending ranges sees, as separate ranges."""
        intervals: list[tuple[int, int]] = []
        for rows in list_of("query_ranges", query_ranges, range):
            if rows.step < 1:
                raise ValueError(f"needed_keys takes ascending ranges, got {rows}")
            intervals += visible_keys(self.bands_near(rows), rows)
        return tuple(range(start, stop) for start, stop in union(intervals))

    def plot(self, ax=None):
        """Draw the visible cells, with a colour for each band. Return the axes. Raises
        ModuleNotFoundError without matplotlib.
        """
        from canon.show.mask_figures import plot_mask

        return plot_mask(self, ax)

    def bands_near(self, rows: range) -> tuple[Band, ...]:
        """Return a slice of ``bands`` with all that have queries in ``rows``, perhaps others."""
        if self._rows is None:
            write(self, "_rows", IntervalIndex(self.bands))
        return self.bands[self._rows.near(rows.start, rows.stop)]


def _sizes(queries: int, keys: int | None) -> tuple[int, int]:
    queries = whole("queries", queries, 0)
    return queries, queries if keys is None else whole("keys", keys, 0)


def cells_of(band: Band) -> Tensor:
    """Return which cells of its rectangle a band holds, bool on the CPU."""
    queries = torch.arange(band.q_start, band.q_stop, device="cpu")[:, None]
    keys = torch.arange(band.k_start, band.k_stop, device="cpu")
    return (keys >= queries + band.lo).logical_and_(keys <= queries + band.hi)


Masks = Mask | Sequence[Mask]  # one for all sequences of a batch, or one for each
