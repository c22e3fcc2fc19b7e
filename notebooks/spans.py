"""The spans of a recorded run: the kernels and messages of each rank, in milliseconds."""

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


def by_rank(row: dict[str, Any]) -> dict[str, list[Span]]:
    """Return the spans of a result of a record, by "rank R"."""
    return {
        f"rank {rank}": [
            Span(kind_of(name), name, start / 1e3, (start + length) / 1e3)
            for start, length, name in ran
        ]
        for rank, ran in enumerate(row[KERNELS])
    }
