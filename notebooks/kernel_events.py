"""Name the events of a simulated Gluon kernel, and number them for a figure.

    log = []
    simulated_passes(..., "split", log=log)
    steps, waits = steps_of(backward_events(log), "split")

Names are those of the mathematics (S, dP, dV, dK, dQ). They are read from the line of the kernel's
source of each event. The number of a step is its place in the order of the run. It is not a time:
the simulator has no clock."""

import ast
import linecache
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from canon.simulator import Event

NAMES = {
    "q": "Q", "dout": "dO", "k": "K", "v": "V", "s": "S", "p": "exp", "dp": "dP",
    "acc_v": "dV", "acc_k": "dK", "dq": "dQ", "acc": "dQ", "o": "O",
}  # fmt: skip
LANES = {  # partition of the kernel: the name of its lane
    "forward": {
        "load_tiles [0]": "loader",
        "attend [1]": "warpgroup 0",
        "attend [2]": "warpgroup 1",
    },
    "split": {
        "load_tiles [0]": "loader",
        "differentiate [1]": "warpgroup 0",
        "differentiate [2]": "warpgroup 1",
    },
    "fused": {
        "load_tiles [2]": "loader",
        "differentiate [0]": "warpgroup 0",
        "differentiate [1]": "warpgroup 1",
    },
}
_SOURCE = re.compile(r"(\w+) = |.*\b(?:load_box|load_tile|tma_load)\((\w+)_desc")
_HELD = {"forward": ("Q",), "split": ("K", "V"), "fused": ("K", "V")}  # loaded once for a work tile


@dataclass(frozen=True)
class Step:
    """A step of a run: an operation starts ("start"), has ended ("end"), or a warpgroup computes
    exponentials ("exp").

    ``tile`` counts the visited tiles. It is None for tensors that are loaded once, and for a
    discarded product. ``begun`` is the number of the start, for an end.
    """

    lane: str
    number: int
    kind: str
    text: str
    tile: int | None
    begun: int | None = None


Place = tuple[str, int]  # a lane and the number of a step


def backward_events(log: Sequence[Event], kernel: str = "dkdv_kernel") -> list[Event]:
    """Return the events of one kernel of the backward pass."""
    return [event for event in log if event.kernel == kernel]


def name_of(event: Event) -> str:
    """Return the name of an MMA's result, or of the tensor that is loaded; "" for other events."""
    for code, number in event.place.lines:
        line = statement(code.co_filename, number)
        if match := _SOURCE.match(line):
            return NAMES.get(next(filter(None, match.groups())), "")
    return ""


def statement(file: str, line: int) -> str:
    """Return the statement at a line, on one line."""
    ends = [end for start, end in _statements(file) if start <= line <= end]
    found = " ".join(
        linecache.getline(file, n).strip() for n in range(line, min(ends, default=line) + 1)
    )
    return re.sub(r"(?<=[(\[]) |,? (?=[)\]])", "", found)


@lru_cache
def _statements(file: str) -> list[tuple[int, int]]:
    nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    simple = (x for x in nodes if isinstance(x, ast.stmt) and not hasattr(x, "body"))
    return [(x.lineno, x.end_lineno or x.lineno) for x in simple]


def mma_names(events: Sequence[Event]) -> list[str]:
    """Return the names of the MMAs' results, in the order of their first start."""
    return list(dict.fromkeys(name_of(event) for event in events if event.kind == "wgmma"))


def total(events: Sequence[Event], kind: str) -> int:
    """Return the sizes of all events of a kind: FLOPs of "wgmma", elements of "exp2"."""
    return sum(event.size for event in events if event.kind == kind)


def steps_of(events: Sequence[Event], kernel: str) -> tuple[list[Step], list[tuple[Place, Place]]]:
    """Return the steps of the partitions in ``LANES[kernel]``, and the waits between lanes.

    A wait is (lane and next step of the partition that arrives last at the barrier, lane and next
    step of the waiting one). Waits for data that had already arrived, and waits after the last
    step, are left out."""
    lanes, steps, waits = LANES[kernel], [], []
    counts, starts = Counter(), {}
    published, last = {}, {}
    for place, event in enumerate(event for event in events if event.partition in lanes):
        lane = lanes[event.partition]
        name = name_of(event)
        landed = event.kind == "done" and event.of.kind == "load"
        if name and event.kind in ("load", "wgmma", "exp2"):
            tile = _tile(event, name, counts[lane, event.kind, name], kernel)
            counts[lane, event.kind, name] += 1
            starts[event] = step = Step(
                lane, len(steps), "exp" if event.kind == "exp2" else "start", name, tile
            )
            steps.append(step)
        elif event.kind == "done" and event.of in starts:
            of = starts[event.of]
            steps.append(Step(lane, len(steps), "end", of.text, of.tile, of.number))
        arrival, source, number = published.get(event.barrier, (-1, lane, 0))
        if event.kind == "wait" and arrival > last.get(lane, -1) and source != lane:
            waits.append(((source, number), (lane, len(steps))))
        if event.kind != "wait" and event.barrier:
            published[event.barrier] = place, lane, len(steps)
        if not landed:
            last[lane] = place
    return steps, [(source, wait) for source, wait in waits if wait[1] < len(steps)]


def _tile(event: Event, name: str, count: int, kernel: str) -> int | None:
    """Return the visited tile of a step, which is number ``count`` of its name in its lane."""
    if event.kind == "load" and name in _HELD[kernel]:
        return None
    if event.kernel == "forward_kernel" and name == "O":  # a tile late; the first one is discarded
        return count - 1 if count else None
    return count


def in_flight(steps: Sequence[Step]) -> dict[str, dict[str, list[str]]]:
    """Return for each warpgroup the MMAs in flight at each of its exponentials: its own, and those
    of the other one.

    ``in_flight(steps)["warpgroup 0"]["own"]`` lists for each tile the names, such as "S 1, O 0".
    """
    ends = {(step.lane, step.begun): step.number for step in steps if step.kind == "end"}
    starts = [step for step in steps if step.kind == "start" and step.lane != "loader"]
    found: dict[str, dict[str, list[str]]] = {}
    for exp in (step for step in steps if step.kind == "exp"):
        flying = [x for x in starts if x.number < exp.number < ends[x.lane, x.number]]
        for whose, same in (("own", True), ("other", False)):
            names = [
                x.text if x.tile is None else f"{x.text} {x.tile}"
                for x in flying
                if (x.lane == exp.lane) == same
            ]
            found.setdefault(exp.lane, {}).setdefault(whose, []).append(", ".join(names))
    return found
