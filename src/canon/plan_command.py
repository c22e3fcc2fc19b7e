"""`canon plan`: order the schedules of a layer of attention by their predicted time.

canon plan --tokens 1048576 --heads 32/8 --width 128 --gpus 64 --hosts 8 --mask documents:8192
canon plan --tokens 131072 --gpus 16 --hosts 2 --links canon-bench/links.json --memory 80 --json

Every figure is one of a model of H200s (`canon.costs`), for bfloat16 and both passes. "exposed" is
the time in which the busiest GPU runs no attention kernel. "NIC" is what a GPU sends to other hosts
or receives from them. "peak" are the tensors of one call and its gradients. rank_invariant=True is
not predicted.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from math import gcd
from pathlib import Path

from rich.console import Console

from canon.bench.shapes import MASKS, mask_of
from canon.bench.timing import table
from canon.costs.network import ASSUMED, read_links
from canon.costs.schedule_costs import plan_of
from canon.fast.planner import dispatch
from canon.fast.tables.tile_costs import divisors
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.warm_command import pair

MISUSED = 2
CASTS = {}, {"keep_kv": True}, {"own_keys_first": True}, {"casts": 2}, {"casts": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon plan``."""
    add = parser.add_argument
    add("--tokens", type=int, required=True, help="of the whole sequence")
    add("--heads", type=pair, default=(32, 8), metavar="H[/G]", help="default: 32/8")
    add("--width", type=pair, default=(128, 128), metavar="D[/DV]", help="default: 128")
    add("--gpus", type=int, required=True, help="in all")
    add("--hosts", type=int, default=1, help="with equally many GPUs (default: 1)")
    add("--mask", default="causal", help=MASKS)
    add("--memory", type=float, default=float("inf"), help="GB of a GPU; larger plans are refused")
    add("--links", type=Path, help="a record of canon bench links")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plans and return the exit status: 0, or 2 for invalid arguments."""
    try:
        links = read_links(options.links) if options.links else ASSUMED
        rows = sorted(_rows(options, links), key=lambda row: (row["refused"], row["both ms"]))
    except (ValueError, OSError) as error:
        print(f"canon plan: {error}", file=sys.stderr)
        return MISUSED
    if options.json:
        print(json.dumps({"figures": "model", "links": links._asdict(), "plans": rows}, indent=1))
        return 0
    cells = [[x if isinstance(x, str) else f"{x:.2f}" for x in row.values()] for row in rows]
    Console(width=170).print(table(f"model; links: {links.source}", list(rows[0]), cells))
    return 0


def _rows(given, links):
    """Yield the name and the figures of each plan."""
    mask, (inside, left) = mask_of(given.tokens, given.mask), divmod(given.gpus, given.hosts)
    if left:
        raise ValueError(f"--hosts {given.hosts}: expected a divisor of the {given.gpus} GPUs")
    for columns in divisors(gcd(given.heads[1], inside)):
        shapes = given.heads, given.width, given.hosts, columns
        rows = given.gpus // columns
        for name, kind, layout, options in schedules(mask, rows, columns, given.heads[1]):
            plan = plan_of(f"{name}_attention", mask, layout, *shapes, **options)
            forward, both, exposed = plan.seconds(links)
            tensors = plan.tensors()
            largest, peak = max(tensors, key=lambda x: tensors[x]), sum(tensors.values()) / 1e9
            refused = f"{tensors[largest] / 1e9:.1f} GB of {largest}"
            yield {
                "schedule": f"{name} {kind}",
                "tokens x heads": f"{rows} x {columns}",
                "options": " ".join(f"{option}={x}" for option, x in options.items()),
                "both ms": 1e3 * both,
                "forward ms": 1e3 * forward,
                "exposed ms": 1e3 * exposed,
                "peak GB": peak,
                "NIC MB": plan.nbytes[1].max() / 1e6,
                "refused": refused if peak > given.memory else "",
            }


def schedules(mask: Mask, rows: int, columns: int, heads: int) -> Iterator[tuple]:
    """Yield (function, layout by name and itself, options) of a mesh, for ``heads`` key heads."""
    zigzag = "zigzag", Layout.zigzag(mask.queries, rows * columns)
    yield "ring", *zigzag, {}
    if rows > 1:  # else nothing travels between rows
        yield "ring", "contiguous", Layout.contiguous(mask.queries, rows * columns), {}
        for stride in divisors(heads // columns):
            yield "strided", *zigzag, {"head_stride": stride}
        planned = dispatch(mask, rows).divided(columns)
        for options in CASTS:
            yield "magi", "dispatch", planned, options
