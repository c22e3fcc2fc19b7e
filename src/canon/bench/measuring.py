"""Judge contenders, then time those that agree: the loop of `canon bench` on one GPU."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from canon.bench.shapes import Shape
from canon.bench.timing import Eager, Run, eager_rounds, flush_of, peak_mb, take_turns
from canon.testing.judge import Attended, agreement, dense, oracle

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# the last one: a backend is not installed
DECLINED = ValueError, NotImplementedError, ModuleNotFoundError


@dataclass(frozen=True)
class Settings:
    """What all shapes share. It can be pickled."""

    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda")  # noqa: RUF009 (immutable)
    rounds: int = 10
    only: str = ""
    cold: bool = False

    def wants(self, name: str) -> bool:
        """Return whether a name has one of the texts of ``--only``."""
        return any(part in name for part in self.only.split("|"))


@dataclass(frozen=True)
class Contender:
    """``make()`` returns a differentiable function (q, k, v) -> out; q (b, t, h, d)."""

    name: str
    make: Callable[[], Attend]
    forward: str = ""  # contenders with equal names share one forward pass
    declines: bool = False  # errors of `DECLINED` are no failure: this shape is not supported
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # both passes run inside
    bound: float | None = 1.0  # the largest ratio to the judge's bound; None: not judged

    @property
    def canon(self) -> bool:
        return self.name.startswith("canon")

    @property
    def forward_of(self) -> str:
        return self.forward or self.name

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self.around():
                return call(*arguments)

        return run


@dataclass(frozen=True)
class Made:
    """Runs of a contender by name, and results for the judge."""

    results: Sequence[Tensor]
    peak: Run  # its memory is measured
    gpu: dict[str, Run] = field(default_factory=dict)
    eager: dict[str, Run] = field(default_factory=dict)


class Judge:
    """Dense attention on the last sequence and the last key head with its queries."""

    def __init__(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
        self.group = shape.h // shape.g
        group = self.group, 1, 1, self.group
        one = [x[-1:, :, -heads:] for x, heads in zip((q, k, v, dout), group, strict=True)]
        self.exact, self.honest = oracle(*one, shape.mask), dense(*one, shape.mask)

    def verdict(
        self,
        out: Tensor,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        *,
        lse: Tensor | None = None,
        bound: float = 1.0,
    ) -> dict[str, Any]:
        """Return the fields of a row, from results of all heads."""
        group = self.group, self.group, 1, 1
        last = (
            None if x is None else x.detach()[-1:, :, -heads:]
            for x, heads in zip((out, dq, dk, dv), group, strict=True)
        )
        out, *gradients = last
        lse = None if lse is None else lse.detach()[-1:, -self.group :]
        verdict = agreement(Attended(out, lse, *gradients), self.exact, self.honest)
        agrees = verdict.agrees or bool(verdict.worst and verdict.worst.ratio <= bound)
        row = {"agrees": agrees, "worst": str(verdict.worst or "")}
        return row if agrees else row | {"failed": f"disagrees: {verdict}"}


def reason(error: Exception) -> str:
    """Return the text of an error."""
    return f"{type(error).__name__}: {error}"[:300]


def measured(
    contenders: Iterable[Contender],
    make: Callable[[Contender], Made],
    judge: Judge,
    settings: Settings,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Return a row with ``fields`` for each contender."""
    rows, gpu, eager, forwards = [], [], [], set()
    device, rounds = settings.device, settings.rounds
    for contender in contenders:
        row = {"contender": contender.name, "forward_of": contender.forward_of, **fields}
        rows.append(row := row | {"canon": contender.canon})
        if not (made := _agreeing(contender, row, make, judge)):
            continue
        row["peak_mb"] = peak_mb(made.peak, device)
        done = {"forward"} if contender.forward_of in forwards else set()
        forwards.add(contender.forward_of)
        for name in (x for x in made.gpu if x not in done):
            row[f"{name}_ms"] = []
            gpu.append((made.gpu[name], row[f"{name}_ms"]))
        eager += [Eager.listed(row, x, run) for x, run in made.eager.items() if x not in done]
    take_turns(gpu, rounds, flush_of(device) if settings.cold else None)
    eager_rounds(eager, rounds, device)
    return rows


def _agreeing(contender: Contender, row: dict, make: Callable, judge: Judge) -> Made | None:
    try:
        made = make(contender)
    except Exception as error:  # a peer may lack a width or a mask
        declined = contender.declines and isinstance(error, DECLINED)
        row["declined" if declined else "failed"] = reason(error)
        return None
    if contender.bound is not None:
        row |= judge.verdict(*made.results, bound=contender.bound)
    return None if "failed" in row else made


def both_passes(attend: Attend, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """Return out and the gradients of the leaves."""
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def add_tflops(row: dict[str, Any], operations: float, **factors: float) -> None:
    """Add NAME_tflops of each timed pass. ``factors``: its operations, in forward passes."""
    for name, factor in factors.items():
        if times := row.get(f"{name}_ms"):
            row[f"{name}_tflops"] = factor * operations / statistics.median(times) / 1e9


def verdict_of(row: dict[str, Any]) -> str:
    """Return the column "agrees" of a row."""
    if text := row.get("failed") or row.get("declined"):
        return text
    return f"{row['agrees']} ({row['worst']})" if "agrees" in row else "-"


def leaves_of(shape: Shape, settings: Settings) -> tuple[list[Tensor], Tensor, Judge]:
    """Return the leaves q, k and v, dout, and the judge."""
    inputs = shape.inputs(settings.dtype, settings.device)
    judge = Judge(shape, *inputs)
    return [x.requires_grad_() for x in inputs[:3]], inputs[3], judge


def listed(contenders: Iterable[Contender], settings: Settings) -> list[Contender]:
    """Return those that ``--only`` asks for."""
    return [one for one in contenders if settings.wants(one.name)]
