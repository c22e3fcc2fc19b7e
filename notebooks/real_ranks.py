"""Run one public function of both halves on real ranks, forward and backward, and judge the results
of every rank.

    two or more GPUs    one process for each GPU, over NCCL
    one GPU             ranks are threads that share it
    none                processes over gloo; Triton's interpreter runs the kernels, on a short
                        sequence

    place = real_ranks.here()
    results = place.compare({"zigzag ring": FunctionCall("zigzag_attention", mask, layout)})
    print(real_ranks.table(results))
    real_ranks.require(results)

Every rank runs reference and fast twice on bfloat16 inputs. The caller's process then compares each
shard with the shards of the judge's oracle and honest results. On GPUs a third run of fast is the
timeline, from torch's profiler.

The error of a rank reaches the caller as RuntimeError, with the traceback of that rank.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from spans import Span, kind_of
from torch import Tensor
from verdicts import first_difference

from canon.bench.schedules import after_meeting, meet
from canon.masks.cast_plan import CastPlan
from canon.reference import Layout, Mask
from canon.testing import process_groups
from canon.testing.judge import Agreement, Attended, agreement, oracle, orders

HALVES = ("reference", "fast")
NOT_DRAWN = ("Memset", "HtoD", "DtoH")


@dataclass(frozen=True)
class FunctionCall:
    """A public function by its name, the mask and the layout of the whole sequence, and further
    options.
    """

    function: str
    mask: Mask
    layout: Layout
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResult:
    """The verdicts, bits and times of one rank. Dicts are by half. ``milliseconds``: wall time of
    both passes, second run.
    """

    rank: int
    device: str
    tokens: int
    verdicts: dict[str, Agreement]
    equal_runs: dict[str, bool]
    milliseconds: dict[str, float]
    spans: list[Span]

    @property
    def agrees(self) -> bool:
        return all(verdict.agrees for verdict in self.verdicts.values())

    @property
    def same_bits(self) -> bool:
        return all(self.equal_runs.values())

    @property
    def exposed(self) -> float:
        """Return the milliseconds of messages during which no kernel of this rank runs."""
        return _uncovered(
            *(
                _union(x for x in self.spans if (x.kind == "message") == sent)
                for sent in (True, False)
            )
        )


@dataclass(frozen=True)
class Place:
    """The ranks of this machine, and the sizes that suit it."""

    device: str
    ranks: int
    tokens: int
    h: int
    g: int
    d: int

    @property
    def shared(self) -> bool:
        """True if all ranks are threads on one GPU."""
        return self.device == "cuda" and torch.cuda.device_count() == 1

    def __str__(self) -> str:
        if self.device == "cpu":
            how = "processes over gloo on the CPU, kernels in Triton's interpreter"
        else:
            how = (
                "threads that share one GPU"
                if self.shared
                else "processes over NCCL, one for each GPU"
            )
            how += f" ({torch.cuda.get_device_name(0)})"
        sizes = (
            f"{self.tokens} tokens, {self.h} query heads, {self.g} key heads, width {self.d}, "
            "bfloat16"
        )
        return f"{self.ranks} ranks: {how}\n{sizes}"

    def inputs(self, mask: Mask) -> list[Tensor]:
        """Return q, k, v and dout of the whole sequence on the CPU, equal on all ranks."""
        draw = torch.Generator().manual_seed(0)
        sizes = [(1, mask.queries, heads, self.d) for heads in (self.h, self.g, self.g, self.h)]
        return [torch.randn(size, generator=draw).bfloat16() for size in sizes]

    def compare(self, calls: Mapping[str, FunctionCall]) -> dict[str, list[RankResult]]:
        """Run all calls on all ranks, and return the judged results by name and rank. Raises the
        error of a rank.
        """
        by_rank = self._run(partial(_results, self, dict(calls)))
        expected_of = {
            mask: _expected(self, mask) for mask in {call.mask for call in calls.values()}
        }
        results = {}
        for name, call in calls.items():
            expected = expected_of[call.mask]
            found = [results_of_rank[name] for results_of_rank in by_rank]
            results[name] = [
                _judged(rank, call.layout, *one, *expected) for rank, one in enumerate(found)
            ]
            if self.shared:  # the kernels of all ranks are in one queue
                results[name][0].spans.extend(_spans_of_threads(self, call))
        return results

    def exchange(self, plan: CastPlan) -> list[dict[str, Tensor]]:
        """Run group_cast and group_reduce of both halves on all ranks. Return the tensors by
        "function half", of each rank.

        A row of the first cast has the position of its token. The reduce returns it, and the owner
        adds it to 1000."""
        return self._run(partial(_exchanged, self, plan))

    def _run(self, program: Callable[[], Any]) -> list[Any]:
        if self.shared:
            return process_groups.threads(program, self.ranks)
        if self.device == "cuda":
            return process_groups.gpus(program, self.ranks)
        # the processes get it before they import Triton
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            return process_groups.processes(program, self.ranks)


def here() -> Place:
    """Return the ranks of this machine: all GPUs, threads on one GPU,
    or four processes on the CPU.
    """
    gpus = process_groups.kernel_gpus()
    if gpus:
        return Place("cuda", gpus if gpus > 1 else 4, 16384, h=16, g=8, d=128)
    return Place("cpu", 4, 192, h=4, g=2, d=16)


def table(results: Mapping[str, list[RankResult]]) -> str:
    """Return one line for each call and rank: the worst error over its bound, the bits, and on GPUs
    the times.

    "exposed" is the time of messages without a kernel, in the timeline of fast. Ranks that share a
    GPU share one timeline."""
    timed = all(one.device != "CPU" for of_ranks in results.values() for one in of_ranks)
    first = f"{'':27} {'error / bound':^25}  {'two runs':^15}"
    second = f"{'':27} {'reference':>12} {'fast':>12}  reference  fast  "
    lines = [f"{first}  {'ms of both passes':^21} {'exposed':>9}"] if timed else [first]
    lines.append(f"{second} {'reference':>10} {'fast':>10} {'ms':>9}" if timed else second)
    for name, of_ranks in results.items():
        for one in of_ranks:
            worst = [_worst(one.verdicts[half]) for half in HALVES]
            bits = ["equal" if one.equal_runs[half] else "differ" for half in HALVES]
            line = f"{name:20} rank {one.rank:<2}{worst[0]:>12} {worst[1]:>12}  {bits[0]:9}  "
            times = [one.milliseconds[half] for half in HALVES]
            exposed = f"{one.exposed:.2f}" if one.spans else "-"
            more = f"{bits[1]:6} {times[0]:10.2f} {times[1]:10.2f} {exposed:>9}"
            lines.append(line + (more if timed else bits[1]))
    return "\n".join(line.rstrip() for line in lines)


def require(results: Mapping[str, list[RankResult]]) -> None:
    """Raise AssertionError that names the first difference, unless all results agree and both runs
    have equal bits.
    """
    for name, of_ranks in results.items():
        for one in of_ranks:
            for half in HALVES:
                where, verdict = f"{name}, rank {one.rank}, {half}", one.verdicts[half]
                assert verdict.agrees, f"{where}: {first_difference(verdict)}"
                assert one.equal_runs[half], f"{where}: two runs differ in their bits"


def _worst(verdict: Agreement) -> str:
    worst = verdict.worst
    return f"{worst.ratio:.2f} ({worst.tensor})" if worst and verdict.agrees else "disagrees"


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the times of the spans as disjoint intervals, in order."""
    union: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if union and span.start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], span.stop)
        else:
            union.append((span.start, span.stop))
    return union


