"""Launches of `few_queries`, for calls with ``rank_invariant=True`` whose queries give too few CTAs work.

Scratch: 2.25 bytes for each weight (heads wider than 128: 2.5), of which sums take 0.25 (0.5). The number of weights is query
heads x queries x keys that any of these queries sees. Calls with more than 2^27 weights run `forward`.
"""

import torch
from torch import Tensor

from canon.fast.kernels.gluon.config import Config
from canon.fast.kernels.gluon.descriptors import box, descriptor
from canon.fast.kernels.gluon.few_queries import sums_kernel, weights_kernel
from canon.fast.kernels.gluon.few_queries_plan import ROWS, FewQueriesPlan, few_queries_plan, is_few, tokens_of_tile
from canon.fast.kernels.launcher import launch
from canon.fast.kernels.placed_mask import AnyMask
from canon.fast.kernels.work_tables import visits

WEIGHTS_STAGES = {64: 6, 128: 3, 256: 2}  # by padded d: at most 113 KB, so that an SM holds two CTAs
SLICES = {64: 5, 32: 7, 16: 9}  # columns of a CTA of `sums_kernel`, and stages
MOST_WEIGHTS = 1 << 27
Widths = tuple[int, int]


def few_queries(
    q: Tensor, k: Tensor, mask: AnyMask, config: Config, work_tiles: int, ctas: int
) -> FewQueriesPlan | None:
    """Return the plan, or None if `forward` is as fast, which has ``work_tiles`` for ``ctas``."""
    columns = config.columns
    if not (config.stale_maximum and is_few(mask, columns)) or work_tiles > ctas // 2:
        return None
    pack = heads_of_tile(q, k)
    tokens = tokens_of_tile(mask, pack, columns)
    number = q.shape[0] * q.shape[2] // pack * int(visits(mask, tokens, columns)[0])
    if number * pack * tokens * columns > MOST_WEIGHTS:
        return None
    return few_queries_plan(mask, pack, columns, max(1, -(-number // (2 * ctas))), q.device)


def heads_of_tile(q: Tensor, k: Tensor) -> int:
    """Return how many query heads of a group share a tile: the largest power of two, up to 16, that divides their number."""
    group = q.shape[2] // k.shape[2]
    return min(16, group & -group)


def slice_width(columns: int, ctas: int) -> int:
    """Return the columns of a CTA of `sums_kernel`, if all tiles of queries have ``columns`` of V together."""
    return next((width for width in SLICES if columns // width >= ctas * 3 // 8), 16)


def forward_of_few(
    q: Tensor, k: Tensor, v: Tensor, pads: Widths, plan: FewQueriesPlan, scale: float, softcap: float | None, ctas: int,
    out: Tensor, lse: Tensor,
) -> Tensor:  # fmt: skip
    """Write out (b, t, h, dv), with even batches, and lse (b, h, t, contiguous). Return a counter and whether to repeat."""
    (b, t, h, d), g, dv = q.shape, k.shape[2], v.shape[3]
    pack, columns, number = plan.pack, plan.keys, len(plan.columns)
    sets, rows = b * h // pack, plan.tokens * pack
    p = torch.empty(sets * number, rows, 1, columns, dtype=q.dtype, device=q.device)
    sums = torch.empty(2, sets * number, rows, 4, device=q.device)
    maxima = torch.empty(len(plan.chunks), sets, ROWS, device=q.device)
    counter = torch.zeros(2, dtype=torch.int32, device=q.device)
    common = {"GROUP": h // g, "PACK": pack, "COLUMNS": columns, "num_warps": 4}
    tiles = box(q, ROWS // pack, pack, pads[0]), box(k, columns, 1, pads[0])
    tables = plan.work, plan.chunks, plan.order, plan.columns, plan.first_visits
    arguments = (*tiles, p, sums, maxima, counter, *tables, scale, sets, number, rows, h)
    options = {"D": d, "D_PAD": pads[0], "STAGES": WEIGHTS_STAGES[pads[0]], "SOFTCAP": softcap}
    launch(weights_kernel, len(plan.chunks) * sets, q.device, arguments, **common, **options)
    all_columns = (len(plan.tiles) - 1) * sets * pads[1]
    width = slice_width(all_columns, ctas)
    tiles = box(p, 16 if rows <= 16 else ROWS, 1, 64), box(v, columns, 1, width), descriptor(sums.view(-1), 4 * ROWS)
    arguments = (*tiles, maxima, out, lse, plan.work, plan.tiles, plan.columns, sets, number, rows, h, t)
    arguments += out.stride(1), out.stride(2)
    options = {"DV": dv, "DV_PAD": pads[1], "SLICE": width, "STAGES": SLICES[width]}
    launch(sums_kernel, all_columns // width, q.device, arguments, **common, **options)
    return counter
