"""Launches of `few_queries`, for calls with ``rank_invariant=True`` that would keep few CTAs busy.

Scratch: 2.25 bytes for each weight (heads wider than 128: 2.5), query heads x queries x keys that
any of these queries sees. Calls with more than 2^27 weights run `forward`. Several ranks have no
limit: at most 1.1 times the bytes of K and V at D 128, 2.25 at D 64."""

import torch
from torch import Tensor
from triton.experimental.gluon.language import constexpr

from canon.fast.kernels.gluon.config import Config
from canon.fast.kernels.gluon.descriptors import box
from canon.fast.kernels.gluon.few_queries import FIRST_TILES, WHOLE, weights_kernel
from canon.fast.kernels.gluon.few_queries_plan import (
    ROWS,
    FewQueriesPlan,
    few_queries_plan,
    is_few,
    tokens_of_tile,
)
from canon.fast.kernels.gluon.few_queries_sums import results_kernel, sums_kernel
from canon.fast.kernels.launcher import launch
from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import visits

# by padded d: at most 113 KB, so that an SM holds two CTAs
WEIGHTS_STAGES = {64: 6, 128: 3, 256: 2}
SLICES = {64: 6, 32: 8, 16: 10}  # columns of a CTA of `sums_kernel`, and stages
P_ROWS = 8, 32, 64  # of a box of P
MOST_WEIGHTS = 1 << 27
Widths = tuple[int, int]


def few_queries(
    q: Tensor, k: Tensor, cells: Cells, config: Config, work_tiles: int, ctas: int
) -> FewQueriesPlan | None:
    """Return the plan, or None if `forward` is as fast."""
    columns = config.columns
    if not (config.stale_maximum and is_few(cells, columns)) or work_tiles > ctas // 2:
        return None
    pack, tokens, number = tiling(q, k, cells, columns)
    if number * pack * tokens * columns > MOST_WEIGHTS:
        return None
    return plan_for(q, k, cells, columns, ctas)


def plan_for(q: Tensor, k: Tensor, cells: Cells, columns: int, ctas: int) -> FewQueriesPlan:
    """Return the plan with two chunks for each of ``ctas``."""
    pack, _, number = tiling(q, k, cells, columns)
    return few_queries_plan(cells, pack, columns, max(1, -(-number // (2 * ctas))), q.device)


def tiling(q: Tensor, k: Tensor, cells: Cells, columns: int) -> tuple[int, int, int]:
    """Return heads and tokens of a tile of queries, and the visits of all heads."""
    pack = heads_of_tile(q, k)
    tokens = tokens_of_tile(cells, pack, columns)
    return pack, tokens, q.shape[0] * q.shape[2] // pack * int(visits(cells, tokens, columns)[0])


def heads_of_tile(q: Tensor, k: Tensor) -> int:
    """Return the heads of a group that share a tile: a power of two, at most 16."""
    group = q.shape[2] // k.shape[2]
    return min(16, group & -group)


def slice_width(columns: int, ctas: int) -> int:
    """Return the columns of a CTA of `sums_kernel`, for ``columns`` of V in all tiles."""
    return next((width for width in SLICES if columns // width >= ctas * 3 // 8), 16)


def forward_of_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pads: Widths,
    plan: FewQueriesPlan,
    scale: float,
    softcap: float | None,
    ctas: int,
    out: Tensor,
    lse: Tensor,
) -> Tensor:
    """Write out (even batches) and lse (contiguous). Return the counter of `weights_kernel`."""
    of_maxima = len(plan.chunks), q.shape[0] * q.shape[2] // plan.pack, ROWS
    maxima = torch.empty(of_maxima, dtype=torch.float32, device=q.device)
    p, sums = empty_weights(q, plan)
    counter = torch.zeros(2, dtype=torch.int32, device=q.device)
    launch_weights(q, k, pads, plan, scale, softcap, (p, sums, counter), maxima, WHOLE)
    launch_sums(q, v, pads, plan, ctas, (p, sums), maxima, out, lse)
    return counter


def empty_weights(q: Tensor, plan: FewQueriesPlan) -> tuple[Tensor, Tensor]:
    """Allocate the results of `weights_kernel`."""
    tiles, rows = q.shape[0] * q.shape[2] // plan.pack * len(plan.columns), plan.tokens * plan.pack
    p = torch.empty(tiles, rows, 1, plan.keys, dtype=q.dtype, device=q.device)
    return p, torch.empty(2, tiles, rows, 4, dtype=torch.float32, device=q.device)


def launch_weights(
    q: Tensor,
    k: Tensor,
    pads: Widths,
    plan: FewQueriesPlan,
    scale: float,
    softcap: float | None,
    written: tuple[Tensor, Tensor, Tensor],
    maxima: Tensor,
    step: constexpr,
    ranks: int = 1,
    stride: int = 0,
) -> None:
    """Launch `weights_kernel`. ``written``: p, sums and counter."""
    (b, t, h, d), pack = q.shape, plan.pack
    sets, chunks = b * h // pack, plan.first_chunks if step == FIRST_TILES else plan.chunks
    tiles = box(q, ROWS // pack, pack, pads[0]), box(k, plan.keys, 1, pads[0])
    tables = plan.work, chunks, plan.order, plan.columns, plan.first_visits
    sizes = sets, len(plan.columns), plan.tokens * pack, h, t, ranks, stride, h // k.shape[2]
    options = {"D": d, "STAGES": WEIGHTS_STAGES[pads[0]], "SOFTCAP": softcap, "STEP": step.value}
    arguments = (*tiles, *written[:2], maxima, written[2], *tables, scale, *sizes)
    launch(weights_kernel, len(chunks) * sets, q.device, arguments, **options, num_warps=4)


def launch_sums(
    q: Tensor,
    v: Tensor,
    pads: Widths,
    plan: FewQueriesPlan,
    ctas: int,
    weights: tuple[Tensor, Tensor],
    maxima: Tensor,
    out: Tensor,
    lse: Tensor,
    second: int = 0,
) -> None:
    """Launch `sums_kernel`, CONTINUED with ``second`` numbers between its sums."""
    (b, t, h, _), dv, pack, rows = q.shape, v.shape[3], plan.pack, plan.tokens * plan.pack
    sets = b * h // pack
    all_columns = (len(plan.tiles) - 1) * sets * pads[1]
    width = slice_width(all_columns, ctas)
    boxed = next(number for number in P_ROWS if rows <= number)
    tiles = box(weights[0], boxed, 1, 64), box(v, plan.keys, 1, width)
    tables = maxima, out, lse, plan.work, plan.tiles, plan.columns
    sizes = sets, len(plan.columns), rows, h, t, *out.stride()[1:3], second, h // v.shape[2]
    options = {"DV": dv, "DV_PAD": pads[1], "PACK": pack, "STAGES": SLICES[width]}
    options |= {"CONTINUED": second > 0, "num_warps": 4}
    arguments = (*tiles, weights[1], *tables, *sizes)
    launch(sums_kernel, all_columns // width, q.device, arguments, **options)


def write_results(
    o: Tensor,
    sums: Tensor,
    maxima: Tensor,
    out: Tensor,
    lse: Tensor,
    repeat: Tensor,
    ranks: int,
    stride: int,
) -> None:
    """Launch `results_kernel`."""
    (_, t, h, dv), rows = out.shape, lse.numel()
    arguments = (o, sums, maxima, out, lse, repeat, ranks, stride, rows, h, t)
    launch(
        results_kernel,
        -(-rows // ROWS),
        out.device,
        arguments,
        DV=dv,
        DV_PAD=-(-dv // ROWS) * ROWS,
        num_warps=4,
    )
