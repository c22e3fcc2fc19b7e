"""`canon bench tune`: which tile sizes are fastest on this GPU, kernel by kernel.

    canon bench tune --shape 1,16384,32,8,128 --mask causal --mask documents:1024
    canon bench tune --only dkdv --config 128,64,8,2 --config 64,64,4,3,tma,partial_columns=32

A candidate is rows,columns,warps,stages and any of tma, apart, partial_stages=N, partial_columns=N, as in
`canon.fast.kernels.triton.config`. Without any, a grid around the table is tried. Each result must be what the
table's own configuration gives before it is timed.
TFLOP/s count the products a kernel makes on visible cells: forward 2, dq 3, dkdv 4, fused 5, each 2 h d area.
"""

import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from canon.fast.backward import make_delta
from canon.fast.kernels.triton import config, launch
from canon.fast.kernels.triton.config import Config
from canon.testing.bench import Shape, milliseconds

SIZES = "partial_stages=N, partial_columns=N"
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "fused": 5}


def config_of(text: str) -> Config:
    """``"128,64,8,2"`` or ``"64,64,4,3,tma,partial_columns=32"`` as a configuration. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdigit()]
    options: dict[str, Any] = {}
    for word in words[len(numbers) :]:
        name, _, number = word.partition("=")
        options[name] = int(number) if number.isdigit() else True
    flags, sizes = {"tma", "apart"}, {"partial_stages", "partial_columns"}
    right = all(name in flags if value is True else name in sizes for name, value in options.items())
    if len(numbers) != 4 or not right:
        raise ValueError(f"configuration {text!r}: expected rows,columns,warps,stages and any of tma, apart, {SIZES}")
    return Config(*numbers, **options)


def grid(kernel: str) -> list[Config]:
    """Candidates that are worth trying; those that do not fit, or spill, show it by failing or by being slow."""
    found = []
    for rows, columns, stages, tma in product((64, 128), (32, 64, 128), (1, 2, 3), (False, True)):
        if rows * columns * (2 if kernel == "forward" else 1) >= 64 * 64 and rows * columns <= 128 * 128:
            found.append(Config(rows, columns, 4 if rows * columns <= 64 * 64 else 8, stages, min(stages, 2), tma=tma))
    return found


def tune(shape: Shape, dtype: torch.dtype, device: torch.device, only: str, candidates: list[Config]) -> list[dict]:
    """A row per kernel and configuration, the table's own first: milliseconds of each run, or why it failed."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = (shape.h, shape.g, shape.g, shape.h)
    q, k, v, dout = (
        torch.randn(shape.b, shape.n, heads, shape.d, generator=draw, dtype=dtype, device=device) for heads in sizes
    )
    rows = []
    for kernel, (call, results) in _kernels(q, k, v, dout, shape).items():
        if only not in kernel:
            continue
        table, _ = launch.plan(kernel, q, v, shape.mask, *((k, v) if kernel in ("forward", "dq") else (q, dout)))
        expected: list[Tensor] = []
        for candidate in dict.fromkeys([table, *(candidates or grid(kernel))]):
            row: dict[str, Any] = {"shape": str(shape), "kernel": kernel, "config": _text(candidate)}
            rows.append(row | {"table": candidate == table})
            try:
                with config.forced(**{kernel: candidate}):
                    _agree(call, results, expected)
                    rows[-1]["ms"] = milliseconds(call)
            except (ValueError, RuntimeError) as error:
                rows[-1]["failed"] = str(error)[:200]
                continue
            median = statistics.median(rows[-1]["ms"])
            rows[-1]["tflops"] = PRODUCTS[kernel] / 2 * shape.operations / median / 1e9
    return rows


def _kernels(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, shape: Shape
) -> dict[str, tuple[Callable[[], None], list[Tensor]]]:
    """Each kernel's launch, and what it writes."""
    mask, scale = shape.mask, shape.d**-0.5
    out, lse = torch.empty_like(q), torch.empty(shape.b, shape.h, shape.n, device=q.device)
    launch.forward(q, k, v, mask, scale, out, lse)
    delta = make_delta(dout, out, lse, None)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    total = torch.zeros(q.shape, device=q.device)  # of the fused kernel, which adds to it
    out_again, lse_again = torch.empty_like(out), torch.empty_like(lse)

    def fused() -> None:
        launch.dkdv(q, k, v, dout, lse, delta, mask, scale, dk, dv, total.zero_())

    return {
        "forward": (lambda: launch.forward(q, k, v, mask, scale, out_again, lse_again), [out_again, lse_again]),
        "dq": (lambda: launch.dq(q, k, v, dout, lse, delta, mask, scale, dq), [dq]),
        "dkdv": (lambda: launch.dkdv(q, k, v, dout, lse, delta, mask, scale, dk, dv), [dk, dv]),
        "fused": (fused, [dk, dv, total]),
    }


def _agree(call: Callable[[], None], results: list[Tensor], expected: list[Tensor]) -> None:
    """Raise ValueError if a configuration gives something else than the first one did, beyond roundings."""
    for x in results:
        x.fill_(torch.nan)
    call()
    if not expected:
        expected += [x.clone() for x in results]
    for x, first in zip(results, expected, strict=True):
        unit = torch.finfo(
            torch.bfloat16 if x.dtype == torch.float32 else x.dtype
        ).eps  # p and ds are rounded to 16 bits
        error = (x.float() - first.float()).norm() / first.float().norm()
        if not error <= unit:
            raise ValueError(f"differs from the table's configuration by {error:.1e}")


def _text(candidate: Config) -> str:
    numbers = (candidate.rows, candidate.columns, candidate.warps, candidate.stages)
    sizes = [f"{name}={getattr(candidate, name)}" for name in ("partial_stages", "partial_columns")]
    return ",".join([*map(str, numbers), *sizes, *(name for name in ("tma", "apart") if getattr(candidate, name))])
