"""Run the programs (CTAs) of a simulated Gluon kernel and their partitions.

Partitions are threads, and one of them holds the baton. It passes it on when it blocks, and
sometimes after it starts or signals something. Arrivals join vector clocks into barriers, and waits
join them into partitions.

Sources: Fidge, Timestamps in message-passing systems that preserve the partial ordering (1988);
Flanagan and Freund, FastTrack: efficient and precise dynamic race detection (2009)."""

import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

IN_VAIN = 2000  # loads with acquire of an unchanged value before a deadlock is reported

_current = threading.local()


class Fault(RuntimeError):
    """An error of a kernel: on a GPU it may hang, or read garbage."""


class Deadlock(Fault):
    """All partitions wait, and nothing in flight can release one."""


class Stopped(BaseException):
    """End a partition because another one has failed."""


def here() -> "Partition":
    """Return the partition of this thread."""
    return _current.partition


class Place:
    """A line of a kernel, and its callers."""

    def __init__(self):
        frame: FrameType | None = sys._getframe(1)
        self.lines = []
        while frame is not None:
            if "__simulated__" in frame.f_globals:
                self.lines.append((frame.f_code, frame.f_lineno))
            elif self.lines and frame.f_globals is globals():
                break  # the partition started here
            frame = frame.f_back

    def __str__(self) -> str:
        return " < ".join(
            f"{code.co_name} ({code.co_filename.split('/')[-1]}:{n})" for code, n in self.lines
        )


class Event(NamedTuple):
    """What a partition does: it starts or ends an operation, computes, arrives or has waited."""

    kernel: str
    program: tuple[int, ...]
    partition: str
    # "load", "add" or "wgmma" for a start, "done" for its end (of a wgmma, the wait)
    kind: str
    place: Place
    size: int = 0  # bytes of boxes, FLOPs of a wgmma, elements of functions
    barrier: tuple[str, int] | None = None  # name, phase
    of: "Event | None" = None  # the start of what is done


def join(clock: dict[int, int], other: dict[int, int]) -> None:
    """Update ``clock`` to the elementwise maximum."""
    for actor, epoch in other.items():
        if clock.get(actor, 0) < epoch:
            clock[actor] = epoch


