"""Record the order in which a schedule posts messages, waits for them and computes.

    with recording(reference.strided) as log:
        process_groups.threads(program, ranks=4)
    log.of(rank=1)      [posted gather 0, waited gather 0, posted gather 1, computed forward 0, ...]

Messages are recorded at torch.distributed and at `BlockRing.hop`, computations at the names of
`KINDS`. A `StepBackward` is "computed" at `dkdv`, and "finished" at `dq`. Threads as ranks share a
recording."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from canon.fast.tables.cells import Cells
from canon.masks.mask import Mask

GATHERS = ("all_gather", "all_gather_single", "all_gather_into_tensor")
KINDS = {
    "tiled_forward": "forward",
    "tiled_backward": "backward",
    "attention_forward": "forward",
    "forward_into": "forward",
    "launch_forward": "forward",
    "forward_part": "forward",
    "attention_backward": "backward",
}


@dataclass(frozen=True)
class Event:
    """The ``number``-th message ("gather", "reduce", "hop") or computation ("forward", "backward")
    of a kind.

    ``items`` and ``nbytes`` count what a rank receives; of a computation, cells times query heads.
    """

    rank: int
    what: str  # "posted", "waited", "computed" or "finished"
    kind: str
    number: int
    items: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.what} {self.kind} {self.number}"


class Log:
    """The events of all ranks. ``spans``: (event, start, stop) in seconds, until a message has been
    waited for.
    """

    def __init__(self):
        self.events: list[Event] = []
        self.spans: list[tuple[Event, float, float]] = []
        self._counts: Counter = Counter()
        self._lock = threading.Lock()

    def of(self, rank: int, *kinds: str) -> list[Event]:
        return [e for e in self.events if e.rank == rank and (not kinds or e.kind in kinds)]

    def add(
        self, what: str, kind: str, number: int | None = None, items: int = 0, nbytes: int = 0
    ) -> Event:
        rank = dist.get_rank() if dist.is_initialized() else 0
        with self._lock:
            if number is None:
                number = self._counts[rank, what, kind]
                self._counts[rank, what, kind] += 1
            event = Event(rank, what, kind, number, items, nbytes)
            self.events.append(event)
        return event

    @contextmanager
    def timed(self, event: Event) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append((event, start, time.perf_counter()))


class _Noted:
    def __init__(self, requests: Sequence[Any], log: Log, event: Event):
        self.requests, self.log, self.event = requests, log, event
        self.start = time.perf_counter()

    def wait(self, *arguments: Any) -> None:
        for request in self.requests:
            request.wait(*arguments)
        if self.event is not None:
            self.log.add("waited", self.event.kind, self.event.number)
            self.log.spans.append((self.event, self.start, time.perf_counter()))
            self.event = None


@contextmanager
def recording(*modules: ModuleType) -> Iterator[Log]:
    """Record the computations of ``modules``, and all messages that do not block."""
    log, schedule = Log(), sys.modules.get("canon.fast.schedule")
    with ExitStack() as patches:

        def patched(owner: Any, name: str, wrapped: Callable, *arguments: Any) -> None:
            patches.enter_context(
                mock.patch.object(owner, name, wrapped(log, *arguments, getattr(owner, name)))
            )

        for name in GATHERS:
            if hasattr(dist, name):
                patched(dist, name, _gather)
        patched(dist, "all_to_all_single", _all_to_all)
        patched(dist, "batch_isend_irecv", _hop)
        if messages := sys.modules.get(
            "canon.fast.transport.messages"
        ):  # not imported here: the reference needs no Triton
            patched(messages.BlockRing, "hop", _ring_hop)
        for module in (*modules, schedule) if schedule else modules:
            for name in KINDS.keys() & vars(module).keys():
                patched(module, name, _computed, KINDS[name])
        for name, what in (("dkdv", "computed"), ("dq", "finished")) if schedule else ():
            patched(schedule.StepBackward, name, _partial, what)
        yield log


def _gather(log: Log, gather: Callable) -> Callable:
    def noted(output, own, group=None, async_op=False):
        if not async_op:
            return gather(output, own, group=group)
        everything = (
            output.numel() if isinstance(output, Tensor) else sum(x.numel() for x in output)
        )
        items = everything - own.numel()
        event = log.add("posted", "gather", items=items, nbytes=items * own.element_size())
        return _Noted([gather(output, own, group=group, async_op=True)], log, event)

    return noted


def _all_to_all(log: Log, exchange: Callable) -> Callable:
    def noted(
        received, sent, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        arguments = received, sent, output_split_sizes, input_split_sizes
        if not async_op:
            return exchange(*arguments, group=group)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        rows = output_split_sizes or [len(received) // ranks] * ranks
        own = sum(x.numel() for x in received.split(rows)[rank : rank + 1])
        items = received.numel() - own
        event = log.add("posted", "reduce", items=items, nbytes=items * received.element_size())
        return _Noted([exchange(*arguments, group=group, async_op=True)], log, event)

    return noted


def _hop(log: Log, batch: Callable) -> Callable:
    def noted(operations):
        incoming = [operation.tensor for operation in operations if operation.op is dist.irecv]
        sizes = (
            sum(x.numel() for x in incoming),
            sum(x.numel() * x.element_size() for x in incoming),
        )
        return [_Noted(batch(operations), log, log.add("posted", "hop", None, *sizes))]

    return noted


def _computed(log: Log, kind: str, function: Callable) -> Callable:
    def noted(*arguments, **options):
        # a Mask, or the cells of one
        masks = (getattr(x, "mask", x) for x in (*arguments, *options.values()))
        first, mask = arguments[0], next(x for x in masks if isinstance(x, Mask))
        area = Cells(mask, options.get("places")).area
        # or dout, which has the same heads
        queries = first if isinstance(first, Tensor) else first.q
        with log.timed(log.add("computed", kind, items=area * queries.shape[-2])):
            return function(*arguments, **options)

    return noted


def _partial(log: Log, what: str, method: Callable) -> Callable:
    def noted(part, dout, q, *arguments):
        start = time.perf_counter()
        if what == "computed":
            event = log.add(
                what, "backward", items=part.active.mask.area * q[:, :, part.step.heads].shape[2]
            )
        method(part, dout, q, *arguments)
        if what == "finished":
            event = log.add(what, "backward")
        log.spans.append((event, start, time.perf_counter()))

    return noted


def _ring_hop(log: Log, hop: Callable) -> Callable:
    def noted(ring, buffer, sent, received):
        flight, items = hop(ring, buffer, sent, received), ring.blocks.elements[received]
        if flight.works:
            event = log.add("posted", "hop", None, items, items * flight.received[0].element_size())
            flight.works = [_Noted(flight.works, log, event)]
        return flight

    return noted
