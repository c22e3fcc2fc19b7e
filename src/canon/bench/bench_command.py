"""`canon bench`: measure speed against peers. A contender that disagrees gets no figure.

    canon bench kernels                        one GPU: forward, every backward, peers: `canon.bench.kernels`
    canon bench layers                         one GPU: checkpointed layers, their time and memory: `canon.bench.layers`
    canon bench host                           one GPU: wall and host time of eager calls: `canon.bench.host_time`
    canon bench masks                          one GPU, or none: plans of a new mask: `canon.bench.mask_time`
    canon bench beside                         one GPU: kernels beside messages that hold SMs: `canon.bench.held_sms`
    canon bench figure RECORD --out FILE       their speeds against the length of the sequence: `canon.bench.figure`
    canon bench tune                           one GPU: tile sizes: `canon.bench.tune`
    canon bench schedules                      several GPUs: `canon.bench.schedules`
    canon bench plans                          dispatch plans, without a GPU: `canon.bench.plans`

A shape is b,n,h,g,d,mask: 1,16384,32,8,128,causal; the mask may come from --mask. TFLOP/s count visible cells alone:
forward 4 h d area, backward 2.5 times that. The record has every single time, the machine and the versions
(`canon.testing.record`). It is written after each shape, so a later failure loses nothing.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from canon.bench import figure, kernels, plans
from canon.bench.shapes import MASKS, Shape, shapes_of
from canon.testing import process_groups, record

# The commands of each option. An option of another command is an error.
OWNERS = {
    "shape": ("kernels", "layers", "tune", "schedules", "host", "masks", "beside"),
    "mask": ("kernels", "layers", "tune", "schedules", "host", "masks", "beside"),
    "only": ("kernels", "layers", "tune", "schedules", "host"),
    "dtype": ("kernels", "layers", "tune", "schedules", "host", "masks", "beside"),
    "rounds": ("kernels", "layers", "schedules", "host", "masks", "beside"),
    "config": ("tune",),
    "backend": ("kernels", "tune"),
    "ranks": ("plans", "schedules"),
    "packs": ("plans",),
    "sweep": ("kernels",),
    "auto": ("kernels",),
    "partial": ("kernels",),
    "records": ("figure",),
    "out": ("figure",),
}
DEFAULTS = {"dtype": "bfloat16", "rounds": 10, "packs": 20}  # given to every command
DISAGREES, MISUSED = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon bench``."""
    add = parser.add_argument
    what = (
        "kernels: forward and every backward and peers, on one GPU; figure: draw their records; tune: each kernel in "
    )
    what += "many tile sizes; schedules: ring, strided and Magi on several GPUs; plans: dispatch plans on a CPU; "
    what += (
        "host: time of eager calls; masks: time of a new mask, with or without a GPU; layers: 18 checkpointed layers; "
        "beside: kernels while others hold SMs"
    )
    add(
        "what",
        choices=["kernels", "layers", "figure", "tune", "schedules", "plans", "host", "masks", "beside"],
        help=what,
    )
    add("--shape", action="append", help="b,n,h,g,d or b,n,h,g,d,mask (repeatable)", metavar="SHAPE")
    add("--mask", action="append", help=MASKS, metavar="MASK")
    add("--dtype", default=DEFAULTS["dtype"], choices=["bfloat16", "float16", "float32"])
    add("--only", default="", help="contenders, or kernels, whose names hold this text, or one of several: A|B")
    add(
        "--rounds",
        type=int,
        default=DEFAULTS["rounds"],
        help="how often all are timed (default 10)",
    )
    add(
        "--backend",
        choices=["triton", "gluon", "cuda"],
        help="kernels: the only backend that is forced (default all); tune: triton or gluon (default triton)",
    )
    add("--config", action="append", default=[], help="tune: a candidate (repeatable)", metavar="CONFIG")
    kernels.add_arguments(parser)
    figure.add_arguments(parser)
    plans.add_arguments(parser)
    add("--record", type=Path, help="where to write JSON (default canon-bench/WHAT.json)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write the record. Returns 1 if Canon disagreed anywhere, 2 if it cannot be measured."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        _check_owners(options)
        work = _prepared(options, console)
    except ValueError as error:
        console.print(f"canon bench: {error}", markup=False)
        return MISUSED
    return work()


def _prepared(options: argparse.Namespace, console) -> Callable[[], int]:
    """Return the rest of the work as a function. Raises ValueError if the options are wrong."""
    if options.what == "figure":
        path = figure.run(options)
        return lambda: console.print(f"figure: {path}", markup=False) or 0
    if options.what == "plans":
        return lambda: _plans(options, console)
    if options.what == "masks" and not torch.cuda.is_available():
        return partial(_masks, options, _mask_shapes(options), None, console)
    if not torch.cuda.is_available():
        raise ValueError("it measures GPUs, and there is none here")
    if not process_groups.kernel_gpus():
        raise ValueError("it measures GPUs: unset TRITON_INTERPRET, which keeps the kernels on the CPU")
    if options.what == "kernels":
        return partial(_kernels, options, kernels.jobs(options), console)
    if options.what == "layers":
        from canon.bench import layers

        return partial(_layers, options, shapes_of(options.shape or [], options.mask or [], layers.SHAPES), console)
    if options.what == "tune":
        return _tuning(options, console)
    if options.what == "masks":
        return partial(_masks, options, _mask_shapes(options), _device(), console)
    if options.what == "host":
        from canon.bench import host_time

        found = shapes_of(options.shape or [], options.mask or [], host_time.HOST_SHAPES)
        return partial(_host, options, found, console)
    if options.what == "beside":
        from canon.bench import held_sms

        return partial(_beside, options, shapes_of(options.shape or [], options.mask or [], held_sms.SHAPES), console)
    from canon.bench import schedules

    return partial(_schedules, options, schedules.program(options), console)


def _tuning(options: argparse.Namespace, console) -> Callable[[], int]:
    from canon.bench import tune

    options.backend = options.backend or "triton"
    if options.backend not in tune.BACKENDS:
        raise ValueError(f"tune has the backends {' and '.join(tune.BACKENDS)}, not {options.backend}")
    found = shapes_of(options.shape or [], options.mask or [], tune.SHAPES)
    return partial(_tune, options, found, [tune.config_of(text, options.backend) for text in options.config], console)


def _check_owners(options: argparse.Namespace) -> None:
    for name, owners in OWNERS.items():
        if getattr(options, name) not in (None, "", False, [], DEFAULTS.get(name)) and options.what not in owners:
            raise ValueError(f"{name!r} belongs to {' and '.join(owners)}, not to {options.what}")


def _kernels(options: argparse.Namespace, jobs: list, console) -> int:
    rows, more = [], {}
    for some, more in kernels.measured(options, jobs, _device()):
        rows += some
        for table in kernels.speeds(some):
            console.print(table)
        _keep(options, rows, **more)
    for table in kernels.verdicts(more):
        console.print(table)
    console.print(kernels.summary(more), markup=False)
    return _told(console, options, any(row["canon"] and "failed" in row for row in rows))


def _tune(options: argparse.Namespace, shapes: list, candidates: list, console) -> int:
    from canon.bench import tune

    rows = []
    for shape in shapes:
        some = tune.tune(shape, getattr(torch, options.dtype), _device(), options.only, candidates, options.backend)
        rows += some
        console.print(tune.table(some))
        _keep(options, rows)
        torch.cuda.empty_cache()
    return _told(console, options, False)


def _layers(options: argparse.Namespace, found: list[Shape], console) -> int:
    from canon.bench import layers

    rows, dtype = [], getattr(torch, options.dtype)
    for shape in found:
        rows += layers.measure(shape, dtype, _device(), options.rounds, options.only)
        console.print(layers.table(rows))
        _keep(options, rows)
        torch.cuda.empty_cache()
    return _told(console, options, any("failed" in row and row["contender"].startswith("canon") for row in rows))


def _host(options: argparse.Namespace, found: list[Shape], console) -> int:
    from canon.bench import host_time

    rows, dtype = [], getattr(torch, options.dtype)
    for shape in found:
        some = host_time.host(shape, dtype, _device(), options.rounds, options.only)
        console.print(host_time.host_table(some))
        console.print(host_time.parts_table(some))
        rows += some
        _keep(options, rows)
        torch.cuda.empty_cache()
    return _told(console, options, any("failed" in row and row["contender"].startswith("canon") for row in rows))


def _mask_shapes(options: argparse.Namespace) -> list[Shape]:
    from canon.bench import mask_time

    found = shapes_of(options.shape or [], options.mask or [], mask_time.SHAPES)
    if any(not shape.mask_name.startswith("documents:") for shape in found):
        raise ValueError("masks needs packed documents: documents:MEAN")
    return found


def _masks(options: argparse.Namespace, found: list[Shape], device: torch.device | None, console) -> int:
    from canon.bench import mask_time

    rows = []
    for shape in found:
        some = mask_time.masks(shape, getattr(torch, options.dtype), device, options.rounds)
        console.print(mask_time.mask_table(some))
        rows += some
        _keep(options, rows)
        if device is not None:
            torch.cuda.empty_cache()
    return _told(console, options, False)


def _beside(options: argparse.Namespace, found: list[Shape], console) -> int:
    from canon.bench import held_sms
    from canon.fast.kernels.launcher import multiprocessor_count

    rows = []
    for shape in found:
        some = held_sms.beside(shape, getattr(torch, options.dtype), _device(), options.rounds)
        console.print(held_sms.beside_table(some, multiprocessor_count(_device())))
        rows += some
        _keep(options, rows)
    return _told(console, options, False)


def _schedules(options: argparse.Namespace, program, console) -> int:
    from canon.bench import schedules

    rows, program = [], replace(program, keep=partial(_keep, options))
    for some in schedules.measured(program, options.ranks[0] if options.ranks else None):
        rows += some
        console.print(schedules.table(some))
        _keep(options, rows)
    return _told(console, options, any("failed" in row for row in rows if not row["peer"]))


def _plans(options: argparse.Namespace, console) -> int:
    rows = plans.plans(options)
    console.print(plans.table(rows))
    _keep(options, rows)
    return _told(console, options, False)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _record_path(options: argparse.Namespace) -> Path:
    return options.record or Path(f"canon-bench/{options.what}.json")


def _keep(options: argparse.Namespace, rows: list[dict], **more: Any) -> None:
    record.write(_record_path(options), _command(options), rows, dtype=options.dtype, **more)


def _told(console, options: argparse.Namespace, wrong: bool) -> int:
    console.print(f"record: {_record_path(options)}", markup=False)
    return DISAGREES if wrong else 0


def _command(options: argparse.Namespace) -> str:
    """The command without the path of its record."""
    words = ["canon", "bench", options.what]
    for name, owners in OWNERS.items():
        value = getattr(options, name)
        if options.what in owners and value not in (None, "", False, []):
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return shlex.join(words)
