"""Record the digests of every call of Canon's functions, and find the first call in which two runs part.

    with record_calls("run_a"):            on each rank, or around a group of ranks that are threads
        train()                            run_a/rank0.jsonl, run_a/rank1.jsonl, ...

    difference(Path("run_a"), Path("run_b"))       or `canon diff run_a run_b`

A line holds one pass of one call: its number, its arguments, and digests of its inputs and results. A backward pass has a line
of its own, with the number of its forward pass. Calls inside of a recorded call have no line.

While a recording lasts, it takes the place of the implementations behind the public functions. Without a recording nothing
changes, so nothing is slower. Each digest waits for the GPU and copies the tensor to the host.
"""

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon import reference
from canon.route.algorithm import ALGORITHMS, Algorithm
from canon.testing.bit_patterns import digest

DIGITS = 16
PLAIN = {  # the functions that are not differentiable: the name of the implementation that each encloses, and its results
    "attention_forward": ("forward", ("out", "lse")),
    "attention_backward": ("gradients", ("dq", "dk", "dv")),
    "merge": ("merged", ("out", "lse")),
    "decode_attention": ("decode", ("out", "lse")),
    "group_cast": ("cast", ("received",)),
    "group_reduce": ("reduce", ("into",)),
}
LEFT_OUT = {"group", "rank", "ranks", "sizes", "_"}  # arguments that may differ between runs and ranks
SAVED = ("q", "k", "latent", "v", "out", "lse")  # of both passes: they belong together if these are equal


class _Recording:
    """The files of the ranks. Ranks that are threads share one recording."""

    def __init__(self, folder: Path):
        self.folder, self.entered = folder, 0
        self.files: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.forwards: dict[tuple[int, str], int] = {}  # numbers of forward passes, by rank and digests
        self.running = threading.local()  # whether this thread is inside of a recorded call
        self.undo: list[Callable[[], None]] = []

    def run(
        self, function: str, name: str, arguments: dict[str, Any], tensors: dict[str, Any], results: tuple[str, ...],
        compute: Callable[[], Any], written: dict[str, Tensor] | None = None,
    ) -> Any:  # fmt: skip
        """Compute a pass ``name`` of a call and write its line. Return the results. ``written``: results written in place."""
        if getattr(self.running, "inside", False):
            return compute()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("record_calls: a captured CUDA graph has no results to record: record an eager run")
        inputs, self.running.inside = _digests(tensors), True
        try:
            given = compute()
        finally:
            self.running.inside = False
        found = given if isinstance(given, tuple) else (given,)
        outputs = _digests(dict(zip(results, found, strict=False)) | (written or {}))
        self._write(function, name, {key: _text(x) for key, x in arguments.items()}, inputs, outputs)
        return given

    def _write(self, function: str, name: str, arguments: dict, inputs: dict, outputs: dict) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank not in self.files:
            self.files[rank] = _new_file(self.folder / f"rank{rank}.jsonl")
        number = self.numbers[rank] = self.numbers.get(rank, 0) + 1
        line = {"call": number, "function": function, "pass": name}
        both = inputs | outputs
        key = rank, function + "".join(both.get(x, "") for x in SAVED)
        if name == "forward":
            self.forwards[key] = number
        elif name == "backward":
            line["of"] = self.forwards.get(key)
        line |= {"arguments": arguments, "inputs": inputs, "results": outputs}
        self.files[rank].write(json.dumps(line) + "\n")
        self.files[rank].flush()

    def begin(self) -> None:
        """Take the place of every implementation."""
        halves = [reference]
        with suppress(ImportError):  # no Triton
            from canon import fast

            halves.append(fast)
        for algorithm in ALGORITHMS.values():
            for name in ("forward", "backward"):
                self._replace(algorithm, name, getattr(self, f"_{name}")(algorithm, getattr(algorithm, name)))
        for half in {algorithm.side for algorithm in ALGORITHMS.values()}:
            self._replace(half, "under_sink", self._plain("sink", half.under_sink, ("out under the sink",)))
        for half in halves:
            for name, (enclosed, results) in PLAIN.items():
                self._replace_inside(inspect.unwrap(getattr(half, name)), name, enclosed, results)

    def end(self) -> None:
        """Give the implementations their places back, and close the files."""
        for undo in reversed(self.undo):
            undo()
        for file in self.files.values():
            file.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)  # algorithms and halves are frozen
        self.undo.append(lambda: object.__setattr__(owner, name, before))

    def _replace_inside(self, function: Any, name: str, enclosed: str, results: tuple[str, ...]) -> None:
        """Replace the implementation that a public function of `public_local` or `public_plans` encloses."""
        cell = function.__closure__[function.__code__.co_freevars.index(enclosed)]
        before = cell.cell_contents
        cell.cell_contents = self._plain(name, before, results)

        def undo() -> None:
            cell.cell_contents = before

        self.undo.append(undo)

    def _forward(self, algorithm: Algorithm, compute: Callable) -> Callable:
        def recorded(call, *given, **maxima):
            tensors = dict(zip(algorithm.declaration.tensors, given, strict=True))
            run = lambda: compute(call, *given, **maxima)
            return self.run(algorithm.function, "forward", _of_call(call), tensors, ("out", "lse"), run, maxima)

        return recorded

    def _backward(self, algorithm: Algorithm, compute: Callable) -> Callable:
        names = ("dout", "dlse", *algorithm.declaration.tensors, "out", "lse")

        def recorded(call, needs_grad, *saved):
            tensors, arguments = dict(zip(names, saved, strict=False)), _of_call(call) | {"needs_grad": needs_grad}
            results = tuple(f"d{name}" for name in algorithm.declaration.tensors)
            run = lambda: compute(call, needs_grad, *saved)
            return self.run(algorithm.function, "backward", arguments, tensors, results, run)

        return recorded

    def _plain(self, function: str, compute: Callable, results: tuple[str, ...]) -> Callable:
        signature = inspect.signature(compute)

        def recorded(*given, **options):
            arguments = signature.bind(*given, **options).arguments
            tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
            others = {name: x for name, x in arguments.items() if name not in tensors and name not in LEFT_OUT}
            return self.run(function, "", others, tensors, results, lambda: compute(*given, **options))

        return recorded


