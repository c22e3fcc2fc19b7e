"""The programs (CTAs) of a simulated Gluon kernel, their partitions, and who may run next.

A program runs to its end before another one begins; but for atomic operations and volatile loads of global memory, at which
any may go on: who looks may wait for what another one does.
Partitions are threads of which exactly one holds the baton. It is passed on where a partition blocks, and now and then where
it starts or signals something; who gets it is drawn from a seeded generator, so a seed is an interleaving.

Besides values, *order* is simulated: each partition and each barrier has a vector clock, which arrivals carry into barriers
and waits out of them. One access to shared memory is ordered behind another exactly if barriers say so, whatever the
interleaving happened to be: `canon.testing.simulator.memory` asks for that.

Sources of vector clocks: Fidge, Timestamps in message-passing systems that preserve the partial ordering (1988); for races:
Flanagan and Freund, FastTrack: efficient and precise dynamic race detection (2009).
"""

import linecache
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

IN_VAIN = 2000  # volatile loads, before each of which others may go on

_current = threading.local()


class Fault(RuntimeError):
    """What a kernel does wrong: on a GPU it would hang, read garbage, or be undefined."""


class Deadlock(Fault):
    """Everyone waits, and nothing is under way that could end it."""


class Stopped(BaseException):
    """Ends a partition because another one has failed."""


def here() -> "Partition":
    """The partition that runs on this thread."""
    return _current.partition


class Place:
    """A line of a kernel, with the lines that called it."""

    __slots__ = ("lines",)

    def __init__(self):
        frame: FrameType | None = sys._getframe(1)
        self.lines = []
        while frame is not None:
            if "__simulated__" in frame.f_globals:
                self.lines.append((frame.f_code, frame.f_lineno))
            elif self.lines and frame.f_globals is globals():
                break  # where the partition began
            frame = frame.f_back

    def __str__(self) -> str:
        return " < ".join(f"{code.co_name} ({code.co_filename.split('/')[-1]}:{n})" for code, n in self.lines)

    def source(self) -> list[str]:
        """These lines as they are written."""
        return [linecache.getline(code.co_filename, n).strip() for code, n in self.lines]


class Event(NamedTuple):
    """What happens in a program: something starts, or is "done"; a partition computes, arrives at a barrier, has waited.

    ``kind``: "load", "store", "add", "wgmma", or "done", with what is over in ``of`` (a wgmma: when it has been waited for);
    "exp2" and its like; "arrive", "wait". ``size``: bytes of a box, operations of a wgmma, elements of a function.
    ``barrier``: its name, and the phase that is arrived at, or waited for.
    """

    kernel: str
    program: tuple[int, ...]
    partition: str
    kind: str
    place: Place
    size: int = 0
    barrier: tuple[str, int] | None = None
    of: "Event | None" = None


def join(clock: dict[int, int], other: dict[int, int]) -> None:
    """Make ``clock`` know what ``other`` knows."""
    for actor, epoch in other.items():
        if clock.get(actor, 0) < epoch:
            clock[actor] = epoch