class Partition:
    """Warps that run one function. ``products`` and ``adds`` have started, without a wait."""

    def __init__(self, program: "Program", name: str, warps: int, clock: dict[int, int]):
        self.program, self.name, self.warps = program, name, warps
        self.id = program.new_actor()
        self.clock = {**clock, self.id: 1}
        self.products: list[Any] = []
        self.adds: list[Any] = []
        self.acquired = False  # by an acquire, until a proxy fence
        # writes without a later fence for the async proxy
        self.unfenced: list[Any] = []
        self.baton = threading.Lock()
        self.baton.acquire()
        self.seen: tuple[Any, Any] = (None, None)  # address and value of the last load with acquire
        self.looks = 0  # consecutive ones with this result
        self.condition: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.place: Place | None = None
        self.finished = False

    def ready(self) -> bool:
        return not self.finished and (self.condition is None or self.condition())

    def released(self) -> dict[int, int]:
        clock = self.clock.copy()
        self.clock[self.id] += 1
        return clock

    def block(self, condition: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        self.condition, self.waits_for, self.place = condition, waits_for, Place()
        self.program.pass_baton(self)
        self.condition = None

    def look(self, place: Any, found: Any) -> None:
        """Raise Deadlock after `IN_VAIN` equal results."""
        self.looks = self.looks + 1 if self.seen == (place, found) else 0
        self.seen = place, found
        # a polling partition counts as blocked, so late TMA loads land
        if self.looks and self.program.loads:
            self.program.land()
        if self.looks == IN_VAIN:
            raise Deadlock(
                f"{self.name} has found {found} {IN_VAIN} times, and nobody changes "
                f"it, at {Place()}"
            )

    def end(self) -> None:
        if self.products:
            raise Fault(
                f"{self.name} ends with {len(self.products)} wgmma not waited for: "
                f"{self.products[-1]}"
            )


class Program:
    """The state of the partitions of one program, and the baton."""

    def __init__(
        self,
        indices: tuple,
        grid: tuple,
        order: str,
        chance: random.Random,
        log: list[Event] | None = None,
    ):
        self.indices, self.grid = indices, grid
        self.order, self.chance, self.log = order, chance, log
        # by the launching thread; partitions are other threads
        self.inference = torch.is_inference_mode_enabled()
        # probability that a ready partition keeps the baton
        self.inertia = chance.choice((0.1, 0.5, 0.9))
        self.actors = self.shared_bytes = self.allocations = 0
        self.barriers: list[Any] = []  # mbarriers
        self.named: dict[int, Any] = {}  # named hardware barriers
        self.loads: list[Any] = []  # TMA loads in flight
        # writes to global memory, delayed until the end
        self.late: list[tuple[Partition, Callable[[], None]]] = []
        self.partitions: list[Partition] = []
        self.failure: BaseException | None = None
        self.name = ""  # of the kernel
        self.thread: threading.Thread | None = None  # runs the main partition
        self.going, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.abandoned = self.ended = False

    def new_actor(self) -> int:
        self.actors += 1
        return self.actors

    def draws(self, often: float = 0.5) -> bool:
        return self.order == "early" or (self.order == "random" and self.chance.random() < often)

    def step(self) -> None:
        if len(self.partitions) > 1:
            self.pass_baton(here())

    def note(
        self, kind: str, size: int = 0, barrier: tuple[str, int] | None = None, of: Any = None
    ) -> Event | None:
        if self.log is None:
            return None
        partition, place = (of.partition, of.place) if of else (here().name, Place())
        self.log.append(Event(self.name, self.indices, partition, kind, place, size, barrier, of))
        return self.log[-1]

    def land(self) -> None:
        self.loads.pop(self.chance.randrange(len(self.loads))).land()

    def pass_baton(self, me: Partition) -> None:
        if self.order == "random" and self.loads and self.draws(0.25):
            self.land()
        if me.ready() and self.chance.random() < self.inertia:
            return
        chosen = self.next()
        if chosen is not me:
            chosen.baton.release()
            me.baton.acquire()
            if self.failure:
                raise Stopped

    def next(self) -> Partition:
        """Return a partition that can continue, after TMA loads if need be. Raises Deadlock."""
        while not (ready := [p for p in self.partitions if p.ready()]):
            if not self.loads:
                raise Deadlock(self.deadlock())
            self.land()
        return self.chance.choice(ready)

    def deadlock(self) -> str:
        waiting = [
            f"{p.name} waits for {p.waits_for()}, at {p.place}"
            for p in self.partitions
            if not p.finished
        ]
        return f"deadlock in program {self.indices}:\n  " + "\n  ".join(waiting)

    def fail(self, failure: BaseException, me: Partition) -> None:
        if self.failure is None:
            self.failure = failure
            if not isinstance(failure, Deadlock):  # its message names the partitions
                failure.add_note(f"in {me.name} of program {self.indices}")
            for other in self.partitions:
                if other is not me and not other.finished:
                    other.baton.release()

    def go_on(self, *arguments: Any) -> None:
        """Run until the program ends or offers a switch."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._begin, args=arguments, daemon=True)
            self.thread.start()
        else:
            self.going.release()
        self.paused.acquire()

    def _begin(self, *arguments: Any) -> None:
        try:
            self.run(*arguments)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.ended = True
            self.paused.release()

    def let_others(self) -> None:
        self.paused.release()
        self.going.acquire()
        if self.abandoned:
            raise Fault("another program has failed")

    def run(self, name: str, warps: int, function: Callable[[], None]) -> None:
        self.name = name
        main = Partition(self, name, warps, {})
        self.partitions = [main]
        outer, _current.partition = getattr(_current, "partition", None), main
        try:
            with torch.inference_mode(self.inference):
                function()
                main.end()
                self.end(main)
        except Exception as failure:
            self.fail(failure, main)
            raise
        finally:
            _current.partition = outer

    def end(self, main: Partition) -> None:
        """Raise Fault if anything but adds is in flight or unbalanced."""
        for add in main.adds:
            add.complete()
        for _, write in self.late:
            write()
        while self.loads:
            self.land()
        for barrier in self.barriers:
            if barrier.bytes:
                raise Fault(
                    "the program ends with bytes that never came, or that nobody "
                    f"expected: {barrier}"
                )
            if main.clock.get(barrier.id, 0) < barrier.landed:
                raise Fault(
                    "the program ends, and nobody has waited for what a TMA load "
                    f"brought: {barrier}"
                )
        for named in self.named.values():
            if named.come:
                raise Fault(
                    f"{named.name} is out of balance: {named.present[0].name} has come to "
                    "it in vain"
                )

    def specialise(self, parts: list[tuple[str, Callable[[], Any]]], warps: list[int]) -> Any:
        main = here()
        if len(self.partitions) > 1:
            raise Fault("warp_specialize within warp_specialize")
        (name, function), *others = parts
        main.name, clock = f"{name} [0]", main.released()
        named = enumerate(zip(others, warps, strict=True), 1)
        workers = [Partition(self, f"{name} [{i}]", n, clock) for i, ((name, _), n) in named]
        self.partitions = [main, *workers]
        jobs = zip(workers, others, strict=True)
        threads = [
            threading.Thread(target=self._work, args=(w, job), daemon=True) for w, (_, job) in jobs
        ]
        for thread in threads:
            thread.start()
        try:
            self.pass_baton(main)
            result = function()
            main.end()
            main.block(lambda: all(w.finished for w in workers), lambda: "the workers")
        except Stopped:
            raise self.failure or RuntimeError("stopped") from None
        except BaseException as failure:
            self.fail(failure, main)
            raise
        finally:
            for thread in threads:
                thread.join()
        self.partitions = [main]
        for worker in workers:
            join(main.clock, worker.clock)
        return result

    def _work(self, me: Partition, function: Callable[[], Any]) -> None:
        _current.partition = me
        me.baton.acquire()
        try:
            if not self.failure:
                with torch.inference_mode(self.inference):
                    function()
                    me.end()
                    for add in me.adds:
                        add.complete()
                me.finished = True
                self.next().baton.release()
        except Stopped:
            pass
        except BaseException as failure:
            self.fail(failure, me)
        finally:
            me.finished = True


def take_turns(programs: list[Program], chance: random.Random, *arguments: Any) -> None:
    """Run all programs. Raise the first failure."""
    left = list(programs)
    try:
        while left:
            program = chance.choice(left)
            program.go_on(*arguments)
            if program.ended:
                left.remove(program)
            if program.failure:
                raise program.failure
    finally:
        for program in left:
            if program.thread is not None:
                program.abandoned = True
                program.going.release()
                program.thread.join()
