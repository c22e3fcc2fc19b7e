"""`canon bench`: measure speed and memory beside peers. A contender that disagrees gets no figure.

    canon bench kernels      one GPU: forward, every backward, peers
    canon bench layers       one GPU: checkpointed layers, their time and memory
    canon bench host         one GPU: wall and host time of eager calls
    canon bench masks        one GPU, or none: plans of a new mask
    canon bench beside       one GPU: kernels while messages hold SMs
    canon bench tune         one GPU: tile sizes
    canon bench schedules    several GPUs
    canon bench plans        dispatch plans, without a GPU

A shape is b,n,h,g,d,mask: 1,16384,32,8,128,causal; the mask may come from --mask. TFLOP/s count visible cells alone: forward
4 h d area, backward 2.5 times that. The record has every single time, and is written after each shape.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from canon.bench import kernels, plans
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
}
DEFAULTS = {"dtype": "bfloat16", "rounds": 10, "packs": 20}  # given to every command
DISAGREES, MISUSED = 1, 2
HELP = """kernels: forward, every backward and peers, on one GPU; layers: 18 checkpointed layers; host: time of eager calls;
masks: time of a new mask, with or without a GPU; beside: kernels while others hold SMs; tune: each kernel in many tile sizes;
schedules: ring, strided and Magi on several GPUs; plans: dispatch plans on a CPU"""


@dataclass(frozen=True)
class _Bench:
    """A bench of one shape after another: its module, its rows (module, inputs, options) and its tables."""

    module: str
    measure: Callable[[ModuleType, tuple, argparse.Namespace], list[dict]]
    tables: Callable[[ModuleType, list[dict]], Iterable[Any]]


BENCHES = {
    "layers": _Bench("layers", lambda m, x, o: m.measure(*x, o.rounds, o.only), lambda m, rows: [m.table(rows)]),
    "host": _Bench("host_time", lambda m, x, o: m.host(*x, o.rounds, o.only),
                   lambda m, rows: [m.host_table(rows), m.parts_table(rows)]),
    "masks": _Bench("mask_time", lambda m, x, o: m.masks(*x, o.rounds), lambda m, rows: [m.mask_table(rows)]),
    "beside": _Bench("held_sms", lambda m, x, o: m.beside(*x, o.rounds), lambda m, rows: [m.beside_table(rows, m.sms())]),
    "tune": _Bench("tune", lambda m, x, o: m.tune(*x, o.only, m.candidates(o), o.backend), lambda m, rows: [m.table(rows)]),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon bench``."""
    add = parser.add_argument
    add("what", choices=["kernels", *BENCHES, "schedules", "plans"], help=HELP)
    add("--shape", action="append", help="b,n,h,g,d or b,n,h,g,d,mask (repeatable)", metavar="SHAPE")
    add("--mask", action="append", help=MASKS, metavar="MASK")
    add("--dtype", default=DEFAULTS["dtype"], choices=["bfloat16", "float16", "float32"])
    add("--only", default="", help="contenders, or kernels, whose names hold this text, or one of several: A|B")
    add("--rounds", type=int, default=DEFAULTS["rounds"], help="how often all are timed (default 10)")
    text = "kernels: the only backend that is forced (default all); tune: triton or gluon (default triton)"
    add("--backend", choices=["triton", "gluon", "cuda"], help=text)
    add("--config", action="append", default=[], help="tune: a candidate (repeatable)", metavar="CONFIG")
    kernels.add_arguments(parser)
    plans.add_arguments(parser)
    add("--record", type=Path, help="where to write JSON (default canon-bench/WHAT.json)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write the record. Return 1 if Canon disagreed anywhere, 2 if it cannot be measured."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        _check_owners(options)
        work = _prepared(options, console)
    except ValueError as error:
        console.print(f"canon bench: {error}", markup=False)
        return MISUSED
    return work()


def _check_owners(options: argparse.Namespace) -> None:
    for name, owners in OWNERS.items():
        if getattr(options, name) not in (None, "", False, [], DEFAULTS.get(name)) and options.what not in owners:
            raise ValueError(f"{name!r} belongs to {' and '.join(owners)}, not to {options.what}")


def _prepared(options: argparse.Namespace, console) -> Callable[[], int]:
    if options.what == "plans":
        return lambda: _plans(options, console)
    if not (torch.cuda.is_available() or options.what == "masks"):
        raise ValueError("it measures GPUs, and there is none here")
    if torch.cuda.is_available() and not process_groups.kernel_gpus():
        raise ValueError("it measures GPUs: unset TRITON_INTERPRET, which keeps the kernels on the CPU")
    if options.what == "kernels":
        return partial(_kernels, options, kernels.jobs(options), console)
    if options.what == "schedules":
        from canon.bench import schedules

        return partial(_schedules, options, schedules.program(options), console)
    module = import_module(f"canon.bench.{BENCHES[options.what].module}")
    found = shapes_of(options.shape or [], options.mask or [], module.SHAPES)
    if options.what == "masks" and any(not shape.mask_name.startswith("documents:") for shape in found):
        raise ValueError("masks needs packed documents: documents:MEAN")
    if options.what == "tune":
        options.backend = options.backend or "triton"
        module.candidates(options)
    return partial(_by_shape, options, module, found, console)


def _by_shape(options: argparse.Namespace, module: ModuleType, found: list[Shape], console) -> int:
    bench, rows = BENCHES[options.what], []
    device = _device() if torch.cuda.is_available() else None
    for shape in found:
        some = bench.measure(module, (shape, getattr(torch, options.dtype), device), options)
        for table in bench.tables(module, some):
            console.print(table)
        rows += some
        _keep(options, rows)
        if device is not None:
            torch.cuda.empty_cache()
    return _told(
        console, options, any("failed" in row and row.get("contender", "").startswith("canon") for row in rows)
    )


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
    words = ["canon", "bench", options.what]
    for name, owners in OWNERS.items():
        value = getattr(options, name)
        if options.what in owners and value not in (None, "", False, []):
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return shlex.join(words)
