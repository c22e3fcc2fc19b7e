"""Sample packs of documents with a published distribution of lengths.

Long documents are cut into quarter packs and a rest. The shuffled pieces fill the packs in order.

Source: histogram and recipe of MagiAttention's benchmark (Tao and Huang, SandAI, 2025).
"""

from functools import lru_cache

import numpy as np

HISTOGRAM = (  # shortest, longest, documents
    (0, 10, 30_254),
    (11, 50, 391_188),
    (51, 100, 699_596),
    (101, 200, 1_377_757),
    (201, 500, 3_794_735),
    (501, 1024, 3_316_785),
    (1025, 2048, 2_106_566),
    (2049, 4096, 988_525),
    (4097, 8192, 410_002),
    (8193, 16_384, 173_574),
    (16_385, 32_768, 115_007),
    (32_769, 65_536, 18_428),
    (65_537, 131_072, 22_513),
    (131_073, 196_608, 18_284),
)


def sampled_packs(tokens: int, count: int) -> list[list[int]]:
    """Return the cu_seqlens of ``count`` packs. Raises ValueError."""
    if tokens < 4 or count < 0:
        raise ValueError(f"a pack needs at least 4 tokens and count >= 0, got {tokens} and {count}")
    ends, order = _shuffled(tokens)
    if count > len(order):
        raise ValueError(
            f"the distribution fills {len(order)} packs of {tokens} tokens, not {count}"
        )
    return [_pack(ends, int(index) * tokens, tokens) for index in order[:count]]


@lru_cache(maxsize=4)
def _shuffled(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    middles, documents = np.array(
        [((shortest + longest) // 2, n) for shortest, longest, n in HISTOGRAM]
    ).T
    whole, rest = np.divmod(np.repeat(middles, documents), tokens // 4)
    pieces = np.concatenate([np.full(whole.sum(), tokens // 4), rest[rest > 0]])
    rng = np.random.default_rng(42)
    rng.shuffle(pieces)
    ends = np.cumsum(pieces)
    order = np.arange(ends[-1] // tokens)
    rng.shuffle(order)
    return ends, order


def _pack(ends: np.ndarray, start: int, tokens: int) -> list[int]:
    first = np.searchsorted(ends, start, "right")
    last = np.searchsorted(ends, start + tokens, "left")
    return [0, *(ends[first:last] - start).tolist(), tokens]
