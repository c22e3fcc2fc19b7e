"""Simulate mbarriers in shared memory, and the hardware's named barriers: a wait joins the clocks
of the arrivals of its phase alone. Source: NVIDIA, Parallel Thread Execution ISA 8.5 (2024).
"""

from canon.simulator.program import Fault, Partition, Place, Program, here, join

THREADS = 256  # at a named barrier: two warpgroups


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
        self.id = self.program.new_actor()
        self.count = self.pending = count
        self.bytes = self.phase = self.landed = 0

    def arrive(self, count: int, expected: int = 0) -> None:
        if count > self.valid().pending:
            raise Fault(f"too many arrivals: {count} more at {self}, at {Place()}")
        self.program.note("arrive", expected, (self.name, self.phase))
        join(self.clock, here().released())
        self.bytes += expected
        self.pending -= count
        self._turn()

    def receive(self, number: int) -> int:
        """Return the phase for which a reader of the landed bytes must wait."""
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
        self.valid()
        me = here()
        me.block(lambda: self.phase % 2 != parity, lambda: f"parity {parity} of {self}")
        self.program.note("wait", 0, (self.name, self.phase - 1))
        join(me.clock, self.settled)
        me.clock[self.id] = max(me.clock.get(self.id, 0), self.phase)


class NamedBarrier:
    """A numbered barrier, complete after two warpgroups have arrived."""

    def __init__(self, number: int):
        self.name = f"named barrier {number}"
        self.rounds = 0
        self.present: list[Partition] = []
        self.clock: dict[int, int] = {}
        self.settled: dict[int, int] = {}

    @property
    def come(self) -> int:
        return sum(32 * partition.warps for partition in self.present)

    def arrive(self, stay: bool) -> None:
        """``stay``: block until the round ends."""
        me = here()
        if me in self.present:
            raise Fault(f"{me.name} comes to {self.name} twice in one round, at {Place()}")
        self.present.append(me)
        join(self.clock, me.released())
        before = self.rounds
        me.program.note("arrive", 0, (self.name, before))
        if self.come == THREADS:
            self.rounds, self.present = self.rounds + 1, []
            self.settled = self.clock.copy()
        if stay:
            me.block(
                lambda: self.rounds > before,
                lambda: f"{self.name} ({self.come} of {THREADS} threads have come)",
            )
            me.program.note("wait", 0, (self.name, before))
            join(me.clock, self.settled)
