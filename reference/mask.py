"""Which query sees which key: a mask is a sum of bands, never a matrix.

    Mask.causal(8)                    one band, hi = 0
    Mask.window(8, left=2, right=0)   one band, lo = -2, hi = 0
    Mask.documents([0, 3, 8])         two bands: a causal square for each document
    mask.crop(rows, columns)          what the matrix would be after slicing: again bands

A mask is immutable and compared by content, so plans made from it can be cached, and ranks that hold equal masks
make equal plans without a word between them. `dense` writes the matrix out, for tests and pictures.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from canon.reference.arguments import list_of, nested, shown, whole, whole_numbers
from canon.reference.band import Band
from canon.reference.block_causal import bands_of_levels, levels

Ints = Sequence[int] | Tensor
SLICE_TYPES = ("full", "causal", "inverse_causal", "bi_causal")  # MagiAttention's types 0 to 3


class Mask:
    """The visible cells of ``queries`` x ``keys`` as disjoint bands, sorted; empty bands are dropped.

    Args: bands in any order; ``queries`` and ``keys``, the sizes of the (virtual) matrix.
    Raises ValueError if a size is negative, a band leaves the matrix, or two bands share a cell. Wrong types raise TypeError.
    """

    __slots__ = ("_digest", "_hash", "bands", "keys", "queries")
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
        _check_disjoint(bands)
        content = (bands, queries, keys)
        for name, value in zip(("bands", "queries", "keys"), content, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_hash", hash(content))
        object.__setattr__(self, "_digest", None)

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

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.bands[:4])) + (", ..." if len(self.bands) > 4 else "")
        return f"Mask({self.queries} x {self.keys}, {len(self.bands)} bands: {shown})"

    # ------------------------------------------------------------------ constructors
    @classmethod
    def full(cls, n: int) -> "Mask":
        """Every one of n tokens sees every one."""
        n = whole("n", n, 0)
        return cls([Band(0, n, 0, n)], n, n)

    @classmethod
    def causal(cls, n: int) -> "Mask":
        """Token i sees the tokens j <= i."""
        return cls.window(n, right=0)

    @classmethod
    def window(cls, n: int, left: int | None = None, right: int | None = None) -> "Mask":
        """Token i sees j iff -left <= j - i <= right; None or -1 is unbounded, as FlashAttention's window_size.

        Raises ValueError if a bound is below -1.
        """
        n = whole("n", n, 0)
        return cls([Band(0, n, 0, n, *_bounds(left, right))], n, n)

    @classmethod
    def documents(
        cls, cu_seqlens: Ints, causal: bool = True, window: tuple[int | None, int | None] | None = None
    ) -> "Mask":
        """Packed documents: token i sees the tokens of its own document alone.

        Args: ``cu_seqlens``, 0 and then the end of each document (repeated: an empty document), read now: a tensor
            refilled later changes nothing; ``causal`` hides later tokens; ``window``, a (left, right) pair inside each.
        Raises ValueError if cu_seqlens does not start at 0 or decreases.
        """
        ends = document_ends(cu_seqlens)
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, got {shown(causal)}")
        if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
            raise TypeError(f"window must be a pair (left, right) or None, got {shown(window)}")
        lo, hi = _bounds(*window or (None, None))
        hi = min(0, 0 if hi is None else hi) if causal else hi
        bands = [Band(a, b, a, b, lo, hi) for a, b in zip(ends, ends[1:], strict=False)]
        return cls(bands, ends[-1], ends[-1])

    @classmethod
    def block_causal(
        cls, q_blocks: Ints, k_blocks: Ints | None = None, q_valid: Ints | None = None, k_valid: Ints | None = None
    ) -> "Mask":
        """Query i sees key j iff both are valid and k_blocks[j] <= q_blocks[i]; any ids, in any order.

        Args: block ids of the queries and of the keys (the same by default); ``q_valid`` and ``k_valid``, booleans
            (all valid by default). One id a token is causal, one id for all is full, few ids are prefix attention.
        Ids in r runs make up to r bands where they ascend, but about r^2 / 9 in random order: no bands of the same cells
        are fewer than r^2 / 24 (see `blocks`), so ids that change with every token are dear. Equal cells make equal masks.
        Raises ValueError if ids and validity differ in length, or a validity is neither 0 nor 1.
        """
        q_ids, q_flags = _ids("q", q_blocks, q_valid)
        k_ids, k_flags = _ids("k", q_blocks if k_blocks is None else k_blocks, k_valid)
        return cls(bands_of_levels(*levels(q_ids, k_ids, q_flags, k_flags)), len(q_ids), len(k_ids))

    @classmethod
    def prefix(cls, n: int, prefix: int) -> "Mask":
        """The first ``prefix`` of n tokens see one another, the others are causal (prefix language model)."""
        n, prefix = whole("n", n, 0), whole("prefix", prefix)
        if not 0 <= prefix <= n:
            raise ValueError(f"prefix must be in 0..{n}, got {prefix}")
        return cls([Band(0, prefix, 0, prefix), Band(prefix, n, 0, n, None, 0)], n, n)

    @classmethod
    def ranges(
        cls,
        q_ranges: Sequence[Sequence[int]] | Tensor,
        k_ranges: Sequence[Sequence[int]] | Tensor,
        types: Sequence[int | str] | Tensor,
        *,
        queries: int | None = None,
        keys: int | None = None,
    ) -> "Mask":
        """MagiAttention's slices: a (start, stop) of the queries, one of the keys, and a type.

        Types: 0 "full"; 1 "causal", aligned at the lower right corner; 2 "inverse_causal", aligned at the upper left
        corner; 3 "bi_causal", both. Sizes default to the largest ends. Raises ValueError for unknown types, ranges
        that run backwards, lists of different lengths, and slices that share a cell.
        """
        rows, columns = _pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)
        kinds = nested(types)
        if not isinstance(kinds, Sequence) or isinstance(kinds, str):
            raise TypeError(f"types must be a sequence with a type for each range, got {shown(kinds)}")
        if not len(rows) == len(columns) == len(kinds):
            raise ValueError(f"{len(rows)} q_ranges, {len(columns)} k_ranges and {len(kinds)} types: give one of each")
        bands = []
        for (q0, q1), (k0, k1), kind in zip(rows, columns, kinds, strict=True):
            if isinstance(kind, str) and kind not in SLICE_TYPES:
                raise ValueError(f"slice type {kind!r}: expected 0 to 3 or one of {SLICE_TYPES}")
            number = SLICE_TYPES.index(kind) if isinstance(kind, str) else whole("slice type", kind, 0)
            if number > 3:
                raise ValueError(f"slice type {kind!r}: expected 0 to 3 or one of {SLICE_TYPES}")
            bands.append(Band(q0, q1, k0, k1, k0 - q0 if number & 2 else None, k1 - q1 if number & 1 else None))
        ends = [max((stop for _, stop in side), default=0) for side in (rows, columns)]
        return cls(bands, ends[0] if queries is None else queries, ends[1] if keys is None else keys)

    @classmethod
    def concat(cls, masks: Sequence["Mask"]) -> "Mask":
        """Independent sequences side by side: a block-diagonal mask."""
        bands, queries, keys = [], 0, 0
        for mask in list_of("masks", masks, Mask):
            bands += [band.shift(queries, keys) for band in mask.bands]
            queries, keys = queries + mask.queries, keys + mask.keys
        return cls(bands, queries, keys)

    # ------------------------------------------------------------------ what can be asked and done
    @property
    def digest(self) -> str:
        """A digest of the content, equal in every process."""
        if self._digest is None:
            content = repr((self.bands, self.queries, self.keys))
            object.__setattr__(self, "_digest", hashlib.sha256(content.encode()).hexdigest())
        return self._digest

    @property
    def nbytes(self) -> int:
        """About how many bytes the mask takes on the host."""
        return 200 + 300 * len(self.bands)

    @property
    def area(self) -> int:
        """The number of visible cells."""
        return sum(band.area for band in self.bands)

    def dense(self) -> Tensor:
        """The boolean matrix [queries, keys] (CPU)."""
        matrix = torch.zeros(self.queries, self.keys, dtype=torch.bool, device="cpu")
        for b in self.bands:
            keys, queries = (torch.arange(*x, device="cpu") for x in ((b.k_start, b.k_stop), (b.q_start, b.q_stop)))
            offset = keys - queries[:, None]
            matrix[b.q_start : b.q_stop, b.k_start : b.k_stop] |= (offset >= b.lo) & (offset <= b.hi)
        return matrix

    def crop(self, queries: range | None = None, keys: range | None = None) -> "Mask":
        """The mask between these queries and keys, in their own coordinates: ``dense()[queries][:, keys]``.

        Raises ValueError if a range leaves the mask, runs backwards, or if the two steps differ.
        """
        rows, columns = _range("queries", queries, self.queries), _range("keys", keys, self.keys)
        step = rows.step if queries is not None else columns.step
        if keys is not None and queries is not None and rows.step != columns.step:
            raise ValueError(f"crop needs one step for queries and keys, got {rows.step} and {columns.step}")
        if step != 1 and (queries is None or keys is None):
            raise ValueError(f"crop with step {step} needs queries and keys: one alone would not leave bands")
        return Mask([band.pick(rows, columns) for band in self.bands], len(rows), len(columns))

    def shift(self, queries: int = 0, keys: int = 0) -> "Mask":
        """The mask moved down and right, behind rows and columns that see nothing; negative numbers cut rows off."""
        queries, keys = whole("queries", queries), whole("keys", keys)
        sizes = max(0, self.queries + queries), max(0, self.keys + keys)
        inside = Band(0, sizes[0], 0, sizes[1])
        return Mask([band.shift(queries, keys).intersect(inside) for band in self.bands], *sizes)

    def needed_keys(self, query_ranges: Iterable[range]) -> tuple[range, ...]:
        """The keys that some query of the ranges sees, as ascending ranges that do not touch.

        Raises ValueError for a range that runs backwards.
        """
        pieces: list[tuple[int, int]] = []
        for rows in list_of("query_ranges", query_ranges, range):
            if rows.step < 1:
                raise ValueError(f"needed_keys takes ascending ranges, got {rows}")
            for band in self.bands:
                pieces += _columns(band, rows)
        return tuple(range(start, stop) for start, stop in _merged(pieces))


def _columns(band: Band, rows: range) -> list[tuple[int, int]]:
    """The keys that the band shows to the queries ``rows``: one interval where neighbouring rows overlap."""
    rows = rows[max(0, -((rows.start - band.q_start) // rows.step)) :]
    rows = rows[: max(0, -((rows.start - band.q_stop) // rows.step))]
    groups = [rows] if rows.step <= band.hi - band.lo + 1 else [range(i, i + 1) for i in rows]
    ends = [(max(band.k_start, g[0] + band.lo), min(band.k_stop, g[-1] + band.hi + 1)) for g in groups if len(g)]
    return [(start, stop) for start, stop in ends if start < stop]


def _check_disjoint(bands: tuple[Band, ...]) -> None:
    """Sweep down the queries; in each row where bands start or end, look at neighbours, for only there do neighbours change.

    Bands that are open at a row lie side by side; their ends move by one column a row at most, so none steps over another.
    """
    side_by_side: list[Band] = []
    coming = 0
    for row in sorted({row for band in bands for row in (band.q_start, band.q_stop)}):
        side_by_side = [band for band in side_by_side if band.q_stop > row]
        while coming < len(bands) and bands[coming].q_start == row:
            side_by_side.append(bands[coming])
            coming += 1
        side_by_side.sort(key=lambda band: max(band.k_start, row + band.lo))
        for left, right in zip(side_by_side, side_by_side[1:], strict=False):
            if left.k_stop > right.k_start and left.intersect(right).area:
                raise ValueError(f"two bands of a mask share cells: {min(left, right)} and {max(left, right)}")


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open intervals, ascending, none touching the next."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def _ids(name: str, blocks: Ints, valid: Ints | None) -> tuple[Tensor, Tensor]:
    """Block ids (int64) and validity (bool) of a side's tokens."""
    ids = whole_numbers(f"{name}_blocks", blocks, booleans=True)
    flags = [1] * len(ids) if valid is None else whole_numbers(f"{name}_valid", valid, booleans=True)
    if len(flags) != len(ids):
        raise ValueError(f"{name}_valid has {len(flags)} entries for {len(ids)} {name}_blocks")
    if not {0, 1}.issuperset(flags):
        raise ValueError(f"{name}_valid must hold booleans, 0 or 1, got {max(flags, key=abs)}: one for each token")
    return torch.tensor(ids, dtype=torch.int64, device="cpu"), torch.tensor(flags, dtype=torch.bool, device="cpu")


