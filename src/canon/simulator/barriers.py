"""Simulate mbarriers in shared memory, and the hardware's named barriers.

A wait joins the clocks of the arrivals of its phase alone. Source: NVIDIA, Parallel Thread
Execution ISA 8.5 (2024), the sections on mbarrier and on barrier.
"""

from canon.simulator.program import Fault, Partition, Place, Program, here, join

MAX_COUNT = (1 << 20) - 1  # arrivals, and bytes, that an mbarrier can count


class Barrier:
    """An mbarrier: a phase is complete after all arrivals and all expected bytes."""

    def __init__(self, program: "Program", name: str):
        self.program, self.name, self.id = program, name, 0
        self.count: int | None = None
        self.pending = self.bytes = self.phase = self.landed = 0
        self.clock: dict[int, int] = {}
        self.settled: dict[int, int] = {}  # the clock at the end of the last complete phase

    def __str__(self) -> str:
        text = f"{self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals missing"
        return text + (f", {self.bytes} bytes missing)" if self.bytes else ")")

    def valid(self) -> "Barrier":
        if self.count is None:
            raise Fault(f"{self.name} is used before mbarrier.init, at {Place()}")
        return self

    def init(self, count: int) -> None:
        if self.count is not None:
            raise Fault(f"{self.name} is initialised twice, at {Place()}")
        if not 1 <= count <= MAX_COUNT:
            raise Fault(f"an mbarrier counts 1 to {MAX_COUNT} arrivals, got {count}, at {Place()}")
        self.id = self.program.new_actor()
        self.count = self.pending = count
        self.bytes = self.phase = self.landed = 0

    def arrive(self, count: int, expected: int = 0) -> None:
        if not 0 <= expected <= MAX_COUNT:
            raise Fault(
                f"an mbarrier expects at most {MAX_COUNT} bytes, got {expected}, at {Place()}"
            )
        if count > self.valid().pending:
            raise Fault(f"too many arrivals: {count} more at {self}, at {Place()}")
        self.program.note("arrive", expected, (self.name, self.phase))
        join(self.clock, here().released())
        self.bytes += expected
        self.pending -= count
        self._turn()

    def receive(self, number: int) -> int:
        """Return the phase that a wait must reach to be ordered after the landed bytes."""
        self.valid()
        self.bytes -= number
        self.landed = self.phase + 1
        self._turn()
        return self.landed

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count or 0
            self.settled = self.clock.copy()

    def wait(self, parity: int) -> None:
        if parity not in (0, 1):
            raise Fault(f"a parity is 0 or 1, got {parity}, at {Place()}")
        self.valid()
        me = here()
        me.block(lambda: self.phase % 2 != parity, lambda: f"parity {parity} of {self}")
        self.program.note("wait", 0, (self.name, self.phase - 1))
        join(me.clock, self.settled)
        me.clock[self.id] = max(me.clock.get(self.id, 0), self.phase)


class NamedBarrier:
    """A numbered barrier, complete after a number of threads has arrived."""

    def __init__(self, number: int):
        self.name = f"named barrier {number}"
        self.threads = self.come = self.rounds = 0
        self.present: list[Partition] = []
        self.clock: dict[int, int] = {}
        self.settled: dict[int, int] = {}

    def arrive(self, threads: int, stay: bool) -> None:
        """``stay``: block until the round ends."""
        me = here()
        if self.come and threads != self.threads:
            raise Fault(
                f"{self.name} is used with {self.threads} and with {threads} threads, at {Place()}"
            )
        if me in self.present:
            raise Fault(f"{me.name} comes to {self.name} twice in one round, at {Place()}")
        self.threads = threads
        self.come += 32 * me.warps
        self.present.append(me)
        if self.come > threads:
            raise Fault(f"{self.come} threads have come to {self.name} for {threads}, at {Place()}")
        join(self.clock, me.released())
        before = self.rounds
        me.program.note("arrive", 0, (self.name, before))
        if self.come == threads:
            self.rounds, self.come, self.present = self.rounds + 1, 0, []
            self.settled = self.clock.copy()
        if stay:
            me.block(
                lambda: self.rounds > before,
                lambda: f"{self.name} ({self.come} of {threads} threads have come)",
            )
            me.program.note("wait", 0, (self.name, before))
            join(me.clock, self.settled)
