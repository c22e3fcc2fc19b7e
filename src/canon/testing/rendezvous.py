"""Where the ranks of a world of threads meet: who runs, who waits for what, and when nobody can go on any more."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Ended(BaseException):
    """Ends a rank that waits for what will never come; not an Exception, so that no program swallows it."""


class Rendezvous:
    """What the ranks of one world share: who is running, who waits for what, calls under way, letters sent."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.changed = threading.Condition()
        self.running = set(range(ranks))
        self.waiting: dict[int, tuple[Callable[[], bool], Callable[[], str]]] = {}
        self.ended: str | None = None
        self.calls: dict[tuple, Any] = {}
        self.letters: dict[tuple, tuple[Tensor, Any]] = {}

    def wait(self, rank: int, ready: Callable[[], bool], told: Callable[[], str]) -> None:
        """Return when ``ready()``; raise Ended when another rank has failed, or when no rank can go on."""
        with self.changed:
            self.waiting[rank] = (ready, told)
            try:
                while not ready():
                    self._end_if_stuck()
                    if self.ended is not None:
                        raise Ended(self.ended)
                    self.changed.wait()
            finally:
                del self.waiting[rank]

    def leave(self, rank: int, failure: str | None = None) -> None:
        """``rank`` has returned, or failed: then whoever waits is ended."""
        with self.changed:
            self.running.discard(rank)
            self.ended = self.ended or failure
            self._end_if_stuck()
            self.changed.notify_all()

    def _end_if_stuck(self) -> None:
        if self.ended or not self.waiting or self.waiting.keys() < self.running:
            return
        if not any(ready() for ready, _ in self.waiting.values()):
            told = [f"rank {rank} waits in {told()}" for rank, (_, told) in sorted(self.waiting.items())]
            told += [f"rank {rank} has returned" for rank in range(self.ranks) if rank not in self.running]
            self.ended = f"no rank can go on: {'; '.join(told)}"
            self.changed.notify_all()


def failed(rank: int, error: BaseException, told: str = "") -> RuntimeError:
    """The error of a world, naming the rank whose error it was."""
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}" + (f"\n{told}" if told else ""))


def tell(said: list[str]) -> None:
    """Print what each rank printed, in rank order."""
    for rank, text in enumerate(said):
        for line in text.splitlines():
            print(f"rank {rank} │ {line}")