def _uncovered(intervals: list[tuple[float, float]], cover: list[tuple[float, float]]) -> float:
    covered = sum(max(0.0, min(b, d) - max(a, c)) for a, b in intervals for c, d in cover)
    return sum(b - a for a, b in intervals) - covered


# ---------------------------------------------------------------------- on every rank
def _results(place: Place, calls: Mapping[str, FunctionCall]) -> dict[str, tuple]:
    """Return for each call (results by half, equal bits by half, milliseconds by half, spans, name
    of the device).
    """
    if place.device == "cpu":
        from canon.fast.kernels.interpreter import repair

        repair()
    return {name: _result(place, call) for name, call in calls.items()}


def _result(place: Place, call: FunctionCall) -> tuple:
    shards = _shards(place, call)
    results, equal, milliseconds = {}, {}, {}
    for half in HALVES:
        first, _ = _timed(place, half, call, shards)
        second, milliseconds[half] = _timed(place, half, call, shards)
        equal[half] = all(map(torch.equal, first, second))
        results[half] = [x.cpu() for x in first]
    on_gpu = place.device == "cuda"
    spans = _timeline(call, shards) if on_gpu and not place.shared else []
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    return results, equal, milliseconds, spans, device


def _shards(place: Place, call: FunctionCall) -> list[Tensor]:
    return [call.layout.shard(x, dist.get_rank()).to(place.device) for x in place.inputs(call.mask)]


