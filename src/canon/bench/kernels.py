"""`canon bench kernels`: measure forward and backward kernels of Canon and of peers on one GPU.

    canon bench kernels                        9 shapes on which peers were measured
    canon bench kernels --sweep 64,128         512 to 131072 causal tokens
    canon bench kernels --auto                 is "auto" close to the fastest method?
    canon bench kernels --partial              what do tiles on the diagonal cost?

Agreement comes first, then times in rounds. A CUDA graph of both passes is timed last.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from canon.bench import roofline, shapes
from canon.bench.cuda_graph import captured
from canon.bench.peers import (
    Contender,
    both_passes,
    contenders,
    installed,
    last_head,
    of_last_head,
    verdict_of,
)
from canon.bench.shapes import Shape
from canon.bench.timing import (
    Eager,
    Run,
    ceilings,
    clocks,
    eager_rounds,
    peak_mb,
    shown_mb,
    table,
    take_turns,
)
from canon.testing.judge import dense, oracle


def jobs(options: argparse.Namespace) -> list[tuple[Shape, ...]]:
    """Return the jobs; rounds alternate between the shapes of one job. Raises ValueError."""
    texts, masks = options.shape or [], options.mask or []
    if (options.sweep or options.auto) and (texts or masks):
        raise ValueError(
            "--sweep and --auto have shapes and masks of their own: leave --shape and --mask out"
        )
    if options.sweep:
        widths = options.sweep.split(",")
        if not all(width.strip().isdigit() and int(width) for width in widths):
            raise ValueError(f"--sweep {options.sweep!r}: expected widths, for example 64,128")
        return [(shape,) for shape in shapes.sweep([int(width) for width in widths])]
    if options.auto:
        return [(shape,) for shape in shapes.auto()]
    if options.partial:
        if masks:
            raise ValueError("--partial has masks of its own: leave --mask out")
        return list(shapes.partial_pairs(texts or shapes.PARTIAL))
    return [(shape,) for shape in shapes.shapes_of(texts, masks, shapes.KERNELS)]


def measured(
    options: argparse.Namespace, found: list[tuple[Shape, ...]], device: torch.device
) -> Iterator[tuple[list[dict], dict[str, Any]]]:
    """Yield the rows of each job, and further fields of the record."""
    dtype = getattr(torch, options.dtype)
    others = not (options.auto or options.partial)
    more: dict[str, Any] = {"ceilings": ceilings(dtype, device), "peers": installed()}
    for job in found:
        chosen: dict[str, Any] = {"others": others, "backend": options.backend}
        parts = measure(
            job, dtype, device, options.only, options.rounds, more["ceilings"], **chosen
        )
        rows = [row for part in parts for row in part]
        if options.auto:
            more["auto"] = [*more.get("auto", []), *roofline.auto_verdicts(rows)]
        if options.partial:
            more["partial"] = [*more.get("partial", []), *roofline.partial_costs(*parts)]
        yield rows, more
        torch.cuda.empty_cache()


def measure(
    job: Sequence[Shape],
    dtype: torch.dtype,
    device: torch.device,
    only: str,
    rounds: int,
    ceilings: dict[str, float],
    *,
    others: bool = True,
    backend: str | None = None,
) -> list[list[dict]]:
    """Return, for each shape, a row per contender."""
    timed = Timed()
    found = partial(contenders, device=device, only=only, others=others, backend=backend)
    rows = [_prepare(shape, dtype, device, found(shape), timed) for shape in job]
    take_turns(timed.runs, rounds)
    eager_rounds(timed.eager, rounds, device)
    for row, contender, inputs in timed.graphs:
        _replay(row, contender, inputs, rounds, device)
    for shape, some in zip(job, rows, strict=True):
        roofline.add_speeds(some, shape, dtype.itemsize, ceilings)
    return rows


@dataclass
class Timed:
    """GPU runs with their lists, eager calls, and (row, contender, inputs) of graphs."""

    runs: list[tuple[Run, list[float]]] = field(default_factory=list)
    eager: list[Eager] = field(default_factory=list)
    graphs: list[tuple[dict, Contender, tuple]] = field(default_factory=list)


def _prepare(
    shape: Shape, dtype: torch.dtype, device: torch.device, found: list[Contender], timed: Timed
) -> list[dict]:
    q, k, v, dout = shape.inputs(dtype, device)
    one = last_head(shape, q, k, v, dout)
    exact, honest = oracle(*one, shape.mask), dense(*one, shape.mask)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    rows, forwards = [], set()
    for contender in found:
        rows.append(row := _row(shape, contender))
        passes = partial(_passes, contender, shape, (q, k, v), dout)
        if not (made := contender.agreeing(row, passes, exact, honest)):
            continue
        forward, backward, _ = made
        both = contender.inside(partial(both_passes, forward, (q, k, v), dout))
        row |= {"peak_mb": peak_mb(both, device), "backward_ms": []}
        timed.runs.append((backward, row["backward_ms"]))
        timed.graphs.append((row, contender, (forward, q, k, v, dout)))
        timed.eager.append(Eager.listed(row, "both", both))
        if contender.forward not in forwards:
            forwards.add(contender.forward)
            row["forward_ms"] = []
            timed.runs.append((partial(forward, q, k, v), row["forward_ms"]))
            timed.eager.append(
                Eager.listed(row, "forward", partial(forward, *(x.detach() for x in (q, k, v))))
            )
    return rows


def _passes(contender: Contender, shape: Shape, leaves: tuple, dout: torch.Tensor) -> tuple:
    """Return both passes, and the results of the last sequence and key head."""
    forward = contender.inside(contender.make())
    out = forward(*leaves)
    backward = contender.inside(partial(torch.autograd.grad, out, leaves, dout, retain_graph=True))
    return forward, backward, of_last_head(shape, out, *backward())


def _replay(
    row: dict, contender: Contender, inputs: tuple, rounds: int, device: torch.device
) -> None:
    """Time a replayed graph, then free it: all pools together may exceed the GPU."""
    try:
        made = contender.inside(captured)(*inputs)
        made.check()
    except Exception as error:  # many peers cannot be captured; the row has the reason
        row["graph_failed"] = f"{type(error).__name__}: {error}"[:300]
        return
    eager_rounds([Eager.listed(row, "graph", made.graph.replay)], rounds, device)


def _row(shape: Shape, contender: Contender) -> dict:
    row = {
        "contender": contender.name,
        "forward_of": contender.forward,
        "canon": contender.canon,
        "shape": str(shape),
    }
    return (
        row
        | {name: getattr(shape, name) for name in ("b", "n", "h", "g", "d")}
        | {"mask": shape.mask_name}
    )


def conclusions(more: dict[str, Any]) -> list:
    """Return the tables of --auto and --partial, and a line with the ceilings and the peers."""
    auto = [
        (x["shape"], x["pass"], x["best"], f"{x['auto_to_best']:.2f} x", str(x["within"]))
        for x in more.get("auto", ())
    ]
    costs = [
        (x["partial"], x["full"], x["contender"], x["pass"], f"{x['cost']:+.1%}", str(x["within"]))
        for x in more.get("partial", ())
    ]
    columns = ("shape", "pass", "fastest", "auto takes", "within 10 %")
    tables = [table('"auto" against the fastest method', columns, auto)] if auto else []
    columns = ("partial", "full", "contender", "pass", "cost", "within 8 %")
    tables += [table("partial masks, equal area", columns, costs)] if costs else []
    measured = ("{matmul_tflops:.0f} TFLOP/s in a product, {copy_tbs:.2f} TB/s in a copy").format(
        **more["ceilings"]
    )
    return [
        *tables,
        "; ".join(
            [f"ceilings: {measured}", *(f"{name}: {text}" for name, text in more["peers"].items())]
        ),
    ]


def speeds(rows: list[dict]) -> Iterator[Any]:
    """Yield a table for each shape."""
    times, shares = ("forward ms", "both ms", "graph ms"), ("of roof", "to peer")
    columns = ("contender", "agrees", *times, "forward", *shares, "backward", *shares, "peak MB")
    text = (
        "wall (host) ms: eager calls, replayed graph; TFLOP/s of GPU time, share of the "
        "roofline, ratio to the fastest peer"
    )
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines = [_line(row) for row in rows if row["shape"] == shape]
        yield table(f"{shape}: {text}; memory of both passes", columns, lines)


def _line(row: dict) -> tuple[str, ...]:
    forms = {"tflops": ".0f", "roofline": ".0%", "to_peer": ".2f"}
    keys = [(f"{name}_{kind}", form) for name in roofline.PASSES for kind, form in forms.items()]
    numbers = [format(row[key], form) if key in row else "-" for key, form in keys]
    times = [clocks(row, name) for name in ("forward", "both", "graph")]
    return row["contender"], verdict_of(row), *times, *numbers, shown_mb(row)
