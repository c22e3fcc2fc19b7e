"""`canon plan`: order the schedules of a layer of attention by their predicted time.

canon plan --tokens 1048576 --heads 32/8 --width 128 --gpus 64 --hosts 8 --mask documents:8192
canon plan --tokens 131072 --gpus 16 --hosts 2 --links canon-bench/links.json --memory 80 --json

Every figure is one of a model of H200s (`canon.costs`), for bfloat16. Schedules have the names of
`canon bench schedules`, on meshes of tokens x heads. "1 stages" are two steps, own keys first;
"keys kept" is keep_kv=True. "None takes": the options of a call without options, which follow rules
and not this model. In the "exposed" time, the busiest GPU runs no attention kernel. "NIC" is what a
GPU exchanges with other hosts. "peak" are the tensors of a call and its gradients.
"""

import argparse
import json
import re
import sys
from contextlib import suppress
from math import gcd
from pathlib import Path

from canon.bench.schedule_peers import schedules_of
from canon.bench.shapes import MASKS, shape_of
from canon.bench.timing import table
from canon.costs.network import ASSUMED, read_links
from canon.costs.schedule_costs import plan_of
from canon.fast.tables.tile_costs import divisors
from canon.testing.command_line import Console

MISUSED = 2
DEFAULT = "no options"
RARE = "small ends|invariant|repeatable|strided contiguous|striped"  # schedules that are left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("--tokens", type=_tokens, required=True, help="of the whole sequence")
    add("--heads", default="32/8", metavar="H/G", help="query and key heads (default: 32/8)")
    add("--width", type=int, default=128, help="of a head (default: 128)")
    add("--gpus", type=int, required=True, help="in all")
    add("--hosts", type=int, default=1, help="with equally many GPUs (default: 1)")
    add("--mask", default="causal", help=MASKS)
    add("--memory", type=_gb, default=float("inf"), help="GB of a GPU; larger plans are refused")
    add("--links", type=Path, help="a record of canon bench links")
    add(
        "--json",
        action="store_true",
        help="print all schedules, as JSON",
    )


def run(options: argparse.Namespace) -> int:
    """Return the exit status: 0, or 2 for invalid arguments."""
    try:
        links, (inside, between) = (
            read_links(options.links) if options.links else (ASSUMED, ["assumed"] * 2)
        )
        rows = sorted(_rows(options, links), key=lambda row: (row["refused"] > "", row["both ms"]))
    except FileNotFoundError as error:
        remedy = "run canon bench links first, or leave --links out"
        print(f"canon plan: there is no {error.filename}: {remedy}", file=sys.stderr)
        return MISUSED
    except (ValueError, OSError) as error:
        print(f"canon plan: {error}", file=sys.stderr)
        return MISUSED
    source = f"{inside} inside a host, {between} between hosts"
    if options.json:
        print(json.dumps({"figures": "model", "links": source, "plans": rows}, indent=1))
        return 0
    fastest = {(row["mesh"], row["call"].partition("(")[0]): row for row in reversed(rows)}
    columns = [name for name in rows[0] if name != "layout"]
    cells = [
        [x if isinstance(x := row[name], str) else f"{x:.2f}" for name in columns]
        for row in rows
        if row in fastest.values()
    ]
    Console(180).print(table(f"model; links: {source}", columns, cells))
    print(_recipe(rows[0], untested=options.hosts > 1 and between == "assumed"))
    return 0


def _tokens(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number: write it out, as 1048576"
        ) from None


def _gb(text: str) -> float:
    with suppress(ValueError):
        if (gb := float(text)) > 0:
            return gb
    raise argparse.ArgumentTypeError(f"{text}: expected a number of GB above 0")


def _recipe(row, untested: bool) -> str:
    """Return the calls of the fastest plan, as Python."""
    if row["refused"]:
        return f"no plan fits: the fastest needs {row['peak GB']:.2f} GB"
    note = ", no link between hosts was measured" * untested
    lines = [f"# fastest: {row['schedule']} on {row['mesh']}; by a model{note}"]
    rows, columns = row["mesh"].split(" x ")
    if columns != "1":
        names = 'mesh_dim_names=("tokens", "heads")'
        lines.append(f'mesh = init_device_mesh("cuda", ({rows}, {columns}), {names})')
    function, _, named = row["call"].rstrip(")").partition("(")
    call = ", ".join(["q, k, v, mask, layout", *filter(None, [named])])
    return "\n".join([*lines, f"layout = {row['layout']}", f"out = attn.{function}({call})"])


def _rows(given, links):
    if given.hosts < 1 or given.gpus % given.hosts:
        raise ValueError(f"--hosts {given.hosts}: expected a divisor of the {given.gpus} GPUs")
    heads = given.heads.replace("/", ",")
    shape = shape_of(f"1,{given.tokens},{heads},{given.width},{given.mask}")
    for columns in divisors(gcd(shape.g, given.gpus // given.hosts)):
        place = (shape.h, shape.g), shape.d, given.hosts, columns
        # nothing travels between the ranks of a column of one
        found = [
            (one, plan_of(one.attend.func.__name__, *place, **one.attend.keywords))
            for one in schedules_of(shape, given.gpus, columns)
            if not re.search(RARE, one.name) and (columns < given.gpus or one.name == "ring zigzag")
        ]
        defaults = {plan.call.function: plan.chosen() for one, plan in found if DEFAULT in one.name}
        for one, plan in found:
            function, options = plan.call.function, one.attend.keywords
            forward, both, exposed = (1e3 * x for x in plan.seconds(links))
            gb = {name: 1e-9 * nbytes for name, nbytes in plan.tensors().items()}
            peak, largest = sum(gb.values()), max(gb, key=gb.__getitem__)
            named = [f"{x}={options[x]}" for x in options if x not in ("mask", "layout")]
            named += ["group=mesh"] * (columns > 1)
            taken = [f"{x}={y}" for x, y in defaults.get(function, {}).items()]
            kind = next((x for x in ("contiguous", "zigzag") if x in one.name), None)
            layout = f"Layout.{kind}({given.tokens}, {given.gpus})"
            if kind is None:
                parts = f".divided({columns})" * (columns > 1)
                layout = f"attn.dispatch(mask, {given.gpus // columns}){parts}"
            yield {
                "schedule": one.name,
                "mesh": f"{given.gpus // columns} x {columns}",
                "layout": layout,
                "call": f"{function}({', '.join(named)})",
                "None takes": ", ".join(taken),
                "both ms": both,
                "forward ms": forward,
                "exposed ms": exposed,
                "peak GB": peak,
                "NIC MB": 1e-6 * plan.nic_bytes,
                "refused": f"{gb[largest]:.1f} GB of {largest}" if peak > given.memory else "",
            }