def _attended(half: str, call: FunctionCall, shards: list[Tensor]) -> list[Tensor]:
    """Return out, lse, dq, dk, dv of this rank, from the public function of a half."""
    function = getattr(import_module(f"canon.{half}"), call.function)
    takes_layout = (
        "layout" in signature(getattr(import_module("canon.reference"), call.function)).parameters
    )
    layout = {"layout": call.layout} if takes_layout else {}
    leaves, dout = [x.detach().requires_grad_() for x in shards[:3]], shards[3]
    out, lse = function(*leaves, mask=call.mask, **layout, **call.options, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def _timed(
    place: Place, half: str, call: FunctionCall, shards: list[Tensor]
) -> tuple[list[Tensor], float]:
    dist.barrier()
    _synchronize(place)
    start = time.perf_counter()
    found = _attended(half, call, shards)
    _synchronize(place)
    return found, 1e3 * (time.perf_counter() - start)


def _exchanged(place: Place, plan: CastPlan) -> dict[str, Tensor]:
    positions = plan.layout.positions(dist.get_rank()).to(place.device, torch.float32)[:, None]
    found = {}
    for half in HALVES:
        module = import_module(f"canon.{half}")
        cast = module.group_cast(positions, plan, 0)
        into = module.group_reduce(cast, plan, 0, torch.full_like(positions, 1000.0))
        found |= {f"group_cast {half}": cast.cpu(), f"group_reduce {half}": into.cpu()}
    return found


def _synchronize(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()


def _timeline(call: FunctionCall, shards: list[Tensor]) -> list[Span]:
    """Run fast a third time on a GPU, and return its spans. Time 0 is the first one of this
    rank.
    """
    with _profiled() as spans:
        meet(torch.device("cuda", torch.cuda.current_device()))
        _attended("fast", call, shards)
        torch.cuda.synchronize()
    return spans


def _spans_of_threads(place: Place, call: FunctionCall) -> list[Span]:
    """Run fast on all threads a third time, and return the kernels of the GPU that they share."""

    def program() -> None:
        shards = _shards(place, call)
        dist.barrier()
        _attended("fast", call, shards)
        torch.cuda.synchronize()

    with _profiled() as spans:
        process_groups.threads(program, place.ranks)
    return spans


@contextmanager
def _profiled() -> Iterator[list[Span]]:
    """Yield a list that receives the spans of the block's kernels."""
    from torch.profiler import ProfilerActivity, profile

    spans: list[Span] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        yield spans
    on_gpu = [
        event
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans += spans_of(
        [(event.time_range.start, event.time_range.end, event.name) for event in on_gpu]
    )


def spans_of(ran: list[tuple[float, float, str]]) -> list[Span]:
    """Return the spans of (start, end, name) in microseconds: kernels, and copies between GPUs,
    after `meet` if it ran.

    Time 0 is the start of the first one.
    """
    ran = [one for one in after_meeting(ran) if not any(name in one[2] for name in NOT_DRAWN)]
    zero = min((start for start, _, _ in ran), default=0.0)
    return [
        Span(kind_of(name), name, (start - zero) / 1e3, (end - zero) / 1e3)
        for start, end, name in ran
    ]


# ---------------------------------------------------------------------- in the caller's process
def _expected(place: Place, mask: Mask) -> tuple[Attended, list[Attended]]:
    tensors = [x.to(place.device) for x in place.inputs(mask)]
    return oracle(*tensors, mask), orders(*tensors, mask)


def _judged(
    rank, layout: Layout, results, equal, milliseconds, spans, device, exact, honest
) -> RankResult:
    """Judge the shard of a rank: its oracle and honest results are the same rows of those of the
    whole sequence.
    """
    exact, *honest = (_shard_of(whole, layout, rank) for whole in (exact, *honest))
    verdicts = {half: agreement(Attended(*results[half]), exact, honest) for half in HALVES}
    return RankResult(rank, device, layout.size(rank), verdicts, equal, milliseconds, spans)


def _shard_of(whole: Attended, layout: Layout, rank: int) -> Attended:
    dims = {"lse": 2}
    return Attended(
        *(layout.shard(x, rank, dims.get(n, 1)) for n, x in zip(whole._fields, whole, strict=True))
    )
