"""From tensors to launches of the Hopper kernels: the functions of `canon.fast.kernels.triton.launch`, with its arguments.

What TMA cannot load as it stands is copied first: tensors whose base or strides are no multiples of 16 bytes, or whose last
stride is not 1. So are tensors of which a tile would load tokens that the mask does not touch, which may hold NaN: the copy
holds 0 there.
Results that kernels cannot write (`evenly`, `nearby`) are made apart and copied. Everything else is used in place.

Elements are of two bytes, heads at most 256 wide, and the device is an sm_90: anything else is a ValueError. The range of
scores and values, and what a NaN reaches, are those of `canon.fast.kernels.triton.launch`; only the tiles are others.
"""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.errors import OutOfResources

from canon.fast.device_plans import device_plan
from canon.fast.kernels.gluon.config import CAPABILITY, DTYPES, Config, choose, padded_to
from canon.fast.kernels.gluon.dkdv import dkdv_kernel
from canon.fast.kernels.gluon.dkdv_hdim256 import dkdv_hdim256_kernel
from canon.fast.kernels.gluon.dq import dq_kernel
from canon.fast.kernels.gluon.forward import forward_kernel
from canon.fast.kernels.gluon.softmax_stats import empty_statistics as empty_statistics
from canon.fast.kernels.gluon.softmax_stats import make_row_statistics as make_row_statistics  # functions of a backend
from canon.fast.kernels.gluon.softmax_stats import row_statistics as row_statistics
from canon.fast.kernels.gluon.tile_scheduler import Heads, TileSchedule, followers_wait_little, tile_schedule, untouched
from canon.fast.kernels.launcher import capability, launch, multiprocessor_count
from canon.fast.kernels.triton import launch as portable
from canon.fast.tiles import work_table
from canon.reference.mask import Mask
from canon.reference.plan_cache import cached_plan

LOG2E = 1.4426950408889634
SIMULATED_PROCESSORS = 3
TILES = {size: NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=4) for size in (2, 4)}
LINE = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

delta, merge, sum_heads = portable.delta, portable.merge, portable.sum_heads  # no products: nothing to gain here


