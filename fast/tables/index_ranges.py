"""Many index ranges as two arrays: the number of the range, and the index."""

import numpy as np


def counted(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (i, place) for place = 0, ..., counts[i] - 1 and every i."""
    i = np.repeat(np.arange(len(counts)), counts)
    return i, np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)


def expanded(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (i, n) for n = starts[i], ..., stops[i] - 1 and every i."""
    i, place = counted(np.maximum(0, stops - starts))
    return i, place + starts[i]
