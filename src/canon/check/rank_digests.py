"""Compare the bits of calls with ``rank_invariant=True`` between numbers of ranks and layouts.

A digest is the start of a SHA-256 of out, lse, dq, dk and dv of the whole sequence.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from canon.check.case_runner import CaseRunner
from canon.check.cases import SHAPES, TILED_LAYOUTS, Case, has_option
from canon.testing import process_groups
from canon.testing.bit_patterns import digest
from canon.testing.judge import Attended

DIGITS = 12
FUNCTIONS = {
    "contiguous": "strided_attention",
    "zigzag": "strided_attention",
    "dispatch": "magi_attention",
}


@dataclass(frozen=True)
class RankedCall:
    """A call with the option. Calls with equal ``inputs`` must give equal bits."""

    case: Case
    ranks: int
    layout: str = ""  # "": `attention`, on one rank

    @property
    def inputs(self) -> str:
        return f"rank_invariant/{self.case.mask}/{self.case.dtype}"

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return (
            (f"{self.case.function} ({self.layout}, {ranks})")
            if self.layout
            else f"{self.case.function} ({ranks})"
        )


def calls_of(
    module: Any, ranks: int, dtypes: Sequence[str], gpu: bool, only: str | None = None
) -> list[RankedCall]:
    """Return the calls of a module, those on one rank first. ``only``: a pattern in the names of
    the inputs.
    """
    dtypes = [name for name in dtypes if name != "float64"] or ["float64"]
    counts = sorted({count for count in (2, 3, ranks) if count <= ranks} - {1})
    worlds = [(1, ""), (1, "contiguous"), (1, "dispatch")]
    for place, count in enumerate(counts):
        gathered = (
            ("contiguous", "zigzag") if count == ranks else (("contiguous", "zigzag")[place % 2],)
        )
        worlds += [(count, layout) for layout in (*gathered, "dispatch")]
    calls = []
    for place, mask in enumerate(("documents", "causal")):
        for count, layout in worlds:
            function = FUNCTIONS.get(layout, "attention")
            if has_option(module, function):
                dtype, options = dtypes[place % len(dtypes)], (("rank_invariant", True),)
                calls.append(
                    RankedCall(
                        Case(function, mask, dtype, SHAPES[mask][gpu], options=options),
                        count,
                        layout,
                    )
                )
    return [call for call in calls if only is None or fnmatch(call.inputs, f"*{only}*")]


@dataclass(frozen=True)
class DigestRunner(CaseRunner):
    """A picklable program for every rank: it returns the digest of each tensor of each call."""

    calls: tuple[RankedCall, ...] = ()

    def __call__(self) -> dict[RankedCall, tuple[str, ...]]:
        module = import_module(self.module)
        # on a CPU, several threads may divide the sums of a matrix product by its shape
        torch.set_num_threads(1)
        with self._kernels():
            return {call: self._digests(module, call) for call in self.calls}

    def _digests(self, module: Any, call: RankedCall) -> tuple[str, ...]:
        mask, x, rank = (
            self.source.mask(call.case),
            self.source.inputs(call.case, self.device),
            dist.get_rank(),
        )
        layout = TILED_LAYOUTS[call.layout or "contiguous"](mask, dist.get_world_size())
        packed = x.q.ndim == 3
        dims = (
            dict(q=0, k=0, v=0, dout=0, dlse=1) if packed else dict(q=1, k=1, v=1, dout=1, dlse=2)
        )
        q, k, v, dout, dlse = (
            layout.shard(getattr(x, name), rank, dim) for name, dim in dims.items()
        )
        q, k, v = (y.detach().requires_grad_() for y in (q, k, v))
        placed = (mask, layout) if call.layout else (mask,)
        options = {} if x.scale is None else {"scale": x.scale}
        out, lse = getattr(module, call.case.function)(
            q, k, v, *placed, rank_invariant=True, return_lse=True, **options
        )
        torch.autograd.backward((out, lse), (dout, dlse))
        tensors = zip((out, lse, q.grad, k.grad, v.grad), (0, 1, 0, 0, 0), strict=True)
        return tuple(
            digest(layout.unshard(y.detach(), dim=dim + (not packed))) for y, dim in tensors
        )


def compare(kind: str, runner: DigestRunner) -> list[dict[str, Any]]:
    """Run the calls, and return a result for each input."""
    found: dict[RankedCall, tuple[str, ...]] = {}
    failures: dict[RankedCall, str] = {}
    for ranks in sorted({call.ranks for call in runner.calls}):
        some = tuple(call for call in runner.calls if call.ranks == ranks)
        program = replace(runner, calls=some)
        try:
            found |= process_groups.run(kind, program, ranks, timeout=600)[0]
        except (RuntimeError, TimeoutError) as error:
            failures |= {call: str(error) for call in some}
    results = []
    for inputs in dict.fromkeys(call.inputs for call in runner.calls):
        calls = [call for call in runner.calls if call.inputs == inputs]
        first = next((call for call in calls if call in found), None)
        faults = [f"{call.name} failed: {failures[call]}" for call in calls if call in failures]
        for call in (
            call
            for call in calls
            if first is not None and call in found and found[call] != found[first]
        ):
            other = [
                name
                for name, a, b in zip(Attended._fields, found[call], found[first], strict=True)
                if a != b
            ]
            faults.append(f"{call.name} and {first.name} have other bits in {', '.join(other)}")
        short = (
            hashlib.sha256("".join(found[first]).encode()).hexdigest()[:DIGITS] if first else None
        )
        results.append(
            {
                "inputs": inputs,
                "digest": short,
                "calls": [call.name for call in calls],
                "faults": faults,
            }
        )
    return results


def show(results: Sequence[dict[str, Any]], console: Console, alone: bool = False) -> None:
    """Print digests and faults. ``alone``: without the number of calls."""
    for result in results:
        if result["digest"]:
            calls = len(result["calls"])
            equal = (
                ""
                if alone
                else (f": equal bits in {calls - len(result['faults'])} of {calls} calls")
            )
            console.print(
                f"{result['inputs']} {result['digest']}{equal}", markup=False, highlight=False
            )
        for fault in result["faults"]:
            console.print(Text.assemble((result["inputs"], "red"), ": ", fault))
