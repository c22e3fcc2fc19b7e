"""Assign chunks to ranks: the layouts of `canon.reference.planner`, made in C.

    chunks.c        areas and needed keys of the chunks
    assignment.c    swaps of two ranks, and the relief of the rank that moves most
    planner.c       starts, and the choice of the best

Cost: O(chunks x ranks + chunks x cells) for a start; O(ranks x c^2 + cells) for a swap with c
chunks a rank. Source: as `canon.reference.planner`."""

import warnings
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np

from canon.faces import public_plans
from canon.fast.c_modules import optional_c_module
from canon.fast.tables.work_tables import band_array
from canon.masks.layout import Layout, placed
from canon.masks.plan_cache import cached_plan
from canon.reference import planner as readable

__all__ = ["dispatch"]

LARGEST = Fraction(1 << 62)  # imbalance that C can hold: a larger one has no cells to divide
MOST_SWAPS = 1 << 30  # for each chunk


@cached_plan
def _dispatch(
    mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk
) -> Layout:
    given = mask, sequences, ranks, chunk, imbalance, cells_per_us, tokens_per_us, swaps_per_chunk
    if (planner := native_planner()) is None:
        return readable._dispatch(*given)
    if not mask.queries:
        return Layout([[]] * ranks, 0)
    tokens, imbalance = mask.queries // sequences, min(imbalance, LARGEST)
    slacks = Fraction(1), (1 + imbalance) / 2, imbalance
    held = planner.assign(
        band_array(mask).T,
        tokens,
        sequences,
        ranks,
        chunk,
        np.array([slack.as_integer_ratio() for slack in slacks]),
        cells_per_us,
        tokens_per_us,
        min(swaps_per_chunk, MOST_SWAPS),
    )
    numbers = np.frombuffer(held, np.int64).reshape(ranks, -1).tolist()
    piece = lambda i: range(min(i * chunk, tokens), min((i + 1) * chunk, tokens))
    held = (placed(list(map(piece, some))) for some in numbers)
    return Layout([[tokens for _, tokens in some] for some in held], tokens)


@lru_cache(maxsize=1)
def native_planner() -> ModuleType | None:
    """Compile and load `planner.c`. Warn where that is impossible."""
    files = "chunks.c", "assignment.c", "planner.c"
    if (module := optional_c_module(Path(__file__).parent, *files)) is None:
        warnings.warn(
            "dispatch: planner.c does not compile here, so canon.reference.dispatch makes the same "
            "layouts, slowly: install a C compiler",
            RuntimeWarning,
            stacklevel=2,
        )
    return module


dispatch = public_plans.dispatch(_dispatch)
