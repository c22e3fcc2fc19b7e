"""Launches of the Hopper kernels. Ranges and NaN are those of `canon.fast.kernels.triton.launch`.

TMA needs base and strides at multiples of 16 bytes and a last stride of 1; other tensors are
copied, as are results that kernels cannot write in place. Tokens that tiles load but the mask does
not touch may hold NaN, so they are copied as 0."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from canon.fast.kernels.gluon import few_queries_launch
from canon.fast.kernels.gluon.config import (
    CAPABILITY,
    DTYPES,
    TILES_SEEN,
    Config,
    choose,
)
from canon.fast.kernels.gluon.descriptors import box, descriptor, empty_for_tma
from canon.fast.kernels.gluon.dkdv import dkdv_kernel
from canon.fast.kernels.gluon.dkdv_hdim256 import dkdv_hdim256_kernel
from canon.fast.kernels.gluon.dq import dq_kernel
from canon.fast.kernels.gluon.few_queries import FIRST_TILES, OF_A_RANK
from canon.fast.kernels.gluon.few_queries_plan import MOST_QUERIES, FewQueriesPlan
from canon.fast.kernels.gluon.forward import forward_kernel
from canon.fast.kernels.gluon.forward_plain import forward_plain_kernel
from canon.fast.kernels.gluon.method import choose_method as choose_method
from canon.fast.kernels.gluon.softmax_stats import empty_statistics as empty_statistics

# functions of a backend
from canon.fast.kernels.gluon.softmax_stats import make_row_statistics as make_row_statistics
from canon.fast.kernels.gluon.softmax_stats import row_statistics as row_statistics
from canon.fast.kernels.gluon.tile_scheduler import (
    ALL_SETS,
    FEW_VISITS,
    LAST_SETS,
    Heads,
    TileSchedule,
    Traversal,
    tile_schedule,
    untouched,
)
from canon.fast.kernels.launcher import (
    capability,
    copy_back,
    is_cpu,
    launch,
    multiprocessor_count,
    tma_loadable,
)
from canon.fast.kernels.triton import launch as portable
from canon.fast.kernels.triton.launch import head_bytes, signed
from canon.fast.kernels.triton.rows import copy_statistic, copy_tokens, mask_statistic, zero_rows
from canon.fast.tables.cells import Cells
from canon.fast.tables.device_plans import device_plan
from canon.fast.tables.work_tables import area, count_visits
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan
from canon.route.checks import Scale, split_scale
from canon.route.rank_invariance import TILE

SIMULATED_SMS = 3
LARGEST_TILE = 256  # rows or columns
MOST_ROWS = 256  # of few queries of a key head, on several ranks
# of a CTA, on average: half of 2^30, because CTAs differ
MOST_VISITS = FEW_VISITS

write_results = few_queries_launch.write_results


def forward(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells, scale: Scale, out: Tensor, lse: Tensor
) -> None:
    """As `canon.fast.kernels.torch.launch.forward`."""
    check(q)
    config, d, dv = forward_config(q, v, cells)
    group, pack, plan = query_plan(q, k, v, cells, config)
    few = few_queries_launch.few_queries(q, k, cells, config, plan.work_tiles, resident_ctas(q))
    even_out = writable(out, even_batches=True)
    even_lse = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=CONTIGUOUS)
    for rows in (few or plan).fully_masked_rows:
        zero_rows(even_out[:, rows])
        mask_statistic(even_lse[..., rows])
    if plan.work_tiles:
        scale, softcap = split_scale(scale)
        q, scale = signed(q, scale)
        v = zero_masked(v, cells, plan, keys=True)
        tiles = (
            box(q, 64 // pack, pack, d),
            box(k, config.columns, 1, d),
            box(v, config.columns, 1, dv),
        )
        sizes = q.shape[1], even_out.stride(1), even_out.stride(2), group
        work, counter = queue(plan, q)
        if few:
            given = q, k, v, (d, dv), few, scale, softcap, resident_ctas(q), even_out, even_lse
            counter = few_queries_launch.forward_of_few(*given)
        options = {"DV": v.shape[-1]}
        if config.plain:
            if plan.key_order or softcap is not None:
                raise ValueError(
                    "the plain forward kernel has no soft-cap and no rank_invariant=True: use "
                    "another configuration"
                )
            arguments = (*tiles, even_out, even_lse, work, scale, *sizes)
            run(forward_plain_kernel, plan.work_tiles, q, config, arguments, **options)
        else:
            arguments = (*tiles, even_out, even_lse, work, counter, scale, *sizes)
            options |= {
                "KEY_ORDER": plan.key_order,
                "SOFTCAP": softcap,
                "D": q.shape[-1],
                "STALE_MAXIMUM": config.stale_maximum,
                "REPEAT": bool(few),
            }
            run(forward_kernel, plan.work_tiles, q, config, arguments, **options)
    copy_back(out, even_out)
    if even_lse is not lse:
        copy_statistic(even_lse, lse)


# ------------------------------------------------------ the steps of `canon.fast.decode_in_order`
def takes_keys_of_ranks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there are kernels for such tensors."""
    config, *_ = choose("forward", q.shape[3], v.shape[3], seen=float("inf"), most_rows=TILE)
    few = q.shape[1] <= MOST_QUERIES and q.shape[1] * q.shape[2] // k.shape[2] <= MOST_ROWS
    return config.stale_maximum and v.shape[3] > 0 and q.numel() > 0 and few