def choose_method(q: Tensor, k: Tensor, v: Tensor, mask: Mask, multiprocessors: int) -> str:
    """Return the backward method for "auto": as the Triton backend, but "fused" where adding to dq in order costs little."""
    method = portable.choose_method(q, k, v, mask, multiprocessors)
    d, dv = q.shape[3], v.shape[3]
    if method == "head_parallel" or not padded_to("fused", d, dv):
        return method
    config, *pads = choose("fused", d, dv)
    query_heads, key_heads = (x.shape[0] * x.shape[2] for x in (q, k))
    cheap = followers_wait_little(mask, query_heads, key_heads, multiprocessors, max(pads), config.rows, config.columns)
    return "fused" if cheap else method


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out: Tensor, lse: Tensor) -> None:
    """Writes out (b, t, h, dv) and lse (b, h, t)."""
    check(q)
    config, d, dv = choose(
        "forward", q.shape[-1], v.shape[-1], tiles_seen(mask, q.shape[0] * q.shape[2], processors(q))
    )
    group, pack, plan = query_plan(q, k, v, mask, config)
    even_out, line_lse = evenly(out), lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=CONTIGUOUS)
    for rows in plan.blind:
        even_out[:, rows] = 0
        line_lse[..., rows] = float("-inf")
    if plan.items:
        q, scale = positive(q, scale)
        tiles = (
            box(q, 64 // pack, pack, d),
            box(k, config.columns, 1, d),
            box(seen_only(v, mask, plan, keys=True), config.columns, 1, dv),
        )
        strides = even_out.stride(1), even_out.stride(2)
        arguments = (*tiles, even_out, line_lse, *queue(plan, q), scale * LOG2E, q.shape[1], *strides)
        options = {"GROUP": group, "DV": v.shape[-1], "PACK": pack}
        options |= {"PING_PONG": config.turns, "STALE_MAXIMUM": config.optimistic}
        run(forward_kernel, plan.items, q, config, arguments, D_PAD=d, DV_PAD=dv, **options)
    settle(out, even_out)
    settle(lse, line_lse)


def dq(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lines: Tensor, mask: Mask, scale: float, dq: Tensor) -> None:
    """Writes dq (b, t, h, d)."""
    check(q)
    config, d, dv = choose("dq", q.shape[-1], v.shape[-1])
    group, pack, plan = query_plan(q, k, v, mask, config)
    even = evenly(dq)
    for rows in plan.blind:
        even[:, rows] = 0
    if plan.items:
        queries, keys = (config.rows // 2 // pack, pack), (config.columns, 1)
        q, dout = (seen_only(x, mask, plan, keys=False) for x in (q, dout))
        k, v = (seen_only(x, mask, plan, keys=True) for x in (k, v))
        tiles = box(q, *queries, d), box(dout, *queries, dv), box(k, *keys, d), box(v, *keys, dv)
        strides = even.stride(1), even.stride(2)
        arguments = (*tiles, lines, lines.shape[3], even, *queue(plan, q), scale, q.shape[1], *strides)
        run(dq_kernel, plan.items, q, config, arguments, GROUP=group, D=q.shape[-1], D_PAD=d, DV_PAD=dv, PACK=pack)
    settle(dq, even)


def dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lines: Tensor,
    mask: Mask,
    scale: float,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor | None = None,
    ordered: bool = False,
) -> None:
    """Writes dk (b, s, o, d) and dv (b, s, o, dv); o, the owners, are the key heads, or the query heads.

    With ``dq`` (b, t, h, d), float32, adds to it: the fused method; in any order, or ``ordered``: the same each time.
    """
    check(q)
    wide = dq is None and max(q.shape[-1], v.shape[-1]) > 128
    kernel = "dkdv_hdim256" if wide else "dkdv" if dq is None else "fused"
    config, d_pad, dv_pad = choose(kernel, q.shape[-1], v.shape[-1])
    owners = dk.shape[2]
    each = q.shape[2] // owners
    heads = Heads(q.shape[0], owners, 1)
    read = each * head_bytes(q, dout)
    plan = tile_schedule(mask, config.rows, config.columns, True, heads, 1, read, q.device, each, ordered)
    near_dk, near_dv = map(nearby, (dk, dv))
    for rows in plan.blind:
        near_dk[:, rows] = 0
        near_dv[:, rows] = 0
    if plan.items:
        q, dout = (seen_only(x, mask, plan, keys=False) for x in (q, dout))
        k, v = (seen_only(x, mask, plan, keys=True) for x in (k, v))
        sums = dq if dq is None or reachable(dq) else roomy(dq).zero_()
        queries = box(q, config.columns, 1, d_pad), box(dout, config.columns, 1, dv_pad)
        keys = box(k, config.rows, 1, d_pad), box(v, config.rows, 1, dv_pad)
        line = described(lines.view(-1), config.columns)
        tiles = -(-q.shape[1] // config.columns) if ordered else 0
        places = q.shape[0] * q.shape[2] * tiles
        strides = near_dk.stride()[:3], near_dv.stride()[:3]
        written = (near_dk, near_dv, *queue(plan, q, places), scale, *strides, lines.shape[3], q.shape[2])
        group = q.shape[2] // k.shape[2]
        options = {"HEADS": each, "GROUP": group, "D": q.shape[-1], "DV": v.shape[-1], "D_PAD": d_pad, "DV_PAD": dv_pad}
        if wide:
            run(dkdv_hdim256_kernel, plan.items, q, config, (*queries, *keys, line, *written), **options)
        else:
            added = line if sums is None else box(sums, config.columns, 1, 64)
            options |= {"FUSED": dq is not None, "ORDERED": ordered}
            run(dkdv_kernel, plan.items, q, config, (*queries, *keys, line, added, *written, tiles), **options)
        if dq is not None and sums is not dq:
            dq.add_(sums)
    settle(dk, near_dk)
    settle(dv, near_dv)


# ------------------------------------------------------------------ inputs
def query_plan(q: Tensor, k: Tensor, v: Tensor, mask: Mask, config: Config) -> tuple[int, int, TileSchedule]:
    """For kernels that own tiles of queries: heads of a group, how many of them share a tile, and the schedule."""
    group = q.shape[2] // k.shape[2]
    pack = packing(mask, config.rows, config.columns, group)
    heads, read = Heads(q.shape[0], q.shape[2], group), head_bytes(k, v)
    # Optimism wants all of a tile's rows to have seen much: under the diagonal some see one key at first.
    plan = tile_schedule(
        mask, config.rows, config.columns, False, heads, pack, read, q.device, full_first=config.optimistic
    )
    return group, pack, plan


def check(q: Tensor) -> None:
    """Raise ValueError unless there are Hopper kernels for q's dtype and device."""
    if q.dtype not in DTYPES:
        raise ValueError(f'the Hopper kernels are for bfloat16 and float16, got {q.dtype}: use backend("triton")')
    if q.device.type == "cuda" and capability(q.device) != CAPABILITY:
        name = torch.cuda.get_device_name(q.device)
        raise ValueError(f'the Hopper kernels are for compute capability 9.0, this is {name}: use backend("triton")')


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a scale > 0 that give the same scores: the forward hides cells with -inf before it scales them.

    A scale of NaN stays NaN.
    """
    if portable.vanishes(scale, q.dtype):
        return q * 0.0, 1.0  # NaN stays NaN
    return (-q, -scale) if scale < 0 else (q, scale)


def seen_only(x: Tensor, mask: Mask, plan: TileSchedule, keys: bool) -> Tensor:
    """x (b, t, h, d), queries or keys; a copy with 0 in those that the mask does not touch, if the plan loads such."""
    return torch.where(unseen_tokens(mask, keys, x.device)[:, None, None], 0.0, x) if plan.strays[keys] else x


@device_plan
def unseen_tokens(mask: Mask, keys: bool, device: torch.device) -> Tensor:
    """Which keys, or queries, no band touches (bool)."""
    return torch.from_numpy(untouched(mask, keys)).to(device)


def box(x: Tensor, tokens: int, heads: int, width: int) -> TensorDescriptor:
    """What TMA loads boxes of x (b, t, h, d) by, or adds them by; columns behind d, and rows behind t, arrive as 0.

    x, or a copy if TMA cannot reach it: what is added to must be `reachable`.
    """
    return described(x if reachable(x) else roomy(x).copy_(x), 1, tokens, heads, width)


def described(x: Tensor, *block: int) -> TensorDescriptor:
    """What TMA loads blocks of x by, which it can reach."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(description(x.dtype, x.shape, x.stride(), block), base=x)
    return made


@lru_cache(maxsize=4096)
def description(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], block: tuple[int, ...]) -> dict:
    """What a descriptor of such tensors holds: its checks take longer than all the rest."""
    layout = LINE if len(shape) == 1 else TILES[dtype.itemsize]
    strided = described_strides(dtype, shape, strides)
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), strided, list(block), layout))


