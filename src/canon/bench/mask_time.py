"""`canon bench masks`: measure the cost of a new mask of packed documents.

    first, repeated   both passes with a new mask, and again
    ahead             the first call with a mask whose plans were loaded (`canon.fast.prepare`)
    dispatch, plan    the layout for 8 ranks; `prepare` for one of them
    pickle, load      move the plans between processes

Without a GPU only planning is timed, with the tables of an H200.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from canon.bench.measuring import Settings
from canon.bench.shapes import Shape, documents
from canon.bench.timing import eager, median_of, peak_mb, table
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS

SHAPES = [
    "1,65536,64,8,128,documents:4096",
    "1,65536,64,8,128,documents:1024",
    "1,65536,64,8,128,documents:256",
    "1,1048576,8,1,128,documents:2048",
]
RANKS = 8
WARMING = 2  # rounds that may compile and import
H200 = (9, 0), 132, 232448  # capability, multiprocessors, bytes of shared memory of a CTA


def check(shape: Shape) -> None:
    """Raise ValueError unless the mask can be replaced by a new one of its kind."""
    if shape.kind != "documents":
        raise ValueError("masks needs packed documents: documents:MEAN")


def measure(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """Return the rows "one GPU" and "magi, 8 ranks" for ``rounds`` new masks."""
    from canon.fast.kernels.launcher import Gpu

    dtype, rounds = settings.dtype, settings.rounds
    device = settings.device if settings.device.type == "cuda" else None

    (mean,) = shape.numbers
    lists = [documents(shape.n, mean, seed=1000 + seed) for seed in range(2 * (rounds + WARMING))]
    given = {
        "heads": (shape.h, shape.g),
        "widths": (shape.d, shape.d),
        "batch": shape.b,
        "dtype": dtype,
    }
    given["device"] = device or Gpu(*H200)
    rows: list[dict[str, Any]] = []
    call = None if device is None else _both_passes(shape, dtype, device)
    for case, measure in (
        ("one GPU", partial(_one_gpu, call, device)),
        (f"magi, {RANKS} ranks", _magi),
    ):
        times = [
            measure(lists[2 * place : 2 * place + 2], given, place)
            for place in range(rounds + WARMING)
        ]
        counts = [len(ends) - 1 for ends in lists[2 * WARMING :: 2]]
        rows.append({"shape": str(shape), "case": case, "documents": counts})
        rows[-1] |= {name: [each[name] for each in times[WARMING:]] for name in times[0]}
    return rows


def _both_passes(shape: Shape, dtype: torch.dtype, device: torch.device) -> Callable[[Mask], None]:
    from canon import fast

    q, k, v, dout = shape.inputs(dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda mask: torch.autograd.grad(fast.attention(*leaves, mask), leaves, dout)


def _one_gpu(
    call: Callable[[Mask], None] | None,
    device: torch.device | None,
    lists: Sequence,
    given: dict,
    _: int,
) -> dict[str, float]:
    times = {}
    times["made_ms"], mask = _timed(partial(Mask.documents, lists[0]))
    if call and device:
        times["first_ms"], _ = eager(partial(call, mask), 1, device)
        times["peak_mb"] = peak_mb(partial(call, mask), device)
        call(mask)
        times["repeated_ms"], _ = eager(partial(call, mask), 2, device)
        times["new_mask_ms"] = times["made_ms"] + times["first_ms"] - times["repeated_ms"]
    some, plans = _planned("attention", Mask.documents(lists[1]), None, None, given)
    times |= some
    if call and device:
        times["ahead_ms"], _ = eager(partial(call, plans.mask), 1, device)
        call(plans.mask)
        repeated, _ = eager(partial(call, plans.mask), 2, device)
        times["ahead_mask_ms"] = times["load_ms"] + times["ahead_ms"] - repeated
    return times


def _magi(lists: Sequence, given: dict, place: int) -> dict[str, float]:
    from canon import fast

    PLANS.clear()
    mask, times = Mask.documents(lists[0]), {}
    times["dispatch_ms"], layout = _timed(partial(fast.dispatch, mask, RANKS))
    some, _ = _planned("magi_attention", mask, layout, place % RANKS, given)
    times |= some
    times["all_ms"] = times["dispatch_ms"] + times["plan_ms"]
    return times


def _planned(
    function: str, mask: Mask, layout: Any, rank: int | None, given: dict
) -> tuple[dict[str, float], Any]:
    from canon import fast

    times = {}
    times["plan_ms"], plans = _timed(
        partial(fast.prepare, function, mask, layout, rank=rank, **given)
    )
    times["pickle_ms"], copy = _timed(
        lambda: pickle.loads(pickle.dumps(plans, pickle.HIGHEST_PROTOCOL))
    )
    PLANS.clear()  # the plans of this process: those of the copy are loaded instead
    times["load_ms"], _ = _timed(copy.load)
    return times | {"pickle_kb": len(pickle.dumps(plans, pickle.HIGHEST_PROTOCOL)) / 1000}, copy


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return 1e3 * (time.perf_counter() - start), result


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    names = ["made", "first", "repeated", "new_mask", "ahead", "ahead_mask", "dispatch", "plan"]
    names += ["all", "pickle", "load"]
    lines = []
    for row in rows:
        medians = [median_of(row, f"{name}_ms") for name in names]
        medians.append(median_of(row, "peak_mb", ".0f"))
        count = median_of(row, "documents", ".0f")
        lines.append((row["shape"], row["case"], count, *medians))
    title = "new packed masks: milliseconds; memory of a call"
    return [table(title, ("shape", "case", "documents", *names, "peak MB"), lines)]