_lock = threading.Lock()
_active: list[_Recording] = []


@contextmanager
def record_calls(path: str | Path) -> Iterator[None]:
    """Record all calls inside the block, of both halves and both passes, into the folder ``path``: a file for each rank.

    Compiled functions are recorded, too. Of a sink the forward pass is recorded. A call raises FileExistsError if the folder
    holds a record of its rank from another time, and RuntimeError while it is captured into a CUDA graph. Raises RuntimeError
    if a recording into another folder is active.
    """
    folder = Path(path)
    with _lock:
        if _active and _active[0].folder != folder:
            raise RuntimeError(f"record_calls({str(path)!r}): a recording into {_active[0].folder} is active")
        if not _active:
            folder.mkdir(parents=True, exist_ok=True)
            _active.append(_Recording(folder))
            _active[0].begin()
        _active[0].entered += 1
    try:
        yield
    finally:
        with _lock:
            _active[0].entered -= 1
            if not _active[0].entered:
                _active.pop().end()


def _new_file(path: Path) -> Any:
    try:
        return path.open("x")
    except FileExistsError:
        raise FileExistsError(f"record_calls: {path} exists: choose another folder") from None


def _of_call(call: Any) -> dict[str, Any]:
    fields = {name: x for name, x in call.fields if name not in ("function", "device", "options")}
    return fields | {"tokens": call.shapes[0][1]} | call.options


def _digests(tensors: dict[str, Any]) -> dict[str, str]:
    with torch.no_grad():
        return {name: digest(x)[:DIGITS] for name, x in tensors.items() if isinstance(x, Tensor)}


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    found = getattr(value, "digest", None)
    if isinstance(found, str):
        return f"{type(value).__name__} {found[:DIGITS]}"
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return str(value) if plain else type(value).__name__


# --- comparison


def read_calls(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each rank, from a folder or from the file of one rank. Raises ValueError if it holds no record."""
    files = sorted(path.glob("rank*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    try:
        found = {i if path.is_file() else int(file.stem[4:]): _lines(file) for i, file in enumerate(files)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path} as a record of calls: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no record of calls: canon.testing.call_records.record_calls writes one")
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = "call", "function", "pass", "arguments", "inputs", "results"
    if wrong := [number for number, line in enumerate(lines, 1) if not all(name in line for name in names)]:
        raise ValueError(f"line {wrong[0]} of {file.name} is not a call")
    return [line | {"title": line["function"] + f" ({line['pass']})" * bool(line["pass"])} for line in lines]


def difference(a: Path, b: Path) -> str | None:
    """Return one sentence about the first call in which two recorded runs part, or None if all their bits are equal.

    Raises ValueError if one holds no record, or they have different numbers of ranks.
    """
    one, other = read_calls(a), read_calls(b)
    if one.keys() != other.keys():
        raise ValueError(f"{a} has {len(one)} ranks and {b} has {len(other)}: record both on equally many ranks")
    where = {rank: f" on rank {rank}" if len(one) > 1 else "" for rank in sorted(one)}
    parted = [_first_parted(one[rank], other[rank], a, b, text) for rank, text in where.items()]
    found = [x for x in parted if x is not None]
    return min(found, key=lambda x: x[:2])[2] if found else None  # of equally early ones, that of the first rank


def _first_parted(one: list, other: list, a: Path, b: Path, where: str) -> tuple[int, int, str] | None:
    """Return (call, stage, sentence): stage 0 for other arguments, 1 for inputs, 2 for results, 3 for missing calls."""
    for x, y in zip(one, other, strict=False):
        number, title = x["call"], x["title"]
        if title != y["title"]:
            return number, 0, f"Call {number}{where} is {title} in {a} and {y['title']} in {b}."
        names = dict.fromkeys([*x["arguments"], *y["arguments"]])
        for name in names:
            p, q = (line["arguments"].get(name, "missing") for line in (x, y))
            if p != q:
                return number, 0, f"Call {number}{where}, {title}: {name} is {p} in {a} and {q} in {b}."
        of = f", the backward pass of call {x['of']}" if x.get("of") else ""
        for stage, kind in ((1, "inputs"), (2, "results")):
            if differ := [name for name in {**x[kind], **y[kind]} if x[kind].get(name) != y[kind].get(name)]:
                why = "the runs part before this call" if stage == 1 else "its inputs are equal"
                verb = "differs" if len(differ) == 1 else "differ"
                return number, stage, f"Call {number}{where}, {title}{of}: {', '.join(differ)} {verb}; {why}."
    if len(one) != len(other):
        count = min(len(one), len(other))
        return (
            count + 1,
            3,
            f"All {count} common calls{where} are equal, but {a} has {len(one)} calls and {b} has {len(other)}.",
        )
    return None
