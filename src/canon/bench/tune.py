"""`canon bench tune`: measure kernels with many tile sizes on this GPU.

    canon bench tune --only dkdv --config 128,64,8,2 --config 64,64,4,3,tma,partial_columns=32
    canon bench tune --backend gluon --only forward --config 128,128,3,1,ping_pong

A candidate is the first numbers of a configuration of the backend, then any of its other fields by
name. Without candidates, a grid around the table is tried. Results must be those of the table.
TFLOP/s count the MMAs of a kernel on visible cells."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from canon.bench.shapes import Shape, asked_for
from canon.bench.timing import milliseconds, peak_mb, shown_mb, table
from canon.fast.backward import make_delta
from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.gluon import launch as hopper
from canon.fast.kernels.triton import config, launch
from canon.fast.tables.cells import Cells

SHAPES = [
    "1,16384,32,8,128,causal",
    "8,2048,32,8,128,causal",
    "1,16384,32,32,64,causal",
    "1,16384,16,16,256,causal",
]
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "fused": 5}  # MMAs, each 2 h d area
Config = config.Config | hopper_config.Config


@dataclass(frozen=True)
class Family:
    """Kernels that can be tuned: their launches and configurations."""

    launch: ModuleType
    config: ModuleType
    # the table's own configuration
    table: Callable[[str, Tensor, Tensor, Tensor, Tensor, Shape], Config]
    grid: Callable[[str, Config, Shape], list[Config]]  # candidates around it
    named: Callable[[str, Shape], str]  # the name of a kernel in the configurations
    numbers: int  # least numbers of a candidate
    unread: Callable[[str, Any], list[str]]  # fields of a candidate that the kernel does not read


def config_of(text: str, backend: str = "triton") -> Config:
    """``"128,64,8,2"`` or ``"64,64,4,3,tma,partial_columns=32"`` as a configuration. Raises
    ValueError.
    """
    made = BACKENDS[backend].config.Config
    names = [field.name for field in fields(made)]
    flags = [field.name for field in fields(made) if field.type is bool]
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdigit()]
    options: dict[str, Any] = {}
    for word in words[len(numbers) :]:
        name, _, number = word.partition("=")
        options[name] = int(number) if number.isdigit() else True
    right = all(
        name in names[len(numbers) :] and (value is True) == (name in flags)
        for name, value in options.items()
    )
    if not BACKENDS[backend].numbers <= len(numbers) <= 4 or not right:
        raise ValueError(
            f"configuration {text!r}: expected {','.join(names[:4])}, then any of "
            f"{', '.join(names[4:])}"
        )
    return made(*numbers, **options)


def _portable_table(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, shape: Shape
) -> Config:
    visited = (k, v) if kernel in ("forward", "dq") else (q, dout)
    return launch.plan(kernel, q, v, Cells(shape.mask), *visited)[0]


def _portable_grid(kernel: str, _: Config, __: Shape) -> list[Config]:
    found: list[Config] = []
    for rows, columns, stages, tma in product((64, 128), (32, 64, 128), (1, 2, 3), (False, True)):
        if (
            rows * columns * (2 if kernel == "forward" else 1) >= 64 * 64
            and rows * columns <= 128 * 128
        ):
            warps = 4 if rows * columns <= 64 * 64 else 8
            found.append(config.Config(rows, columns, warps, stages, min(stages, 2), tma=tma))
    return found


def _hopper_table(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, shape: Shape
) -> Config:
    seen = (
        hopper.tiles_seen(shape.mask, shape.b * shape.h, hopper.resident_ctas(q))
        if kernel == "forward"
        else 0.0
    )
    return hopper_config.choose(kernel, q.shape[-1], v.shape[-1], seen)[0]


def _hopper_grid(kernel: str, table: Config, shape: Shape) -> list[Config]:
    """Three warpgroups have 160 registers a thread; a thread has half a register for each column of
    scores, and of out.
    """
    assert isinstance(table, hopper_config.Config)
    forward = kernel == "forward"
    flags = (False, True) if forward else (False,)
    columns = [n for n in {table.columns // 2, table.columns, table.columns * 2} if 32 <= n <= 128]
    sizes = product(columns, (1, 2, 3, 4), (1,) if kernel == "dq" else (1, 2), flags, flags)
    return [
        replace(
            table,
            rows=rows,
            columns=n,
            stages=stages,
            buffers=buffers,
            ping_pong=ping_pong,
            stale_maximum=stale,
        )
        for n, stages, buffers, ping_pong, stale in sizes
        if stages > 1 or not forward
        for rows in ((table.rows,) if not forward else (128, 192) if n + shape.d <= 192 else (128,))
    ]


def _hopper_unread(kernel: str, candidate: Any) -> list[str]:
    flags = "ping_pong", "stale_maximum"
    names = {"forward": ("v_stages",), "dq": ("buffers", *flags)}.get(kernel, (*flags, "v_stages"))
    return [
        name for name in names if getattr(candidate, name) != getattr(hopper_config.Config, name)
    ]


BACKENDS = {
    "triton": Family(
        launch, config, _portable_table, _portable_grid, lambda kernel, _: kernel, 4, lambda *_: []
    ),
    "gluon": Family(
        hopper,
        hopper_config,
        _hopper_table,
        _hopper_grid,
        lambda kernel, shape: "dkdv_hdim256" if kernel == "dkdv" and shape.d > 128 else kernel,
        3,
        _hopper_unread,
    ),
}


def candidates(options: argparse.Namespace) -> list[Config]:
    """Return the configurations of --config. Raises ValueError, also if the backend does not
    support dtype or GPU.
    """
    if options.backend not in BACKENDS:
        raise ValueError(f"tune has the backends {' and '.join(BACKENDS)}, not {options.backend}")
    if options.backend == "gluon":
        hopper.check(
            torch.empty(
                0,
                dtype=getattr(torch, options.dtype),
                device="cuda" if torch.cuda.is_available() else None,
            )
        )
    return [config_of(text, options.backend) for text in options.config]


def tune(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    only: str,
    candidates: list[Config],
    backend: str = "triton",
) -> list[dict]:
    """Return a row per kernel and configuration, the table's own first."""
    q, k, v, dout = shape.inputs(dtype, device)
    kernels, rows = BACKENDS[backend], []
    for kernel, (call, results) in _kernels(kernels.launch, q, k, v, dout, shape).items():
        if not asked_for(kernel, only):
            continue
        name = kernels.named(kernel, shape)
        try:
            own = kernels.table(name, q, k, v, dout, shape)
        except ValueError as error:
            rows.append(
                {
                    "shape": str(shape),
                    "kernel": kernel,
                    "config": "-",
                    "table": True,
                    "failed": str(error),
                }
            )
            continue
        expected: list[Tensor] = []
        for candidate in dict.fromkeys([own, *(candidates or kernels.grid(kernel, own, shape))]):
            row: dict[str, Any] = {
                "shape": str(shape),
                "kernel": kernel,
                "config": _text(candidate),
            }
            rows.append(row | {"backend": backend, "table": candidate == own})
            try:
                if unread := kernels.unread(kernel, candidate):
                    raise ValueError(f"{kernel} does not read {', '.join(unread)}")
                with kernels.config.forced(**{name: candidate}):
                    _agree(call, results, expected)
                    rows[-1] |= {"peak_mb": peak_mb(call, device), "ms": milliseconds(call)}
            except (ValueError, RuntimeError) as error:
                rows[-1]["failed"] = str(error)[:200]
                continue
            median = statistics.median(rows[-1]["ms"])
            rows[-1]["tflops"] = PRODUCTS[kernel] / 2 * shape.operations / median / 1e9
    return rows