def weights_of_rank(q: Tensor, k: Tensor, v: Tensor, cells: Cells) -> tuple[Tensor, Tensor]:
    """Allocate the weights, and their sums."""
    return few_queries_launch.empty_weights(q, _plan_of_rank(q, k, v, cells)[0])


def write_first_maxima(
    q: Tensor, k: Tensor, v: Tensor, maxima: Tensor, cells: Cells, scale: Scale
) -> None:
    """Write the maxima (b, h, t) of first visible tiles, in rows that see a key."""
    unused = maxima, maxima, maxima
    write_weights(q, k, v, maxima, *unused, cells, scale, 0, 0)


def write_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    maxima: Tensor,
    p: Tensor,
    sums: Tensor,
    counter: Tensor,
    cells: Cells,
    scale: Scale,
    ranks: int,
    stride: int,
) -> None:
    """Write the weights, from the first ``maxima`` of all ranks; ``counter[1]`` becomes 1 if a
    maximum must rise. With 0 ranks, write only ``maxima``.
    """
    plan, widths = _plan_of_rank(q, k, v, cells)
    if len(plan.columns):
        number, softcap = split_scale(scale)
        q, number = signed(q, number)
        step = OF_A_RANK if ranks else FIRST_TILES
        given = q, k, widths, plan, number, softcap, (p, sums, counter), maxima, step
        few_queries_launch.launch_weights(*given, ranks, stride)


def add_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    sums: Tensor,
    o: Tensor,
    totals: Tensor,
    cells: Cells,
) -> None:
    """Add P V to o (b, t, h, dv), and sums to ``totals`` (2, b, h, t, 4), float32."""
    plan, widths = _plan_of_rank(q, k, v, cells)
    if len(plan.columns):
        v = zero_masked(v, cells, plan, keys=True)
        given = q, v, widths, plan, resident_ctas(q), (p, sums), totals, o, totals, totals.stride(0)
        few_queries_launch.launch_sums(*given)


def _plan_of_rank(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells
) -> tuple[FewQueriesPlan, tuple[int, int]]:
    check(q)
    config, d, dv = forward_config(q, v, cells)
    return few_queries_launch.plan_for(q, k, cells, config.columns, resident_ctas(q)), (d, dv)


