"""Compare the bits of calls with ``rank_invariant=True`` between numbers of ranks and layouts.

A digest is the start of a SHA-256 of out, lse, dq, dk and dv of the whole sequence.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from canon.check import case_calls
from canon.check.case_runner import CaseRunner, assembled
from canon.check.cases import SHAPES, TILED_LAYOUTS, Case, has_option, matches
from canon.testing import process_groups
from canon.testing.bit_patterns import digest
from canon.testing.judge import Attended

DIGITS = 12
OPTION = (("rank_invariant", True),)
FUNCTIONS = {  # by layout
    None: "attention",
    "contiguous": "strided_attention",
    "zigzag": "strided_attention",
    "dispatch": "magi_attention",
}


@dataclass(frozen=True)
class RankedCall:
    """A call with the option. Calls with equal ``inputs`` must give equal bits."""

    case: Case
    ranks: int

    @property
    def inputs(self) -> str:
        return f"rank_invariant/{self.case.mask}/{self.case.dtype}"

    @property
    def name(self) -> str:
        layout = f"{self.case.layout}, " if self.case.layout else ""
        return f"{self.case.function} ({layout}{self.ranks} rank{'s' * (self.ranks > 1)})"


def calls_of(
    module: Any, ranks: int, dtypes: Sequence[str], gpu: bool, only: str | None = None
) -> list[RankedCall]:
    """Return the calls of a module, those on one rank first."""
    dtypes = [name for name in dtypes if name != "float64"] or ["float64"]
    counts = sorted({count for count in (2, 3, ranks) if count <= ranks} - {1})
    worlds: list[tuple[int, str | None]] = [(1, None), (1, "contiguous"), (1, "dispatch")]
    for place, count in enumerate(counts):
        gathered = ["contiguous", "zigzag"]
        gathered = gathered if count == ranks else [gathered[place % 2]]
        worlds += [(count, layout) for layout in (*gathered, "dispatch")]
    calls = []
    for place, mask in enumerate(("documents", "causal")):
        dtype, shape = dtypes[place % len(dtypes)], SHAPES[mask][gpu]
        for count, layout in worlds:
            function = FUNCTIONS[layout]
            if has_option(module, function):
                case = Case(function, mask, dtype, shape, layout, options=OPTION)
                calls.append(RankedCall(case, count))
    return [call for call in calls if matches(call.inputs, only)]


@dataclass(frozen=True)
class DigestRunner(CaseRunner):
    """A program for every rank: it returns the digests of each call."""

    calls: tuple[RankedCall, ...] = ()

    def __call__(self) -> dict[RankedCall, tuple[str, ...]]:
        module = import_module(self.module)
        # on a CPU, several threads may divide the sums of a matrix product by its shape
        torch.set_num_threads(1)
        with self._kernels():
            return {call: self._digests(module, call) for call in self.calls}

    def _digests(self, module: Any, call: RankedCall) -> tuple[str, ...]:
        case, rank = call.case, dist.get_rank()
        mask, x = self.source.mask(case), self.source.inputs(case, self.device)
        layout = TILED_LAYOUTS[case.layout or "contiguous"](mask, call.ranks)
        results = case_calls.call(module, case, x, layout, rank)
        return tuple(map(digest, assembled(results, layout)))


def compare(kind: str, runner: DigestRunner) -> list[dict[str, Any]]:
    """Return a result for each input."""
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
        short = None
        if first is not None:
            short = hashlib.sha256("".join(found[first]).encode()).hexdigest()[:DIGITS]
            for call in (call for call in calls if call in found):
                names = zip(Attended._fields, found[call], found[first], strict=True)
                if other := ", ".join(name for name, a, b in names if a != b):
                    faults.append(f"{call.name} and {first.name} have other bits in {other}")
        names = [call.name for call in calls]
        results.append({"inputs": inputs, "digest": short, "calls": names, "faults": faults})
    return results


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the digests and their faults. Equal code, documents, versions and GPU models give equal
    digests.
    """
    for result in results:
        if result["digest"]:
            calls, line = len(result["calls"]), f"{result['inputs']} {result['digest']}"
            line += f": equal bits in {calls - len(result['faults'])} of {calls} calls"
            console.print(line, markup=False, highlight=False)
        for fault in result["faults"]:
            console.print(Text.assemble((result["inputs"], "red"), ": ", fault))