class Partition:
    """Warps that run one function together; ``products`` and ``stores`` are what they have started and not waited for."""

    def __init__(self, program: "Program", name: str, warps: int, clock: dict[int, int]):
        self.program, self.name, self.warps = program, name, warps
        self.id = program.new_actor()
        self.clock = {**clock, self.id: 1}
        self.products: list[Any] = []
        self.stores: list[Any] = []
        self.acquired = False  # an acquire that no proxy fence follows yet
        self.unfenced: list[Any] = []  # its writes to shared memory that the async proxy need not see yet
        self.baton = threading.Lock()
        self.baton.acquire()
        self.seen: tuple[Any, Any] = (None, None)  # where it has looked for others last, and what it found
        self.looks = 0  # how often in a row
        self.condition: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.place: Place | None = None
        self.finished = False

    def ready(self) -> bool:
        """Whether it could go on."""
        return not self.finished and (self.condition is None or self.condition())

    def released(self) -> dict[int, int]:
        """Its clock, to be carried elsewhere; what it does from now on is not part of that."""
        clock = self.clock.copy()
        self.clock[self.id] += 1
        return clock

    def block(self, condition: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Return when the condition holds and it is this partition's turn."""
        self.condition, self.waits_for, self.place = condition, waits_for, Place()
        self.program.pass_baton(self)
        self.condition = None

    def look(self, place: Any, found: Any) -> None:
        """Take note of a volatile load: who finds the same in the same place again and again waits in vain."""
        self.looks = self.looks + 1 if self.seen == (place, found) else 0
        self.seen = place, found
        if self.looks and self.program.loads:  # who looks in vain is as good as blocked: loads that are late land
            self.program.land()
        if self.looks == IN_VAIN:
            raise Deadlock(f"{self.name} has found {found} {IN_VAIN} times, and nobody changes it, at {Place()}")

    def end(self) -> None:
        """Check that nothing is left running in its registers."""
        if self.products:
            raise Fault(f"{self.name} ends with {len(self.products)} wgmma not waited for: {self.products[-1]}")


class Program:
    """What the partitions of one program share, and the passing of the baton."""

    def __init__(self, indices: tuple, grid: tuple, order: str, chance: random.Random, log: list[Event] | None = None):
        self.indices, self.grid, self.order, self.chance, self.log = indices, grid, order, chance, log
        self.inertia = chance.choice((0.1, 0.5, 0.9))  # how often the baton stays where it may
        self.actors = self.shared_bytes = self.allocations = 0
        self.barriers: list[Any] = []  # mbarriers
        self.named: dict[int, Any] = {}  # the hardware's
        self.loads: list[Any] = []  # TMA loads under way
        self.late: list[tuple[Partition, Callable[[], None]]] = []  # writes to global memory that may come at the end
        self.partitions: list[Partition] = []
        self.failure: BaseException | None = None
        self.name = ""  # the kernel's
        self.thread: threading.Thread | None = None  # that its main partition runs on
        self.going, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.abandoned = self.ended = False

    def new_actor(self) -> int:
        """A number for whoever has a clock."""
        self.actors += 1
        return self.actors

    def draws(self, often: float = 0.5) -> bool:
        """Whether what may happen now does happen now."""
        return self.order == "early" or (self.order == "random" and self.chance.random() < often)

    def step(self) -> None:
        """The running partition has started or signalled something: another one may be first to go on."""
        if len(self.partitions) > 1:
            self.pass_baton(here())

    def note(self, kind: str, size: int = 0, barrier: tuple[str, int] | None = None, of: Any = None) -> Event | None:
        """Append an event to the log, if there is one."""
        if self.log is None:
            return None
        partition, place = (of.partition, of.place) if of else (here().name, Place())
        self.log.append(Event(self.name, self.indices, partition, kind, place, size, barrier, of))
        return self.log[-1]

    def land(self) -> None:
        """Let one load arrive."""
        self.loads.pop(self.chance.randrange(len(self.loads))).land()

    def pass_baton(self, me: Partition) -> None:
        """Return when it is ``me``'s turn again; at once, mostly, if it need not wait."""
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
        """Someone who can go on; loads arrive if there is nobody else."""
        while not (ready := [p for p in self.partitions if p.ready()]):
            if not self.loads:
                raise Deadlock(self.deadlock())
            self.land()
        return self.chance.choice(ready)

    def deadlock(self) -> str:
        """Who waits for what, and where."""
        waiting = [f"{p.name} waits for {p.waits_for()}, at {p.place}" for p in self.partitions if not p.finished]
        return f"deadlock in program {self.indices}:\n  " + "\n  ".join(waiting)

    def fail(self, failure: BaseException, me: Partition) -> None:
        """Keep the first failure, and end the other partitions."""
        if self.failure is None:
            self.failure = failure
            if not isinstance(failure, Deadlock):  # which names who waits
                failure.add_note(f"in {me.name} of program {self.indices}")
            for other in self.partitions:
                if other is not me and not other.finished:
                    other.baton.release()

    def go_on(self, *arguments: Any) -> None:
        """Run, until the program ends or lets others go on; ``arguments``: those of `run`."""
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
        """The running partition has touched what all programs share: another one may be first to go on."""
        self.paused.release()
        self.going.acquire()
        if self.abandoned:
            raise Fault("another program has failed")

    def abandon(self) -> None:
        """End a program that waits for its turn."""
        if self.thread is not None:
            self.abandoned = True
            self.going.release()
            self.thread.join()

    def run(self, name: str, warps: int, function: Callable[[], None]) -> None:
        """Run the kernel's function and check how the program ends."""
        self.name = name
        main = Partition(self, name, warps, {})
        self.partitions = [main]
        outer, _current.partition = getattr(_current, "partition", None), main
        try:
            function()
            main.end()
            self.end(main)
        except Exception as failure:
            self.fail(failure, main)
            raise
        finally:
            _current.partition = outer

    def end(self, main: Partition) -> None:
        """Nothing may be left under way but stores, which complete now."""
        for store in main.stores:
            store.complete()
        for _, write in self.late:
            write()
        if self.loads:
            raise Fault(f"the program ends while {len(self.loads)} TMA loads are under way, the first {self.loads[0]}")
        for barrier in self.barriers:
            if barrier.bytes:
                raise Fault(f"the program ends with bytes that never came, or that nobody expected: {barrier}")
            if main.clock.get(barrier.id, 0) < barrier.landed:
                raise Fault(f"the program ends, and nobody has waited for what a TMA load brought: {barrier}")
        for named in self.named.values():
            if named.come:
                raise Fault(f"{named.name} is out of balance: {named.present[0].name} has come to it in vain")

    def specialise(self, parts: list[tuple[str, Callable[[], Any]]], warps: list[int]) -> Any:
        """Run the first part here and the others as workers; returns the first one's result when all have ended."""
        main = here()
        if len(self.partitions) > 1:
            raise Fault("warp_specialize within warp_specialize")
        (name, function), *others = parts
        main.name, clock = f"{name} [0]", main.released()
        named = enumerate(zip(others, warps, strict=True), 1)
        workers = [Partition(self, f"{name} [{i}]", n, clock) for i, ((name, _), n) in named]
        self.partitions = [main, *workers]
        jobs = zip(workers, others, strict=True)
        threads = [threading.Thread(target=self._work, args=(w, job), daemon=True) for w, (_, job) in jobs]
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
                function()
                me.end()
                for store in me.stores:
                    store.complete()
                me.finished = True
                self.next().baton.release()
        except Stopped:
            pass
        except BaseException as failure:
            self.fail(failure, me)
        finally:
            me.finished = True


def take_turns(programs: list[Program], chance: random.Random, *arguments: Any) -> None:
    """Run all programs to their ends; ``arguments``: those of `Program.run`. Raises what the first one to fail raises."""
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
            program.abandon()
