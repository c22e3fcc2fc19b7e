"""Run Gluon's forward kernels in the simulator, on the CPU: the plain one, the one that calls run,
and one without a line.

run(PLAIN, q, k, v, mask)
with without("mbarrier.wait(v.full.index(ring.slot), ring.parity)"):
    run(PLAIN, q, k, v, mask)        # raises canon.simulator.Fault
"""

import copy
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kernel_events import statement
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from canon import fast
from canon.fast.kernels.gluon import config, forward_plain
from canon.fast.kernels.gluon.config import Config
from canon.masks.mask import Mask
from canon.simulator import Event, Fault
from canon.testing import simulated_kernels
from canon.testing.judge import Attended

# 128 queries, tiles of 64 keys, two buffers of K and V
PLAIN = Config(128, 64, 2, plain=True)
FULL = Config(128, 64, 2)
STALE = Config(128, 64, 2, stale_maximum=True)

KERNEL = forward_plain.forward_plain_kernel.fn.__name__
_FRAMES = re.compile(r"\w+ \(\w+\.py:\d+\)(?: < \w+ \(\w+\.py:\d+\))*")
_FRAME = re.compile(r"(\w+) \((\w+\.py):(\d+)\)")


def run(
    kernel: Config, q: Tensor, k: Tensor, v: Tensor, mask: Mask,
    *, order: str = "random", seed: int = 0, log: list[Event] | None = None,
) -> Attended:  # fmt: skip
    """Return out and lse of a simulated forward kernel. ``order``, ``seed`` and ``log``: those of
    `simulator.simulated`.
    """
    with (
        config.forced(forward=kernel),
        fast.backend("gluon"),
        simulated_kernels.simulated(order, seed, log),
    ):
        return Attended(*fast.attention_forward(q, k, v, mask))


@contextmanager
def without(line: str) -> Iterator[None]:
    """Leave out all occurrences of a line in the functions of `forward_plain`. Raise ValueError if
    there is none.
    """
    changed = {}
    for name, function in vars(forward_plain).items():
        if (
            isinstance(function, GluonJITFunction)
            and function.fn.__module__ == forward_plain.__name__
        ):
            source = "".join(function.raw_src)
            shorter = re.sub(
                r"^( "
                rf"*){re.escape(line.strip())}(?=\s*(#.*)?$)",
                r"\1pass",
                source,
                flags=re.MULTILINE,
            )
            if shorter != source:
                changed[name] = copy.copy(function)
                changed[name].raw_src = [shorter]
    if not changed:
        raise ValueError(
            f"forward_plain.py has no line {line.strip()!r}: copy one from the page, whole"
        )
    with mock.patch.multiple(forward_plain, **changed):
        yield


def fault_without(line: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the simulator's message about the plain kernel without a line, "" if it finds no
    fault.

    It runs the first two tiles of keys, where no buffer is used twice, and then all tiles. Loads
    land at once."""
    for keys in (2 * PLAIN.columns, k.shape[1]):
        try:
            with without(line):
                run(PLAIN, q, k[:, :keys], v[:, :keys], Mask.full(q.shape[1], keys), order="early")
        except Fault as fault:
            return explained(fault)
    return ""


def explained(fault: Fault) -> str:
    """Return the message of a fault of the plain kernel. It shows lines of the source instead of
    their numbers.
    """

    def source(found: re.Match) -> str:
        frames = _FRAME.findall(found[0])
        name, _, number = next(
            (frame for frame in frames if frame[1] == "forward_plain.py"), frames[0]
        )
        code = statement(forward_plain.__file__, int(number)).split("  #")[0]
        return f"`{code.partition(' = ')[0] if name == KERNEL else code}`"

    text = f"{type(fault).__name__}: " + _FRAMES.sub(
        source, str(fault).replace("allocated at ", "")
    )
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent=" " * 4) for line in text.splitlines()
    )