def _kernels(
    launch: ModuleType, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, shape: Shape
) -> dict[str, tuple[Callable[[], None], list[Tensor]]]:
    cells, scale = Cells(shape.mask), shape.d**-0.5
    out, lse = torch.empty_like(q), torch.empty(shape.b, shape.h, shape.n, device=q.device)
    launch.forward(q, k, v, cells, scale, out, lse)
    lines = launch.row_statistics(lse, make_delta(dout, out, lse, None))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    total = torch.zeros(q.shape, device=q.device)  # of the fused kernel, which adds to it
    out_again, lse_again = torch.empty_like(out), torch.empty_like(lse)

    def fused() -> None:
        launch.dkdv(q, k, v, dout, lines, cells, scale, dk, dv, total.zero_())

    return {
        "forward": (
            lambda: launch.forward(q, k, v, cells, scale, out_again, lse_again),
            [out_again, lse_again],
        ),
        "dq": (lambda: launch.dq(q, k, v, dout, lines, cells, scale, dq), [dq]),
        "dkdv": (lambda: launch.dkdv(q, k, v, dout, lines, cells, scale, dk, dv), [dk, dv]),
        "fused": (fused, [dk, dv, total]),
    }


def _agree(call: Callable[[], None], results: list[Tensor], expected: list[Tensor]) -> None:
    """Raise ValueError if a configuration differs from the first one by more than roundings."""
    for x in results:
        x.fill_(torch.nan)
    call()
    if not expected:
        expected += [x.clone() for x in results]
    for x, first in zip(results, expected, strict=True):
        # p, ds are rounded to 16 bits
        unit = torch.finfo(torch.bfloat16 if x.dtype == torch.float32 else x.dtype).eps
        error = (x.float() - first.float()).norm() / first.float().norm()
        if not error <= unit:
            raise ValueError(f"differs from the table's configuration by {error:.1e}")


def _text(candidate: Config) -> str:
    names = [field.name for field in fields(candidate)]
    values = {name: getattr(candidate, name) for name in names}
    defaults = type(candidate)(*(values[name] for name in names[:4]))
    changed = {name: values[name] for name in names[4:] if values[name] != getattr(defaults, name)}
    numbers = [str(values[name]) for name in names[:4]]
    return ",".join(
        [
            *numbers,
            *(name if value is True else f"{name}={value}" for name, value in changed.items()),
        ]
    )


def tables(rows: list[dict]) -> list:
    """Return a table, kernel by kernel, fastest first."""
    lines = []
    for row in sorted(rows, key=lambda x: (x["shape"], x["kernel"], -x.get("tflops", 0.0))):
        speed = row.get("failed") or f"{row['tflops']:.0f}"
        lines.append(
            (row["shape"], row["kernel"], row["config"] + " *" * row["table"], speed, shown_mb(row))
        )
    columns = ("shape", "kernel", "configuration", "TFLOP/s", "peak MB")
    return [table("fastest first; * is the table's own", columns, lines)]
