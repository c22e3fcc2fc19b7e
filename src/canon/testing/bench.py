"""`canon bench`: how fast, beside whom, on which machine; agreement is checked before any figure is printed.

    canon bench kernels                        the default shapes
    canon bench kernels --shape 1,16384,32,8,128 --mask documents:1024
    canon bench kernels --only split --rounds 20
    canon bench tune                           tile sizes instead of peers: see `canon.testing.tune`
    canon bench schedules                      several GPUs: see `canon.testing.schedules`
    canon bench plans                          dispatch plans instead of kernels: see `canon.testing.plans`

Every contender gets the same inputs in the same process, and they take turns: round by round each runs once warm, so
that a clock that drifts drifts for all. TFLOP/s count visible cells alone: forward 4 h d area, backward 2.5 times that.
The record holds every single time, the machine and the versions (`canon.testing.record`).
"""

import argparse
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from canon.reference.mask import Mask
from canon.testing import plans, record
from canon.testing.judge import Attended, agreement, dense, oracle

SHAPES = ["1,16384,32,8,128", "8,2048,32,8,128", "1,16384,32,32,64", "1,16384,16,16,256"]
MASKS = ["causal"]


@dataclass(frozen=True)
class Shape:
    """b sequences of n tokens, h query heads and g key heads, d wide; one mask for all."""

    b: int
    n: int
    h: int
    g: int
    d: int
    mask_name: str
    mask: Mask

    def __str__(self) -> str:
        return f"B{self.b} S{self.n} Hq{self.h} Hk{self.g} D{self.d} {self.mask_name}"

    @property
    def operations(self) -> float:
        """Of the forward pass: two products over the visible cells."""
        return 4.0 * self.b * self.h * self.d * self.mask.area


@dataclass(frozen=True)
class Contender:
    """A forward pass (q, k, v) -> out that autograd can differentiate. q (b, t, h, d)."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    forward: bool = True  # whether its forward pass is one of its own, to be timed


def documents(n: int, mean: int, seed: int = 0) -> list[int]:
    """cu_seqlens of n tokens in documents of exponentially distributed lengths, the same on every machine."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (-torch.log(torch.rand(4 * n // mean + 16, generator=draw, dtype=torch.float64)) * mean).long() + 1
    ends = [0, *lengths.cumsum(0).tolist()]
    return [*(end for end in ends if end < n), n]


def shape_of(text: str, mask_name: str) -> Shape:
    """``"b,n,h,g,d"`` and ``"causal"``, ``"full"``, ``"window:LEFT"`` or ``"documents:MEAN"``. Raises ValueError."""
    numbers = text.split(",")
    if len(numbers) != 5 or not all(x.strip().isdigit() for x in numbers):
        raise ValueError(f"shape {text!r}: expected b,n,h,g,d, for example 1,16384,32,8,128")
    b, n, h, g, d = map(int, numbers)
    kind, _, number = mask_name.partition(":")
    if kind in ("causal", "full") and not number:
        mask = Mask.causal(n) if kind == "causal" else Mask.full(n)
    elif kind in ("window", "documents") and number.isdigit():
        mask = Mask.window(n, int(number), 0) if kind == "window" else Mask.documents(documents(n, int(number)))
    else:
        raise ValueError(f"mask {mask_name!r}: expected causal, full, window:LEFT or documents:MEAN")
    return Shape(b, n, h, g, d, mask_name, mask)


# ---------------------------------------------------------------------- contenders
def contenders(shape: Shape, device: torch.device, only: str) -> list[Contender]:
    """Canon's backward methods and every peer that can do this mask, filtered by a part of the name."""
    from canon import fast

    def canon(method):
        return lambda: Contender(
            f"canon {method}", lambda q, k, v: fast.attention(q, k, v, shape.mask, backward=method), method == "split"
        )

    methods = (
        ("split", "fused") if shape.h == shape.g else ("split", "fused", "head_parallel")
    )  # MHA: the last is split
    makers = {f"canon {method}": canon(method) for method in methods}
    if shape.mask_name in ("causal", "full"):
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            makers[f"SDPA {name.split('_')[0].lower()}"] = partial(_sdpa, name, shape.mask_name == "causal")
    makers["FlexAttention"] = partial(_flex, shape, device)
    return [make() for name, make in makers.items() if only in name]


