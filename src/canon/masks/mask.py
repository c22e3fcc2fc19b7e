"""A mask: the visible cells of a queries x keys matrix, stored as bands.

    Mask.causal(8)                    one band, hi = 0
    Mask.window(8, left=2, right=0)   one band, lo = -2, hi = 0
    Mask.documents([0, 3, 8])         two bands: a causal square for each document
    mask.crop(rows, columns)          the slice of the matrix, again as bands

A mask is immutable, and compared and hashed by content. Plans made from a mask can therefore be cached, and ranks that
hold equal masks make equal plans without communication. `dense` returns the matrix, for tests and pictures.

This file has the constructors of one mask. Those that also accept a batch are in `mask_batches.py`, the methods in
`mask_cells.py`.
"""

from collections.abc import Sequence

from torch import Tensor

from canon.masks.arguments import list_of, whole
from canon.masks.band import Band
from canon.masks.band_lists import picked
from canon.masks.mask_batches import MaskBatches
from canon.masks.mask_inputs import Ints, Ranges, document_bands, slice_bands, window_bounds
from canon.masks.opaque import OpaqueMeta


class Mask(MaskBatches, metaclass=OpaqueMeta):
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

    __slots__ = ("__weakref__",)

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
