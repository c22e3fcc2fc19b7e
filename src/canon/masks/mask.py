"""A mask: the visible cells of a queries x keys matrix, stored as bands.

    Mask.causal(8)                    one band, hi = 0
    Mask.window(8, left=2, right=0)   one band, lo = -2, hi = 0
    Mask.documents([0, 3, 8])         two bands: a causal square for each document
    mask.crop(rows, columns)          the slice of the matrix, again as bands

A mask is immutable, and compared and hashed by content. Plans made from a mask can therefore be cached, and ranks that
hold equal masks make equal plans without communication. `dense` returns the matrix, for tests and pictures.

    mask.dense()                      the matrix, for tests and pictures
    mask.crop(rows, columns)          a slice of the matrix, again as bands
    mask.shift(queries, keys)         the matrix moved down and right
    mask.windowed(left, right)        the cells near the diagonal
    mask.needed_keys(rows)            the keys that some queries see

Every operation turns bands into bands, which are disjoint by construction. Only `Mask(...)` and `Mask.ranges` prove it.

The constructors of `Mask` for one sequence or a batch. A batch of b sequences gives a tuple of b masks.

    Mask.from_position_ids(position_ids)      packed documents, as data collators describe them
    Mask.padding(lengths, n)                  sequences of different lengths
    Mask.block_causal(blocks, ...)            blocks of tokens that see each other and earlier blocks

Arguments are sequences or tensors, (n,) or (b, n). A tensor on a GPU is copied to the CPU once.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from canon.masks.arguments import flag, list_of, whole, whole_numbers
from canon.masks.band import Band, IntervalIndex, check_disjoint, picked, tight_bands, union, visible_keys
from canon.masks.block_causal import bands_of_levels, levels
from canon.masks.mask_inputs import (
    Ints,
    Ranges,
    Rows,
    block_ids,
    by_sequence,
    crop_range,
    document_bands,
    position_ends,
    slice_bands,
    window_bounds,
)
from canon.masks.opaque import OpaqueMeta
from canon.masks.pickles import FORMAT, check_format


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

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        numbers = array("q", chain.from_iterable(self.bands))  # much faster to pickle than objects
        return self._unpickled, (FORMAT, self.queries, self.keys, self._digest, numbers)

    @classmethod
    def _unpickled(cls, version: int, queries: int, keys: int, digest: str | None, numbers: array) -> "Mask":
        """Return a pickled mask. ``numbers``: six for each band, which were disjoint and tight, so they are not checked."""
        check_format("Mask", version)
        mask = cls.of_disjoint(tight_bands(zip(*[iter(numbers)] * 6, strict=True)), queries, keys)
        object.__setattr__(mask, "_digest", digest)
        return mask

    # constructors
    @classmethod
    def full(cls, queries: int, keys: int | None = None) -> "Mask":
        """Return the mask in which every query sees every key. None is as many keys as queries.

        Raises ValueError if a size is negative.
        """
        queries = whole("queries", queries, 0)
        keys = queries if keys is None else whole("keys", keys, 0)
        return cls.of_disjoint([Band(0, queries, 0, keys)] if queries and keys else [], queries, keys)

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
        bands, tokens = document_bands(cu_seqlens, causal, window)
        return cls.of_disjoint(bands, tokens, tokens)

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
        for mask in list_of("masks", masks, cls):
            bands += picked(mask.bands, range(mask.queries), range(mask.keys), queries, keys)
            queries, keys = queries + mask.queries, keys + mask.keys
        return cls.of_disjoint(bands, queries, keys)

    # constructors of a batch
    @classmethod
    def from_position_ids(cls, position_ids: Ints | Rows) -> "Mask | tuple[Mask, ...]":
        """Return the mask of packed documents, causal in each, from positions that restart at 0 at each document.

            from_position_ids([0, 1, 0, 1, 2])      equals documents([0, 2, 5])

        Args: ``position_ids`` of the whole sequence: (n,) gives a mask, (b, n) a tuple of b masks.
        Raises ValueError unless each position is 0 or one more than the position before it; TypeError for wrong types.
        """
        ends, several = position_ends(position_ids)
        masks = tuple(cls.of_disjoint(document_bands(e, True, None)[0], e[-1], e[-1]) for e in ends)
        return masks if several else masks[0]

    @classmethod
    def padding(cls, lengths: Ints, n: int, causal: bool = True) -> "tuple[Mask, ...]":
        """Return one n x n mask for each length. Tokens from the length on are padding: they see nothing and are not seen.

            padding([2, 3], 4)      x . . .      x . . .
                                    x x . .      x x . .
                                    . . . .      x x x .
                                    . . . .      . . . .

        Args: ``lengths``, the number of tokens before the padding of each sequence; ``causal``, hide later tokens.
        For padding on the left use `block_causal` with ``q_valid`` and ``k_valid``.
        Raises ValueError unless all lengths are in 0..n; TypeError for wrong types.
        """
        n, high = whole("n", n, 0), 0 if flag("causal", causal) else None
        masks = []
        for place, length in enumerate(whole_numbers("lengths", lengths)):
            if not 0 <= length <= n:
                raise ValueError(f"lengths[{place}] must be in 0..{n}, the tokens of a sequence, got {length}")
            masks.append(cls.of_disjoint([Band(0, length, 0, length, None, high)] if length else [], n, n))
        return tuple(masks)

    @classmethod
    def block_causal(
        cls,
        q_blocks: Ints | Rows,
        k_blocks: Ints | Rows | None = None,
        q_valid: Ints | Rows | None = None,
        k_valid: Ints | Rows | None = None,
    ) -> "Mask | tuple[Mask, ...]":
        """Return the mask in which query i sees key j iff both are valid and k_blocks[j] <= q_blocks[i].

            block_causal([0, 0, 1, 1])      x x . .
                                            x x . .
                                            x x x x
                                            x x x x

        Args:
            q_blocks, k_blocks: a block id for each query and each key, in any order. Keys have the ids of the queries by
                default. A different id for each token, ascending, is causal. One id for all tokens is full.
            q_valid, k_valid: a boolean for each query and each key. All are valid by default.

        If an argument is (b, n), the result is a tuple of b masks, and arguments (n,) serve all of them. For the
        ``pad_masks`` and ``att_masks`` of pi0, `make_att_2d_masks` is
        ``block_causal(att_masks.cumsum(1), q_valid=pad_masks, k_valid=pad_masks)``.

        Equal cells make equal masks. Ascending ids in r runs make up to r bands, random ids about r^2 / 9 (see
        `canon.masks.block_causal`). So random ids for every token are expensive.
        Raises ValueError if ids and validity differ in length, arguments in their number of sequences, or a validity is
        neither 0 nor 1.
        """
        batch = by_sequence(q_blocks=q_blocks, k_blocks=k_blocks, q_valid=q_valid, k_valid=k_valid)
        if batch is not None:
            return tuple(cls.of_disjoint(*_block_bands(**one)) for one in batch)
        return cls.of_disjoint(*_block_bands(q_blocks, k_blocks, q_valid, k_valid))

    # content
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
        return self.of_disjoint(picked(self.bands_near(rows), rows, columns), len(rows), len(columns))

    def shift(self, queries: int = 0, keys: int = 0) -> "Mask":
        """Return the mask moved down by ``queries`` and right by ``keys``.

        The new rows and columns at the start see nothing and are not seen. A negative number cuts off that many rows or
        columns at the start. The sizes change by ``queries`` and ``keys``, but never below 0.
        """
        queries, keys = whole("queries", queries), whole("keys", keys)
        sizes = whole("queries", max(0, self.queries + queries), 0), whole("keys", max(0, self.keys + keys), 0)
        kept = picked(self.bands, range(-queries, self.queries), range(-keys, self.keys))
        return self.of_disjoint(kept, *sizes)

    def windowed(self, left: int | None = None, right: int | None = None) -> "Mask":
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


def _block_bands(
    q_blocks: Ints, k_blocks: Ints | None, q_valid: Ints | None, k_valid: Ints | None
) -> tuple[list[Band], int, int]:
    """Return the bands of the block-causal mask of one sequence, and its numbers of queries and keys."""
    q_ids, q_flags = block_ids("q", q_blocks, q_valid)
    k_ids, k_flags = block_ids("k", q_blocks if k_blocks is None else k_blocks, k_valid)
    return bands_of_levels(*levels(q_ids, k_ids, q_flags, k_flags)), len(q_ids), len(k_ids)