def _sdpa(backend: str, causal: bool) -> Contender:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
            )
        return out.transpose(1, 2)

    return Contender(f"SDPA {backend.split('_')[0].lower()}", attend)


def _flex(shape: Shape, device: torch.device) -> Contender:
    """FlexAttention, compiled, with the BlockMask of the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kind, _, number = shape.mask_name.partition(":")
    document = torch.zeros(shape.n, dtype=torch.int32, device=device)
    if kind == "documents":
        ends = torch.tensor(documents(shape.n, int(number)), device=device)
        document = (torch.searchsorted(ends, torch.arange(shape.n, device=device), right=True) - 1).int()
    left = int(number) if kind == "window" else shape.n
    visible = {
        "causal": lambda b, h, i, j: i >= j,
        "full": lambda b, h, i, j: i >= 0,
        "window": lambda b, h, i, j: (i >= j) & (i - j <= left),
        "documents": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
    }[kind]
    block_mask = None
    if kind != "full":
        block_mask = create_block_mask(visible, None, None, shape.n, shape.n, device=device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=shape.h != shape.g).transpose(1, 2)

    return Contender("FlexAttention", attend)


# ---------------------------------------------------------------------- measuring
def measure(shape: Shape, dtype: torch.dtype, device: torch.device, only: str, rounds: int) -> list[dict]:
    """A row per contender: agreement, and the milliseconds of each forward and backward run."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = [(shape.h, shape.d), (shape.g, shape.d), (shape.g, shape.d), (shape.h, shape.d)]
    q, k, v, dout = (torch.randn(shape.b, shape.n, *x, generator=draw, dtype=dtype, device=device) for x in sizes)
    group = shape.h // shape.g
    one = [q[:1, :, :group], k[:1, :, :1], v[:1, :, :1], dout[:1, :, :group]]  # a key head and its queries: all alike
    exact, honest = oracle(*one, shape.mask), dense(*one, shape.mask)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    rows, runs = [], []
    for contender in contenders(shape, device, only):
        row = {"contender": contender.name, "shape": str(shape)}
        rows.append(row)
        try:
            out = contender.attend(q, k, v)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        except Exception as error:  # a peer may lack a width or a mask: said in its row
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            continue
        heads = out[:1, :, :group], None, dq[:1, :, :group], dk[:1, :, :1], dv[:1, :, :1]
        verdict = agreement(Attended(*heads), exact, honest)
        worst = verdict.worst
        row |= {"agrees": verdict.agrees, "worst": f"{worst.tensor} {worst.norm} {worst.ratio:.2f}" if worst else ""}
        if not verdict.agrees and contender.name.startswith("canon"):
            row["failed"] = f"disagrees: {verdict}"
            continue
        row["backward_ms"] = []
        runs.append((lambda o=out: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True), row["backward_ms"]))
        if contender.forward:
            row["forward_ms"] = []
            runs.append((lambda c=contender: c.attend(q, k, v), row["forward_ms"]))
    _take_turns(runs, rounds)
    for row in rows:
        for name, factor in (("forward", 1.0), ("backward", 2.5)):
            if times := row.get(f"{name}_ms"):
                row[f"{name}_tflops"] = factor * shape.operations / statistics.median(times) / 1e9
    return rows


def _take_turns(runs: list[tuple[Callable[[], object], list[float]]], rounds: int) -> None:
    """Each round runs every contender once to warm up and three times between events."""
    for round_number in range(rounds + 1):  # the first round is not counted
        for run, times in runs:
            taken = milliseconds(run, 3, warm=1)
            times += taken if round_number else []


def milliseconds(run: Callable[[], object], times: int = 10, *, warm: int = 2) -> list[float]:
    """Of each run, between events, after ``warm`` that are not counted."""
    for _ in range(warm):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


