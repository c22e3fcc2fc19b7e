"""Few queries see many keys: cut the keys into parts, so that all SMs have work.

    keys            0     512    1024          8192        9216     10000
    1 query         |part 0|part 1|  ...  |part 15|  part 16  | part 17 |
                    out, lse                        out, lse              merged in this order

**Rule.** `has_parts`, unless a backend other than "triton" is forced or ``rank_invariant`` is True
(on Hopper: `canon.fast.kernels.gluon.few_queries`). Masks of several sequences count as one mask
over all of them.

**Bits.** A part begins at each multiple of 512 keys below 8,192, of 1,024 below 16,384 and of 2,048
above, so that 8 key heads fill the SMs at 8,192 keys. Tiles begin at multiples of their size and
are visited in order, by the same instructions for all of a tile and a part. So the bits of a query
depend on the positions of its keys alone.

**Memory.** Scratch, in the accumulation dtype: p b t h (dv + 1) elements, where p is the number of
parts with a visible cell, or 1. The table, a bit for each query and key, takes t s / 8 bytes."""

from typing import Any, NamedTuple

import numpy as np

from canon.fast.tables.device_plans import device_plan
from canon.fast.tables.index_ranges import counted
from canon.fast.tables.work_tables import band_array
from canon.masks.mask import Mask

PART = 512  # keys of a short part
SHORT = 16  # parts before the size doubles, once and again
MOST_QUERIES = 128
FEWEST_KEYS = 4096
WORD = 64  # keys of a word
ALL = np.uint64(2**64 - 1)


def has_parts(mask: Mask) -> bool:
    """Return whether calls with this mask have parts, if function and options allow it."""
    return 0 < mask.queries <= MOST_QUERIES and mask.keys >= FEWEST_KEYS


class PartTable(NamedTuple):
    """The table that the kernel of the parts reads. A tile has ``rows`` pairs of a query and a head
    of its group.

    work: (parts * row tiles, 4), int32: first row, first key, end of the keys, number of the part.
        Keys are multiples of 64, or both 0 if the rows see no key of the part.
    words: (words, queries + row tiles), int64: bit j of row i, column q: query q sees key 64 i + j.
        A further column of each row tile has the keys that it loads: those that any query sees, if
        a row of the tile sees one of the word.
    parts: number of parts with a visible cell, or 1.
    loads_all: the work visits only keys that are loaded."""

    work: Any
    words: Any
    parts: int
    loads_all: bool


@device_plan
def part_table(mask: Mask, share: int, rows: int, part: int) -> PartTable:
    """Return the table for ``share`` query heads of a key head and short parts of ``part`` keys.
    Raises ValueError unless ``part`` is a multiple of 64.
    """
    if part % WORD:
        raise ValueError(f"a part must be a multiple of {WORD} keys, got {part}")
    words = visible_words(mask)
    seen = np.bitwise_or.reduce(words, 1)
    part_of = _part_of_words(len(words), part)
    parts = np.unique(part_of[seen != 0]) if seen.any() else np.zeros(1, np.int64)
    work, loaded = [], []
    for first in range(0, mask.queries * share, rows):
        own = words[:, first // share : -(-min(first + rows, mask.queries * share) // share)].any(1)
        visited = np.flatnonzero(own)
        begin, end = (np.searchsorted(part_of[visited], parts, side) for side in ("left", "right"))
        some, padded = end > begin, np.append(visited, 0)
        begin, end = padded[begin] * some, (padded[end - 1] + 1) * some
        work.append(
            np.stack(
                [np.full_like(parts, first), begin * WORD, end * WORD, np.arange(len(parts))], 1
            )
        )
        loaded.append(np.where(own, seen, 0))
    table = np.ascontiguousarray(np.concatenate([words, np.stack(loaded, 1)], 1)).view(np.int64)
    # row tiles of one part share keys: neighbours
    ordered = np.stack(work, 1).reshape(-1, 4).astype(np.int32)
    return PartTable(ordered, table, len(parts), _loads_all(work, loaded, mask.keys))


def _part_of_words(words: int, part: int) -> np.ndarray:
    first, second, keys = SHORT * part, 2 * SHORT * part, words * WORD
    starts = [*range(0, first, part), *range(first, second, 2 * part)]
    starts += range(second, keys, 4 * part)
    return np.searchsorted(starts, np.arange(words) * WORD, "right") - 1


def visible_words(mask: Mask) -> np.ndarray:
    """Return the ``words`` of `PartTable` for all queries, as uint64."""
    q_start, q_stop, k_start, k_stop, lo, hi = band_array(mask).T
    band, place = counted(q_stop - q_start)
    query = q_start[band] + place
    left = np.maximum(k_start[band], query + lo[band])
    last = np.minimum(k_stop[band], query + hi[band] + 1) - 1
    query, left, last = (x[last >= left] for x in (query, left, last))
    first, end = left // WORD, last // WORD
    head = ALL << (left % WORD).astype(np.uint64)
    tail = ALL >> (WORD - 1 - last % WORD).astype(np.uint64)
    head, several = np.where(first == end, head & tail, head), first < end
    # Between ``first`` and ``end``, a query sees whole words: their sum over the words before is 1.
    inner = np.zeros((mask.queries, -(-mask.keys // WORD) + 1), np.int8)
    np.add.at(inner, (query[several], first[several] + 1), 1)
    np.add.at(inner, (query[several], end[several]), -1)
    words = np.cumsum(inner, 1, np.int8)[:, :-1].astype(np.uint64) * ALL
    np.bitwise_or.at(words, (query, first), head)
    np.bitwise_or.at(words, (query[several], end[several]), tail[several])
    return words.T


def _loads_all(work: list[np.ndarray], loaded: list[np.ndarray], keys: int) -> bool:
    whole = np.full(len(loaded[0]), ALL)
    if keys % WORD:
        whole[-1] >>= np.uint64(WORD - keys % WORD)
    missing = (np.append(0, np.cumsum(x != whole)) for x in loaded)
    return all(
        (m[w[:, 2] // WORD] == m[w[:, 1] // WORD]).all() for w, m in zip(work, missing, strict=True)
    )
