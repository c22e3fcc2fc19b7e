"""The spans of a recorded run: the kernels and messages of each rank, in milliseconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KINDS = {
    "nccl": "message",
    "memcpy": "message",
    "forward": "forward",
    "dkdv": "backward",
    "dq": "backward",
}
# part of a kernel's name -> kind of its span
KINDS |= {"fused": "backward", "backward": "backward"}
KIND_NAMES = ("forward", "backward", "other", "message")
# of a record: for each rank, [start in us, length in us, name] of each kernel
KERNELS = "kernels_of_both_by_rank"


@dataclass(frozen=True)
class Span:
    """A kernel, a step or a message of a rank: "message", "forward", "backward" or "other", from
    start to stop in ms.
    """

    kind: str
    name: str
    start: float
    stop: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel or copy with this name."""
    return next((kind for part, kind in KINDS.items() if part in name.lower()), "other")


def recorded(record: Any, schedules: Iterable[str] = ()) -> dict[str, dict[str, list[Span]]]:
    """Return the spans of a record by title and rank, of the named schedules or of all.

    Raises ValueError if the record has no timeline, or no schedule of a name.
    """
    results = record.get("results", ()) if isinstance(record, dict) else ()
    rows = [row for row in results if isinstance(row, dict) and KERNELS in row]
    if not rows:
        raise ValueError(
            f"the record has no timeline: no result has {KERNELS!r}, the kernels of a profiled run"
        )
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    wanted = list(schedules) or names
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(
            f"the record has no timeline of {unknown[0]!r}; it has {', '.join(map(repr, names))}"
        )
    return {
        ", ".join(filter(None, (row["schedule"], row.get("transport")))): {
            f"rank {rank}": [
                Span(kind_of(name), name, start / 1e3, (start + length) / 1e3)
                for start, length, name in ran
            ]
            for rank, ran in enumerate(row[KERNELS])
        }
        for row in rows
        if row["schedule"] in wanted
    }
