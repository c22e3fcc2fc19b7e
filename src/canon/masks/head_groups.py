"""The head groups of strided attention: the key heads of each step.

    heads = 8, stride = 4             |0 1 2 3|4 5 6 7|
    first = 1                         |0|1 2 3|4 5 6 7|        [f, s-f], s, s, ...
    last = 2                          |0 1 2 3|4 5|6 7|        ..., s, s, [s-l, l]
    first = 1, last = 2               |0|1 2 3|4 5|6 7|

Smaller groups shorten the first gather and the last reduction, which nothing hides.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from canon.masks.arguments import whole
from canon.masks.layout import Layout

SCHEDULES = ("scatter", "ring")
BUDGET = 1 << 30  # bytes of gathered K and V


def default_stride(heads: int, bytes_per_head: int) -> int:
    """Return the largest divisor of the key heads whose gathered K and V take at most 1 GiB, else
    1. The backward pass of `canon.fast` holds up to eight times these bytes.

    In the records (`tests/masks/test_defaults.py`) both passes take at most 1.01 times as long as
    with the best choice, and on average 1.003 times; with the choice of `canon.costs` 1.13 and
    1.039 times.
    """
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * bytes_per_head <= BUDGET]
    return max(fitting, default=1)


def gathered_bytes(layout: Layout, bytes_per_token: int) -> int:
    """Return the bytes of a gathered key head, with a padded shard from each rank."""
    return layout.ranks * max(map(layout.size, range(layout.ranks))) * bytes_per_token


def head_groups(
    heads: int, stride: int, first: int | None = None, last: int | None = None, *, option: str = ""
) -> tuple[range, ...]:
    """Return the key heads of each step, ``stride`` of them, with ``first`` and ``last`` as above.

    ``option`` is the prefix of both in errors. Raises ValueError if they do not fit.
    """
    if whole("head_stride", stride) < 1 or heads % stride:
        raise ValueError(f"head_stride={stride} does not divide the {heads} key heads")
    for name, part in (("first", first), ("last", last)):
        if part is not None and not 0 < whole(f"{option}{name}_stride", part) < stride:
            raise ValueError(
                f"{option}{name}_stride={part}: expected 0 < {name} < head_stride, "
                f"which is {stride}"
            )
    if first is not None and last is not None and heads < 2 * stride:
        raise ValueError(
            f"{option}first_stride={first} and {option}last_stride={last} split two head groups, "
            f"but {heads} key heads "
            f"with head_stride={stride} form one: pass one of the two, or a smaller head_stride"
        )
    edges = {*range(0, heads + 1, stride), first or 0, heads - (last or 0)}
    return tuple(range(start, stop) for start, stop in pairwise(sorted(edges)))


class Steps(NamedTuple):
    """The key heads of each step, forward and backward (None: a ring)."""

    forward: tuple[range, ...]
    backward: tuple[range, ...] | None


def steps_of(heads: int, options: Mapping[str, Any]) -> Steps:
    """Return the steps for the options of `strided_attention`, or raise ValueError."""
    schedule, stride = options["backward_schedule"], options["head_stride"]
    first, last = (options[f"backward_{name}_stride"] for name in ("first", "last"))
    if schedule not in SCHEDULES:
        raise ValueError(
            f"backward_schedule={schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}"
        )
    forward = head_groups(heads, stride, options["forward_first_stride"], option="forward_")
    if schedule == "scatter":
        return Steps(forward, head_groups(heads, stride, first, last, option="backward_"))
    for name, part in (("first", first), ("last", last)):
        if part is not None:
            raise ValueError(
                f"backward_{name}_stride={part} has no effect with "
                'backward_schedule="ring": pass None'
            )
    return Steps(forward, None)