def described_strides(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    """The strides, but those of axes of length 1, which may be anything, as if they were contiguous."""
    inner, made = padded_width(dtype, shape), [1]
    for n, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        made.insert(0, stride if n > 1 else inner)
        inner = n * made[0]
    return made


def reachable(x: Tensor) -> bool:
    """Whether TMA can reach x (b, t, h, d) where it is: base and strides multiples of 16 bytes, the last stride 1."""
    return x.data_ptr() % 16 == 0 and reachable_by(x.shape, x.stride(), x.element_size())


@lru_cache(maxsize=4096)
def reachable_by(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether TMA can take such steps."""
    steps = [stride * itemsize for n, stride in zip(shape[:3], strides[:3], strict=True) if n > 1]
    return strides[3] == 1 and all(step > 0 and step % 16 == 0 and step < 2**40 for step in steps)


def roomy(x: Tensor) -> Tensor:
    """Room for a tensor like x (b, t, h, d) that TMA can reach."""
    return x.new_empty(*x.shape[:3], padded_width(x.dtype, x.shape))[..., : x.shape[3]]


def padded_width(dtype: torch.dtype, shape: torch.Size) -> int:
    """d in whole units of 16 bytes."""
    unit = 16 // dtype.itemsize
    return -(-shape[-1] // unit) * unit


@cached_plan
def packing(mask: Mask, rows: int, columns: int, group: int) -> int:
    """How many query heads of a group share a tile: more than one where it saves a tenth of the visits.

    A tile of 128 rows is then 64 tokens of two heads, or 32 of four: less is wasted at the edges of short documents.
    """
    candidates = [pack for pack in (1, 2, 4, 8, 16) if group % pack == 0]
    visits = {pack: work_table(mask, rows // pack, columns).visits / pack for pack in candidates}
    best = min(candidates, key=lambda pack: visits[pack])
    return best if visits[best] < 0.9 * visits[1] else 1


@cached_plan
def tiles_seen(mask: Mask, heads: int, programs: int) -> float:
    """How many tiles of 128 keys a query sees on average; a quarter of it where no program has two tiles of queries."""
    tiles = -(-mask.queries // 128)
    return mask.area / max(1, mask.queries) / 128 / (1 if tiles * heads > programs else 4)


# ------------------------------------------------------------------ outputs
CONTIGUOUS = torch.contiguous_format


def evenly(x: Tensor) -> Tensor:
    """x (b, t, h, d) if kernels can write it: one stride from token to token through all batches, the last stride 1."""
    even = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    reach = 256 * x.stride(1) + x.shape[2] * x.stride(2)
    return x if even and reach < 2**31 else torch.empty_like(x, memory_format=CONTIGUOUS)


def nearby(x: Tensor) -> Tensor:
    """x (b, s, o, d) if kernels can write it: the last stride 1, rows of a tile within reach of 32 bits."""
    reach = 128 * x.stride(1)
    return x if x.stride(3) == 1 and reach < 2**31 else torch.empty_like(x, memory_format=CONTIGUOUS)


def settle(x: Tensor, made: Tensor) -> None:
    """Copy what was made into x, unless it was made there."""
    if made is not x:
        x.copy_(made)


# ------------------------------------------------------------------ launches
def head_bytes(*tensors: Tensor) -> int:
    """What one head of these (b, t, h, d) holds."""
    return sum(x.shape[1] * x.shape[3] * x.element_size() for x in tensors)


def processors(x: Tensor) -> int:
    """How many programs run at a time."""
    if x.device.type == "cpu":
        return SIMULATED_PROCESSORS
    return multiprocessor_count(x.device)


def queue(plan: TileSchedule, x: Tensor, places: int = 0) -> tuple[Tensor, Tensor]:
    """What there is to do, and the counter that programs claim it from: the launch's own, for streams may overlap.

    Behind it are the ``places`` where programs that add to the same wait for one another. Where each program has one item
    at most and there are none, nobody reads the counter, and none is made.
    """
    some = plan.items > processors(x) or places
    return plan.work, torch.zeros(1 + places, dtype=torch.int32, device=x.device) if some else plan.work


def constants(kernel, config: Config) -> dict:
    """What a configuration says to a kernel at compile time."""
    said = {"ROWS": config.rows, "COLUMNS": config.columns, "STAGES": config.stages}
    if kernel is not dq_kernel:  # which owns its tiles once
        said["BUFFERS"] = config.buffers
    return {**said, "MATH_REGISTERS": config.math_registers, "num_warps": 4}


def run(kernel, items: int, q: Tensor, config: Config, arguments: tuple, **options) -> None:
    """Launches a program on every processor, but no more than ``items``.

    Raises ValueError if the device has too little shared memory after all.
    """
    try:
        launch(kernel, min(items, processors(q)), q.device, arguments, **constants(kernel, config), **options)
    except OutOfResources as error:
        raise ValueError(
            f"{kernel.__name__} with {config} needs {error.required} of {error.name}, this device has {error.limit}: "
            'use backend("triton")'
        ) from error
    except RuntimeError as error:
        if q.device.type != "cpu" or "active drivers" not in str(error):
            raise
        raise RuntimeError("the Hopper kernels need an sm_90; on a CPU, canon.testing.simulator.simulated()") from error
