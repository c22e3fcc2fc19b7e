"""`canon bench`: measure speed and memory beside peers. A contender that disagrees gets no figure.

    canon bench kernels      one GPU: forward, every backward, peers
    canon bench few          one GPU: few queries over many keys, with a cold L2 cache
    canon bench trees        one GPU: branches that share a trunk
    canon bench layers       one GPU: checkpointed layers, their time and memory
    canon bench host         one GPU: wall and host time of eager calls
    canon bench masks        one GPU, or none: plans of a new mask
    canon bench tune         one GPU: each kernel in many tile sizes
    canon bench schedules    several GPUs: ring, strided and Magi
    canon bench decode       several GPUs: few queries, keys divided among the GPUs
    canon bench plans        no GPU: dispatch plans

A shape is b,n,h,g,d,mask: 1,16384,32,8,128,causal; the mask may come from --mask. TFLOP/s count
visible cells: forward 4 h d area, backward 2.5 times that.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from canon.bench import kernels, plans
from canon.bench.peers import installed
from canon.bench.shapes import MASKS, SWEEP_TOKENS, Shape, shapes_of
from canon.testing import process_groups, record

SEVERAL_GPUS = {"schedules": "schedules", "decode": "decoding"}  # modules
SHAPED = "kernels", "few", "trees", "layers", "tune", "schedules", "decode", "host", "masks"
# The commands of each option. An option of another command is an error.
OWNERS = {
    "shape": SHAPED,
    "mask": SHAPED,
    "only": ("kernels", "few", "trees", "layers", "tune", "schedules", "decode", "host"),
    "dtype": SHAPED,
    "rounds": ("kernels", "few", "trees", "layers", "schedules", "decode", "host", "masks"),
    "config": ("tune",),
    "backend": ("kernels", "tune"),
    "ranks": ("plans", *SEVERAL_GPUS),
    "packs": ("plans",),
    "sweep": ("kernels",),
    "auto": ("kernels",),
    "partial": ("kernels",),
}
DEFAULTS = {"dtype": "bfloat16", "rounds": 10, "packs": 20}  # given to every command
DISAGREES, MISUSED = 1, 2
# Benches of one shape after another: the module, and its rows from (module, inputs, options).
BENCHES: dict[str, tuple[str, Callable[[ModuleType, tuple, argparse.Namespace], list[dict]]]] = {
    "few": ("few_queries", lambda m, x, o: m.measure(*x, o.rounds, o.only)),
    "trees": ("packed_trees", lambda m, x, o: m.measure(*x, o.rounds, o.only)),
    "layers": ("layers", lambda m, x, o: m.measure(*x, o.rounds, o.only)),
    "host": ("host_time", lambda m, x, o: m.host(*x, o.rounds, o.only)),
    "masks": ("mask_time", lambda m, x, o: m.masks(*x, o.rounds)),
    "tune": ("tune", lambda m, x, o: m.tune(*x, o.only, m.candidates(o), o.backend)),
}
# rows, what is printed, fields of the record
Batches = Iterator[tuple[list[dict], Iterable[Any], dict[str, Any]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon bench``."""
    add = parser.add_argument
    add(
        "what",
        choices=["kernels", *BENCHES, *SEVERAL_GPUS, "plans"],
        help="the subject, from the list above",
    )
    add(
        "--shape", action="append", help="b,n,h,g,d or b,n,h,g,d,mask (repeatable)", metavar="SHAPE"
    )
    add("--mask", action="append", help=MASKS, metavar="MASK")
    add("--dtype", default=DEFAULTS["dtype"], choices=["bfloat16", "float16", "float32"])
    add(
        "--only",
        default="",
        help="contenders, or kernels, whose names hold this text, or one of several: A|B",
    )
    add(
        "--rounds",
        type=int,
        default=DEFAULTS["rounds"],
        help="how often all are timed (default 10)",
    )
    text = (
        "kernels: the only backend that is forced (default all); tune: triton or gluon "
        "(default triton)"
    )
    add("--backend", choices=["triton", "gluon", "cuda"], help=text)
    add(
        "--config",
        action="append",
        default=[],
        help="tune: a candidate (repeatable)",
        metavar="CONFIG",
    )
    widths = "64,128,256"
    text = (
        f"kernels: 512 to 131072 causal tokens, {SWEEP_TOKENS} in all, for these widths "
        f"(default {widths})"
    )
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument("--sweep", nargs="?", const=widths, metavar="D,D", help=text)
    sets.add_argument(
        "--auto",
        action="store_true",
        help="kernels: the automatic choice and all methods on 12 shapes",
    )
    text = "kernels: a causal mask and a full one of equal area; --shape without masks"
    sets.add_argument("--partial", action="store_true", help=text)
    text = "plans: repeatable (8, 16, 32 and 64); schedules, decode: GPUs (all)"
    add("--ranks", type=int, action="append", metavar="N", help=text)
    add(
        "--packs",
        type=int,
        default=DEFAULTS["packs"],
        metavar="N",
        help="plans: packs for each number of ranks (20)",
    )
    add("--record", type=Path, help="where to write JSON (default canon-bench/WHAT.json)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write the record. Return 1 if Canon disagreed anywhere, 2 if it cannot be
    measured.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        _check_owners(options)
        batches = _prepared(options)
    except ValueError as error:
        console.print(f"canon bench: {error}", markup=False)
        return MISUSED
    rows = []
    for some, shown, more in batches:
        rows += some
        for one in shown:
            console.print(one, markup=False)
        _keep(options, rows, **more)
    console.print(f"record: {_record_path(options)}", markup=False)
    return DISAGREES if any(map(_wrong, rows)) else 0


def _wrong(row: dict) -> bool:
    """Return whether Canon failed: a schedule that is no peer, or a contender."""
    return "failed" in row and (
        row.get("peer") is False or row.get("contender", "").startswith("canon")
    )


def _check_owners(options: argparse.Namespace) -> None:
    for name, owners in OWNERS.items():
        if (
            getattr(options, name) not in (None, "", False, [], DEFAULTS.get(name))
            and options.what not in owners
        ):
            raise ValueError(f"{name!r} belongs to {' and '.join(owners)}, not to {options.what}")


def _prepared(options: argparse.Namespace) -> Batches:
    if options.what == "plans":
        rows = plans.plans(options)
        return iter([(rows, plans.tables(rows), {})])
    if not (torch.cuda.is_available() or options.what == "masks"):
        raise ValueError("it measures GPUs, and there is none here")
    if torch.cuda.is_available() and not process_groups.kernel_gpus():
        raise ValueError(
            "it measures GPUs: unset TRITON_INTERPRET, which keeps the kernels on the CPU"
        )
    if options.what == "kernels":
        return _kernels(options, kernels.jobs(options))
    if options.what in SEVERAL_GPUS:
        module = import_module(f"canon.bench.{SEVERAL_GPUS[options.what]}")
        return _on_ranks(options, module, module.program(options))
    module = import_module(f"canon.bench.{BENCHES[options.what][0]}")
    found = shapes_of(options.shape or [], options.mask or [], module.SHAPES)
    if options.what == "masks" and any(
        not shape.mask_name.startswith("documents:") for shape in found
    ):
        raise ValueError("masks needs packed documents: documents:MEAN")
    if options.what == "trees" and any(not shape.mask_name.startswith("tree:") for shape in found):
        raise ValueError("trees needs trees: tree:TRUNK+BRANCHESxTOKENS")
    if options.what == "tune":
        options.backend = options.backend or "triton"
    if options.what in OWNERS["config"]:
        module.candidates(options)
    return _by_shape(options, module, found)


def _by_shape(options: argparse.Namespace, module: ModuleType, found: list[Shape]) -> Batches:
    device = _device() if torch.cuda.is_available() else None
    for shape in found:
        rows = BENCHES[options.what][1](
            module, (shape, getattr(torch, options.dtype), device), options
        )
        yield (
            rows,
            module.tables(rows),
            {"peers": installed()} if options.what in ("few", "trees") else {},
        )
        if device is not None:
            torch.cuda.empty_cache()


def _kernels(options: argparse.Namespace, jobs: list) -> Batches:
    more = {}
    for rows, more in kernels.measured(options, jobs, _device()):
        yield rows, kernels.speeds(rows), more
    yield [], kernels.conclusions(more), more


def _on_ranks(options: argparse.Namespace, module: ModuleType, program: Any) -> Batches:
    program = replace(program, keep=partial(_keep, options))
    for rows in module.measured(program, options.ranks[0] if options.ranks else None):
        yield (
            rows,
            module.tables(rows),
            {"peers": module.peers()} if options.what == "schedules" else {},
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _record_path(options: argparse.Namespace) -> Path:
    return options.record or Path(f"canon-bench/{options.what}.json")


def _keep(options: argparse.Namespace, rows: list[dict], **more: Any) -> None:
    record.write(_record_path(options), _command(options), rows, dtype=options.dtype, **more)


def _command(options: argparse.Namespace) -> str:
    given = {
        name: getattr(options, name) for name, owners in OWNERS.items() if options.what in owners
    }
    return record.command("canon", "bench", options.what, **given)
