"""`canon bench masks`: measure the cost of a new mask of packed documents.

    first, repeated   both passes with a new mask, and again; each call alone
    new mask          made, dispatch and first without repeated
    ahead             the first call with a mask whose plans were loaded (`canon.fast.prepare`)
    dispatch, plan    the layout for 8 ranks; `prepare` for one of them
    pickle, load      move the plans between processes
    pin               on a GPU: what a `DataLoader(pin_memory=True)` does in a thread, before load

Several GPUs also run `magi_attention` on new masks. Without a GPU only planning is timed, with the
tables of an H200.
"""

import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from canon.bench.measuring import Settings
from canon.bench.shapes import Shape, documents
from canon.bench.timing import eager, median_of, peak_mb, slowest, table
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS
from canon.testing import process_groups

SHAPES = [
    "1,65536,64,8,128,documents:4096",
    "1,65536,64,8,128,documents:1024",
    "1,65536,64,8,128,documents:256",
    "1,1048576,8,1,128,documents:2048",
]
RANKS = 8
WARMING = 2  # rounds that may compile and import
REPEATED = 3  # calls with a known mask
LIMIT = 300.0  # seconds of all GPUs
H200 = (9, 0), 132, 232448  # capability, multiprocessors, bytes of shared memory of a CTA


def check(shape: Shape) -> None:
    """Raise ValueError unless the mask can be replaced by a new one."""
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
        "device": device or Gpu(*H200),
    }
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
        rows.append(_row(shape, case, counts, times))
    if device and (ranks := torch.cuda.device_count()) > 1:
        program = partial(magi_on_ranks, shape, dtype, lists[::2])
        times = process_groups.gpus(program, ranks, timeout=LIMIT)[0]
        rows.append(_row(shape, f"magi, {ranks} GPUs", counts, times))
    return rows


def _row(shape: Shape, case: str, counts: list[int], times: list[dict[str, float]]) -> dict:
    row = {"shape": str(shape), "case": case, "documents": counts}
    return row | {name: [each[name] for each in times[WARMING:]] for name in times[0]}


def magi_on_ranks(
    shape: Shape, dtype: torch.dtype, lists: Sequence, device: str = "cuda"
) -> list[dict[str, float]]:
    """Return the times of `magi_attention` for masks of these documents."""
    from canon import fast

    rank, ranks, times = dist.get_rank(), dist.get_world_size(), []
    where = torch.device(device)
    tensors = shape.inputs(dtype, where)
    for ends in lists:
        made, mask = _timed(partial(Mask.documents, ends))
        planned, layout = _timed(partial(fast.dispatch, mask, ranks))
        *leaves, dout = (layout.shard(x, rank) for x in tensors)
        leaves = [x.requires_grad_() for x in leaves]

        def call(leaves=leaves, dout=dout, mask=mask, layout=layout):
            torch.autograd.grad(fast.magi_attention(*leaves, mask, layout), leaves, dout)

        row = {"made_ms": slowest(made, where), "dispatch_ms": slowest(planned, where)}
        times.append(row | _first_and_repeated(call, where))
        times[-1]["new_mask_ms"] += row["made_ms"] + row["dispatch_ms"]
    return times


def _first_and_repeated(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    first, _ = eager(call, 1, device)
    for _ in range(2):  # recorded; then replayed
        call()
    repeated = statistics.median(eager(call, 1, device)[0] for _ in range(REPEATED))
    return {"first_ms": first, "repeated_ms": repeated, "new_mask_ms": first - repeated}


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
        times |= _first_and_repeated(partial(call, mask), device)
        times["new_mask_ms"] += times["made_ms"]
        times["peak_mb"] = peak_mb(partial(call, mask), device)
    some, plans = _planned("attention", Mask.documents(lists[1]), None, None, given)
    times |= some
    if call and device:
        times["ahead_ms"] = _first_and_repeated(partial(call, plans.mask), device)["first_ms"]
    return times


def _magi(lists: Sequence, given: dict, place: int) -> dict[str, float]:
    from canon import fast

    PLANS.clear()
    mask, times = Mask.documents(lists[0]), {}
    times["dispatch_ms"], layout = _timed(partial(fast.dispatch, mask, RANKS))
    some, _ = _planned("magi_attention", mask, layout, place % RANKS, given)
    return times | some


def _planned(
    function: str, mask: Mask, layout: Any, rank: int | None, given: dict
) -> tuple[dict[str, float], Any]:
    from canon import fast

    times, known = {}, set(PLANS.plans)
    times["plan_ms"], plans = _timed(
        partial(fast.prepare, function, mask, layout, rank=rank, **given)
    )
    times["pickle_ms"], copy = _timed(
        lambda: pickle.loads(pickle.dumps(plans, pickle.HIGHEST_PROTOCOL))
    )
    if isinstance(given["device"], torch.device):
        times["pin_ms"], copy = _timed(copy.pin_memory)
    for key in set(PLANS.plans) - known:  # those of the copy are loaded instead
        PLANS.drop(key)
    times["load_ms"], _ = _timed(copy.load)
    return times, copy


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return 1e3 * (time.perf_counter() - start), result


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    names = ["made", "first", "repeated", "new_mask", "ahead", "dispatch", "plan", "pickle", "load"]
    lines = []
    for row in rows:
        medians = [median_of(row, f"{name}_ms") for name in names]
        medians.append(median_of(row, "peak_mb", ".0f"))
        count = median_of(row, "documents", ".0f")
        lines.append((row["shape"], row["case"], count, *medians))
    title = "new packed masks: milliseconds; memory of a call"
    return [table(title, ("shape", "case", "documents", *names, "peak MB"), lines)]
