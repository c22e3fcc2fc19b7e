"""Assign chunks to ranks by the algorithm of `canon.reference.planner`, over NumPy arrays: all
plans are equal.

    chunks.py        areas and needed keys of the chunks
    this file        starts: greedy with three limits, zigzag, contiguous
    assignment.py    improves the best start: swaps of two ranks, then the relief of the rank that
                     moves most
    *.c              the same plans, compiled: dispatch makes them so where it can

Cost: O(chunks x ranks + chunks x cells) for a start; O(ranks x c^2 + cells) for a swap with c
chunks a rank. Source: as `canon.reference.planner`."""

from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np

from canon.faces import public_plans
from canon.fast.assignment import Assignment
from canon.fast.c_modules import optional_c_module
from canon.fast.chunks import Chunks
from canon.fast.tables.work_tables import band_array
from canon.masks.layout import Layout
from canon.masks.plan_cache import cached_plan

__all__ = ["dispatch"]

FAR = np.iinfo(np.int64).max
# Area of a free slot: s + (m - s) / RESERVE, with s the smallest area and m the mean to come.
RESERVE = 8
BATCH = 2  # swaps of a batch, for each rank
MOST = 1 << 61  # of a number for C


@cached_plan
def _dispatch(
    mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk
) -> Layout:
    if not mask.queries:
        return Layout([[]] * ranks, 0)
    n, slacks = mask.queries // sequences, (Fraction(1), (1 + imbalance) / 2, imbalance)
    rates = cells_per_us, tokens_per_us
    if (native := native_planner()) is not None and max(imbalance.as_integer_ratio()) < MOST:
        bounds = np.array([x.as_integer_ratio() for x in slacks])
        given = n, sequences, ranks, chunk, bounds, *rates, min(swaps_per_chunk, MOST)
        held = np.frombuffer(native.assign(band_array(mask).T, *given), np.int64)
        return Layout([_tokens(x, chunk, n) for x in held.reshape(ranks, -1).tolist()], n)
    chunks = Chunks(mask, sequences, ranks, chunk, imbalance, *rates)
    starts = [*_greedy(chunks, slacks), _zigzag(chunks), _contiguous(chunks)]
    assignment = min((Assignment(chunks, slots) for slots in starts), key=Assignment.score)
    best, slots, swaps = assignment.score(), assignment.slots.copy(), swaps_per_chunk * chunks.count
    while swaps > 0:
        swaps -= assignment.swap(min(swaps, BATCH * ranks))
        if assignment.score() >= best:
            break
        best, slots = assignment.score(), assignment.slots.copy()
    assignment = Assignment(chunks, slots)
    for _ in range(swaps_per_chunk * ranks):
        if not assignment.relieve():
            break
    return Layout([_tokens(numbers, chunk, n) for numbers in assignment.slots.tolist()], n)


@lru_cache(maxsize=1)
def native_planner() -> ModuleType | None:
    """Return `planner.c`, or None where it cannot be compiled."""
    return optional_c_module(Path(__file__).parent, "chunks.c", "assignment.c", "planner.c")


def _tokens(numbers: list[int], chunk: int, n: int) -> list[range]:
    ranges: list[range] = []
    for number in numbers:
        start, stop = min(number * chunk, n), min(number * chunk + chunk, n)
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return ranges


# Starts: (ranks, slots) indices of chunks.
def _contiguous(chunks: Chunks) -> np.ndarray:
    return _filled(chunks, _counts(chunks, empty_first=True), lambda counts: [counts])


def _zigzag(chunks: Chunks) -> np.ndarray:
    """Deal early and late halves. The last ranks get the empty chunks."""
    counts = _counts(chunks, empty_first=chunks.slots == 1)
    return _filled(chunks, counts, lambda counts: [(counts + 1) // 2, counts // 2])


def _counts(chunks, empty_first):
    empty = chunks.ranks * chunks.slots - chunks.count
    rank = np.arange(chunks.ranks)
    return chunks.slots - (rank < empty if empty_first else rank >= chunks.ranks - empty)


def _filled(chunks, counts, halves):
    """Deal chunks to ranks up for the first half, then down; empty ones last."""
    held: list[list[int]] = [[] for _ in counts]
    numbers = iter(range(chunks.ranks * chunks.slots))
    for second, half in enumerate(halves(counts)):
        for rank in range(chunks.ranks)[:: -1 if second else 1]:
            held[rank] += [next(numbers) for _ in range(half[rank])]
    for mine in held:
        mine += [next(numbers) for _ in range(chunks.slots - len(mine))]
    return np.array(held, np.int64)


def _greedy(chunks: Chunks, slacks: tuple[Fraction, ...]) -> np.ndarray:
    """Assign the largest chunk first, to the rank that it adds the fewest keys to, below slack
    times the lower bound. Axes of all arrays: slacks, ranks.
    """
    ranks, slots = chunks.ranks, chunks.slots
    limit = np.array([[int(chunks.bound * slack)] for slack in slacks])
    load, whole = np.zeros((2, len(slacks), ranks), np.int64)  # area; chunks that are not small
    free = np.full_like(load, slots)
    small_free = np.ones_like(load, bool)
    complete, may_be = np.zeros((len(slacks), 1), np.int64), ranks - chunks.small_ones
    missing = np.tile(chunks.cells, (*load.shape, 1))  # sizes of cells; 0 once a cell is needed
    held = np.zeros((*load.shape, slots), np.int64)
    left, smallest = int(chunks.area.sum()), int(chunks.area.min())
    order = np.argsort(-chunks.area, kind="stable").tolist()
    smalls, areas = chunks.small.tolist(), chunks.area.tolist()
    for place, number in enumerate(order):
        small, area = smalls[number], areas[number]
        left -= area
        reserve = smallest + (left // max(1, len(order) - place - 1) - smallest) // RESERVE
        room = free > 0
        if small:
            room &= small_free
        elif chunks.small_ones:
            room &= (whole < slots - 1) | (small_free & (complete < may_be))
        load_then = load + area + (free - 1) * reserve
        if len(chunks.needs):
            parts = [chunks.needs[number]]
        else:
            parts = [slice(*interval) for interval in chunks.intervals[number]]
        added = sum((missing[..., part].sum(2) for part in parts), np.zeros_like(load))
        added = np.where(room & (load_then <= limit), added, FAR)
        fewest = added.min(1, keepdims=True)
        room = np.where(fewest < FAR, added == fewest, room)
        for run, rank in enumerate(np.where(room, load_then, FAR).argmin(1).tolist()):
            held[run, rank, slots - free[run, rank]] = number
            load[run, rank] += area
            free[run, rank] -= 1
            if small:
                small_free[run, rank] = False
            else:
                whole[run, rank] += 1
                complete[run] += whole[run, rank] == slots
            for part in parts:
                missing[run, rank, part] = 0
    return np.sort(held, axis=2)


dispatch = public_plans.dispatch(_dispatch)