# ---------------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``canon bench``."""
    what = "kernels: forward and every backward beside peers, on one GPU; tune: each kernel in many tile sizes; "
    what += "schedules: ring, strided and Magi on several GPUs; plans: what dispatch plans are worth, on a CPU"
    parser.add_argument("what", choices=["kernels", "tune", "schedules", "plans"], help=what)
    parser.add_argument("--shape", action="append", help="b,n,h,g,d (repeatable)", metavar="SHAPE")
    parser.add_argument("--mask", action="append", help="causal, full, window:LEFT, documents:MEAN", metavar="MASK")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", help="contenders, or kernels, whose names hold this text")
    parser.add_argument("--rounds", type=int, default=10, help="kernels: three timed runs each (default 10)")
    parser.add_argument(
        "--config", action="append", default=[], help="tune: a candidate (repeatable)", metavar="CONFIG"
    )
    plans.add_arguments(parser)
    parser.add_argument("--record", type=Path, help="where to write JSON (default canon-bench/WHAT.json)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write the record. Returns 1 if Canon disagreed anywhere, 2 if it cannot be measured."""
    from rich.console import Console

    console = Console()
    if options.what == "plans":
        return _kept(console, options, rows := plans.plans(options), plans.table(rows))
    if not torch.cuda.is_available():
        console.print("canon bench measures GPUs, and there is none here")
        return 2
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, options.dtype)
    try:
        if options.what == "schedules":
            from canon.testing import schedules

            rows = schedules.run(options)
            _kept(console, options, rows, schedules.table(rows))
            return int(any("failed" in row for row in rows))
        shapes = [shape_of(text, mask) for text in options.shape or SHAPES for mask in options.mask or MASKS]
        rows = []
        for shape in shapes:
            console.print(f"[dim]{shape} ...")
            if options.what == "tune":
                from canon.testing.tune import config_of, tune

                rows += tune(shape, dtype, device, options.only, [config_of(text) for text in options.config])
            else:
                rows += measure(shape, dtype, device, options.only, options.rounds)
            torch.cuda.empty_cache()
    except ValueError as error:
        console.print(f"canon bench: {error}")
        return 2
    _kept(console, options, rows, _tuned(rows) if options.what == "tune" else _compared(rows))
    return int(options.what == "kernels" and any("failed" in x for x in rows if x["contender"].startswith("canon")))


def _kept(console, options: argparse.Namespace, rows: list[dict], table) -> int:
    console.print(table)
    path = options.record or Path(f"canon-bench/{options.what}.json")
    kept = record.write(path, _command(options), rows, dtype=options.dtype)
    console.print(f"record: {kept}")
    return 0


def _command(options: argparse.Namespace) -> str:
    """The command without the path of its record."""
    words = ["canon", "bench", options.what]
    for name, value in vars(options).items():
        if name not in ("command", "what", "record") and value not in (None, "", []):
            words += [
                word for each in (value if isinstance(value, list) else [value]) for word in (f"--{name}", str(each))
            ]
    return shlex.join(words)


def _compared(rows: list[dict]):
    from rich.table import Table

    table = Table("shape", "contender", "agrees", "forward", "backward", title="TFLOP/s (median)")
    for row in rows:
        speeds = [f"{row[x]:.0f}" if x in row else "-" for x in ("forward_tflops", "backward_tflops")]
        verdict = row.get("failed") or f"{row['agrees']} ({row['worst']})"
        table.add_row(row["shape"], row["contender"], verdict, *speeds)
    return table


def _tuned(rows: list[dict]):
    from rich.table import Table

    table = Table("shape", "kernel", "configuration", "TFLOP/s", title="fastest first; * is the table's own")
    for row in sorted(rows, key=lambda x: (x["shape"], x["kernel"], -x.get("tflops", 0.0))):
        speed = row.get("failed") or f"{row['tflops']:.0f}"
        table.add_row(row["shape"], row["kernel"], row["config"] + " *" * row["table"], speed)
    return table
