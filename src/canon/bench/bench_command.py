"""`canon bench`: measure speed and memory beside peers. A contender that disagrees gets no figure.

    canon bench kernels      one GPU: forward, every backward, peers
    canon bench host         one GPU: wall and host time of eager calls
    canon bench masks        one GPU, or none: plans of a new mask
    canon bench schedules    several GPUs: ring, strided and Magi
    canon bench decode       several GPUs: few queries, keys divided among the GPUs
    canon bench plans        no GPU: dispatch plans
    canon bench links        several GPUs or ranks: messages of all pairs, for canon plan

TFLOP/s count visible cells: forward 4 h d area, backward 2.5 times that.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from canon.bench import links, plans, shapes
from canon.bench.measuring import Settings
from canon.bench.on_ranks import OnRanks
from canon.testing import process_groups, record
from canon.testing.command_line import Console, at_least

# Modules and options. A module has SHAPES, measure(shape, settings), tables(rows), perhaps
# check(shape), fields(settings) and on_ranks(program, ranks).
SUBJECTS = {
    "kernels": ("kernels", "shape only dtype rounds cold"),
    "host": ("host_time", "shape only dtype rounds"),
    "masks": ("mask_time", "shape dtype rounds"),
    "schedules": ("schedules", "shape only dtype rounds ranks"),
    "decode": ("decoding", "shape only dtype rounds ranks"),
    "plans": ("plans", "ranks packs"),
    "links": ("links", "ranks rounds"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "shape": {
        "action": "append",
        "default": [],
        "help": f"b,n,h,g,d,mask (repeatable); mask: {shapes.MASKS}",
    },
    "only": {
        "default": "",
        "metavar": "TEXT",
        "help": "contenders whose names hold this text, or one of several: A|B",
    },
    "dtype": {"default": "bfloat16", "choices": ["bfloat16", "float16", "float32"]},
    "rounds": {
        "type": at_least(1),
        "default": 10,
        "metavar": "N",
        "help": "how often all are timed (default 10)",
    },
    "cold": {"action": "store_true", "help": "L2 holds none of the inputs before a timed run"},
    "ranks": {
        "type": at_least(1),
        "action": "append",
        "metavar": "N",
        "help": "plans: repeatable (8, 16, 32 and 64); schedules, decode: GPUs (all); links: 2",
    },
    "packs": {
        "type": at_least(1),
        "default": 20,
        "metavar": "N",
        "help": "packs for each number of ranks (20)",
    },
}
DISAGREES, MISUSED = 1, 2
Batches = Iterator[list[dict]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    subjects = parser.add_subparsers(dest="what", required=True, metavar="SUBJECT")
    for what, (_, names) in SUBJECTS.items():
        subject = subjects.add_parser(what)
        for name in names.split():
            subject.add_argument(f"--{name}", **OPTIONS[name])
        path = Path(f"canon-bench/{what}.json")
        text = f"where to write JSON (default {path})"
        subject.add_argument("--record", type=Path, default=path, help=text)


def run(options: argparse.Namespace) -> int:
    """Return the exit status."""
    console = Console(140)
    module = import_module(f"canon.bench.{SUBJECTS[options.what][0]}")
    try:
        if not int(os.environ.get("RANK", 0)):  # it writes
            record.check_path(options.record)
        batches, settings = _prepared(options, module)
    except ValueError as error:
        console.print(f"canon bench: {error}", markup=False)
        return MISUSED
    rows, more = [], {}
    for some in batches:
        rows += some
        for shown in module.tables(some) if some else ():
            console.print(shown, markup=False)
        more = module.fields(settings) if hasattr(module, "fields") else {}
        _keep(options, rows, **more)
    if not rows:  # another rank has them
        return 0
    for name, value in more.items():
        console.print(f"{name}: {', '.join(f'{x} {y}' for x, y in value.items())}", markup=False)
    console.print(f"record: {options.record}", markup=False)
    of_canon = lambda row: row.get("peer") is False or row.get("contender", "").startswith("canon")
    return DISAGREES if any("failed" in row and of_canon(row) for row in rows) else 0


def _prepared(options: argparse.Namespace, module: ModuleType) -> tuple[Batches, Settings]:
    if options.what == "plans":
        return iter([plans.measure(options.ranks, options.packs)]), Settings()
    if options.what == "links":
        if (ranks := max(options.ranks or [2])) < 2:
            raise ValueError(f"--ranks {ranks}: expected two or more")
        return links.batches(ranks, options.rounds), Settings()
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or options.what == "masks"):
        raise ValueError("it measures GPUs, and there is none here")
    if on_gpu and not process_groups.kernel_gpus():
        raise ValueError(
            "it measures GPUs: unset TRITON_INTERPRET, which keeps the kernels on the CPU"
        )
    several = hasattr(module, "on_ranks")
    device = _device(several) if on_gpu else torch.device("cpu")
    names = ("rounds", "only", "cold")
    given = {name: getattr(options, name) for name in names if name in options}
    settings = Settings(getattr(torch, options.dtype), device, **given)
    found = [shapes.shape_of(text) for text in options.shape or module.SHAPES]
    for shape in found if hasattr(module, "check") else ():
        module.check(shape)
    if not several:
        return _by_shape(module, found, settings), settings
    (count,) = options.ranks if options.ranks and len(options.ranks) == 1 else (None,)
    if options.ranks and (count or sys.maxsize) > torch.cuda.device_count():
        raise ValueError(
            f"--ranks {options.ranks}: expected one number, of the "
            f"{torch.cuda.device_count()} GPUs here"
        )
    program = OnRanks(module.measure, tuple(found), settings, partial(_keep, options))
    return module.on_ranks(program, count), settings


def _by_shape(module: ModuleType, found: list[shapes.Shape], settings: Settings) -> Batches:
    for shape in found:
        yield module.measure(shape, settings)
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()


def _device(several: bool) -> torch.device:
    return torch.device("cuda") if several else torch.device("cuda", torch.cuda.current_device())


def _keep(options: argparse.Namespace, rows: list[dict], **more: Any) -> None:
    more |= {"dtype": options.dtype} if "dtype" in options else {}
    given = {name: getattr(options, name) for name in SUBJECTS[options.what][1].split()}
    command = record.command("canon", "bench", options.what, **given)
    record.write(options.record, command, rows, **more)