# ------------------------------------------------------------------ gradients
def dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    cells: Cells,
    scale: Scale,
    dq: Tensor,
) -> None:
    """As `canon.fast.kernels.torch.launch.dq`."""
    check(q)
    config, d, dv = choose("dq", q.shape[-1], v.shape[-1])
    group, pack, plan = query_plan(q, k, v, cells, config)
    even = writable(dq, even_batches=True)
    for rows in plan.fully_masked_rows:
        zero_rows(even[:, rows])
    if plan.work_tiles:
        queries, keys = (config.rows // 2 // pack, pack), (config.columns, 1)
        k = zero_masked(k, cells, plan, keys=True)  # dS is 0 there, but 0 times NaN is NaN
        tiles = box(q, *queries, d), box(dout, *queries, dv), box(k, *keys, d), box(v, *keys, dv)
        sizes, (scale, softcap) = (q.shape[1], *even.stride()[1:3], group), split_scale(scale)
        arguments = (*tiles, stats, stats.shape[3], even, *queue(plan, q), scale, *sizes)
        options = {"D": q.shape[-1], "KEY_ORDER": plan.key_order, "SOFTCAP": softcap}
        run(dq_kernel, plan.work_tiles, q, config, arguments, **options)
    copy_back(dq, even)


def dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    cells: Cells,
    scale: Scale,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor | None = None,
    ordered: bool = False,
) -> None:
    """As `canon.fast.kernels.torch.launch.dkdv`."""
    check(q)
    scale, softcap = split_scale(scale)
    d, dv_width, owners = q.shape[-1], v.shape[-1], dk.shape[2]
    kernel = "fused" if dq is not None else "dkdv" if max(d, dv_width) <= 128 else "dkdv_hdim256"
    config, d_pad, dv_pad = choose(kernel, d, dv_width)
    if softcap is not None:  # P and P times the slope of the scores are both in registers
        config = replace(config, columns=min(config.columns, 64))
    each = q.shape[2] // owners
    heads, read = Heads(q.shape[0], owners, 1), each * head_bytes(q, dout)
    even_ends = ALL_SETS if dq is None else 0 if ordered else LAST_SETS
    traversal = Traversal(
        config.rows, config.columns, True, heads, 1, each, read, ordered, even_ends=even_ends
    )
    plan = tile_schedule(cells, traversal, q.device)
    own_dk, own_dv = map(writable, (dk, dv))
    for rows in plan.fully_masked_rows:
        zero_rows(own_dk[:, rows])
        zero_rows(own_dv[:, rows])
    if plan.work_tiles:
        q, dout = (zero_masked(x, cells, plan, keys=False) for x in (q, dout))
        if dq is not None:
            k = zero_masked(k, cells, plan, keys=True)
        queries = box(q, config.columns, 1, d_pad), box(dout, config.columns, 1, dv_pad)
        keys = box(k, config.rows, 1, d_pad), box(v, config.rows, 1, dv_pad)
        stats_box = descriptor(stats.view(-1), config.columns)
        dq_tiles = -(-q.shape[1] // config.columns) if ordered else 0
        semaphores = q.shape[0] * q.shape[2] * dq_tiles
        strides = portable.kernel_strides(own_dk)[:3], portable.kernel_strides(own_dv)[:3]
        sizes = stats.shape[3], q.shape[2], each, q.shape[2] // k.shape[2]
        written = (own_dk, own_dv, *queue(plan, q, semaphores), scale, *strides, *sizes)
        options = {"SOFTCAP": softcap, "D": d, "DV": dv_width, "KEY_ORDER": plan.key_order}
        if kernel == "dkdv_hdim256":
            arguments = (*queries, *keys, stats_box, *written)
            run(dkdv_hdim256_kernel, plan.work_tiles, q, config, arguments, **options)
        else:
            sums = dq if dq is None or tma_loadable(dq) else empty_for_tma(dq).zero_()
            dq_box = stats_box if sums is None else box(sums, config.columns, 1, 64)
            arguments = (*queries, *keys, stats_box, dq_box, *written, dq_tiles)
            options |= {"FUSED": dq is not None, "ORDERED": ordered}
            run(dkdv_kernel, plan.work_tiles, q, config, arguments, **options)
            if sums is not dq:
                dq.add_(sums)
    copy_back(dk, own_dk)
    copy_back(dv, own_dv)


# ------------------------------------------------------------------ inputs
def forward_config(q: Tensor, v: Tensor, cells: Cells) -> tuple[Config, int, int]:
    """Return the configuration of the forward kernel and the padded widths."""
    widths = q.shape[-1], v.shape[-1]
    if cells.places is not None:
        return choose("forward", *widths, seen=float("inf"), most_rows=TILE)
    return choose(
        "forward", *widths, tiles_seen(cells.mask, q.shape[0] * q.shape[2], resident_ctas(q))
    )


def query_plan(
    q: Tensor, k: Tensor, v: Tensor, cells: Cells, config: Config
) -> tuple[int, int, TileSchedule]:
    """Return the query heads of a group, how many share a tile, and the schedule."""
    group = q.shape[2] // k.shape[2]
    pack = 1 if config.plain else packing(cells, config.rows, config.columns, group)
    heads, read = Heads(q.shape[0], q.shape[2], group), head_bytes(k, v)
    # a stale maximum needs rows that have seen many keys, which partial tiles do not give
    traversal = Traversal(
        config.rows, config.columns, False, heads, pack, 1, read,
        full_first=config.stale_maximum, ctas=resident_ctas(q),
    )  # fmt: skip
    return group, pack, tile_schedule(cells, traversal, q.device)


def check(q: Tensor) -> None:
    """Raise ValueError unless there are Hopper kernels for q's dtype and device."""
    if q.dtype not in DTYPES:
        raise ValueError(
            f'the Hopper kernels support bfloat16 and float16, not {q.dtype}: use backend("triton")'
        )
    if q.device.type == "cuda" and capability(q.device) != CAPABILITY:
        name = torch.cuda.get_device_name(q.device)
        raise ValueError(
            f"the Hopper kernels need compute capability 9.0, and this is {name}: "
            'use backend("triton")'
        )


def check_runs(q: Tensor) -> None:
    """Raise ValueError if q is on a CPU, and not in the simulator."""
    if q.device.type == "cpu" and "run" not in vars(GluonJITFunction):  # `canon.simulator` sets it
        raise ValueError(
            "the Hopper kernels need a GPU of compute capability 9.0, got CPU tensors: use "
            'backend("triton")'
        )


def zero_masked(x: Tensor, cells: Cells, plan: TileSchedule | FewQueriesPlan, keys: bool) -> Tensor:
    """Return x (b, t, h, d), or a copy with 0 in the tokens that the plan loads but the mask does
    not touch; uninitialised elsewhere.
    """
    if not plan.loads_masked_tokens[keys]:
        return x
    copy = empty_for_tma(x)
    copy_tokens(x, copy, token_states(cells, keys, x.device))
    return copy


@device_plan
def token_states(cells: Cells, keys: bool) -> np.ndarray:
    """Return 1 for keys, or queries, that a band touches, 0 for others in reach of their tiles, -1
    for the rest (int8).
    """
    states = np.ones(cells.sizes[keys], np.int8)
    for start, stop in zip(*untouched(cells, keys), strict=True):
        states[start:stop] = 0
        first = start + LARGEST_TILE if start else 0
        last = stop - LARGEST_TILE if stop < len(states) else stop
        states[first : max(first, last)] = -1
    return states


@cached_plan
def packing(cells: Cells, rows: int, columns: int, group: int) -> int:
    """Return how many query heads of a group share a tile: several if that saves a tenth of the
    visits (rank_invariant=True: a twentieth), as for short documents.
    """
    candidates = [pack for pack in (1, 2, 4, 8, 16) if group % pack == 0]
    alone, _ = count_visits(cells, rows, columns)
    most = (0.9 if cells.places is None else 0.95) * alone
    least = area(cells.mask) / (rows * columns)  # no packing has fewer visits
    if len(candidates) == 1 or least >= most:
        return 1
    packed = {pack: count_visits(cells, rows // pack, columns)[0] / pack for pack in candidates}
    best = min(candidates, key=packed.__getitem__)
    return best if packed[best] < most else 1


@cached_plan
def tiles_seen(mask: Mask, heads: int, sms: int) -> int:
    """Return the mean tiles of 128 keys that a query sees, rounded up to a bound of `LONG_TABLE`,
    so that masks share a recorded pass; a quarter of it if no SM has two tiles of queries of a
    head.
    """
    few = 1 if -(-mask.queries // 128) * heads > sms else 4
    seen = area(mask) / max(1, mask.queries) / 128 / few
    return next((bound for bound in TILES_SEEN if seen <= bound), TILES_SEEN[-1] + 1)


# ------------------------------------------------------------------ outputs
CONTIGUOUS = torch.contiguous_format


def writable(x: Tensor, even_batches: bool = False) -> Tensor:
    """Return x (b, t, h, d), or an empty tensor like it unless kernels can write x: with a last
    stride of 1, 32-bit offsets in a tile, and ``even_batches``, a batch stride of t token strides.
    """
    even = (
        x.shape[0] == 1
        or not x.numel()
        or x.stride(0) == x.shape[1] * x.stride(1)
        or not even_batches
    )
    reach = 256 * x.stride(1) + x.shape[2] * x.stride(2)
    return (
        x
        if even and x.stride(3) == 1 and reach < 2**31
        else torch.empty_like(x, memory_format=CONTIGUOUS)
    )


def resident_ctas(x: Tensor) -> int:
    """Return how many CTAs run at a time: one on each SM."""
    return SIMULATED_SMS if is_cpu(x.device) else multiprocessor_count(x.device)


def queue(plan: TileSchedule, x: Tensor, semaphores: int = 0) -> tuple[Tensor, Tensor]:
    """Return the work of a launch, and zeros: the counter of claims, then the semaphores of dq;
    ``work`` twice if no CTA reads them. Raises ValueError if a CTA could visit 2^30 tiles.
    """
    if plan.visits > MOST_VISITS * min(plan.work_tiles, resident_ctas(x)):
        raise ValueError(
            f"the call visits {plan.visits} tiles of scores, more than {MOST_VISITS} for each SM: "
            "split the heads over calls, "
            'or use backend("triton")'
        )
    if plan.work_tiles <= resident_ctas(x) and not semaphores:
        return plan.work, plan.work
    return plan.work, torch.zeros(1 + semaphores, dtype=torch.int32, device=x.device)


def constants(kernel, config: Config) -> dict:
    """Return the compile-time arguments of the configuration."""
    stated = {"STAGES": config.stages, "MATH_REGISTERS": config.math_registers, "num_warps": 4}
    if kernel is dq_kernel:
        stated["V_STAGES"] = config.v_stages or config.stages
    elif kernel is not forward_plain_kernel:  # both have one buffer for owned tiles
        stated |= {"ROWS": config.rows, "BUFFERS": config.buffers}
    return stated


def run(kernel, work_tiles: int, q: Tensor, config: Config, arguments: tuple, **options) -> None:
    """Launch a CTA on every SM, at most ``work_tiles``; the plain forward has one for each."""
    ctas = work_tiles if config.plain else min(work_tiles, resident_ctas(q))
    launch(kernel, ctas, q.device, arguments, **constants(kernel, config), **options)