def _bounds(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    for name, value in (("left", left), ("right", right)):
        if value is not None and whole(f"window {name}", value) < -1:
            raise ValueError(f"window {name} must be >= 0, or None or -1 for no bound; got {value}")
    return None if left in (None, -1) else -int(left), None if right in (None, -1) else int(right)


def document_ends(cu_seqlens: Ints) -> list[int]:
    """Return cu_seqlens as a list of ints. Raise ValueError if it does not start at 0 or decreases."""
    ends = whole_numbers("cu_seqlens", cu_seqlens)
    if not ends or ends[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {ends[:4]}")
    for position, (before, after) in enumerate(zip(ends, ends[1:], strict=False)):
        if after < before:
            raise ValueError(f"cu_seqlens must not decrease, got {before} then {after} at entry {position + 1}")
    return ends


def _pairs(name: str, ranges: Sequence[Sequence[int]] | Tensor) -> list[tuple[int, int]]:
    rows, pairs = nested(ranges), []
    for place, row in enumerate(rows if isinstance(rows, Iterable) else [rows]):
        pair = [row.start, row.stop, row.step][: 2 + (row.step != 1)] if isinstance(row, range) else row
        if not isinstance(pair, Sequence) or len(pair) != 2 or isinstance(pair, str):
            raise TypeError(f"{name}[{place}] must be a pair (start, stop), or a range of step 1, got {shown(row)}")
        start, stop = whole_numbers(f"{name}[{place}]", pair)
        if not 0 <= start <= stop:
            raise ValueError(f"{name}[{place}] needs 0 <= start <= stop, got ({start}, {stop})")
        pairs.append((start, stop))
    return pairs


def _range(name: str, picked: range | None, size: int) -> range:
    if picked is None:
        return range(size)
    if not isinstance(picked, range):
        raise TypeError(f"crop: {name} must be a range, got {shown(picked)}: write range(start, stop)")
    if picked.step < 1 or (len(picked) and not 0 <= picked.start <= picked[-1] < size):
        raise ValueError(f"crop: {name} {picked} is not an ascending range inside 0..{size}")
    return picked
