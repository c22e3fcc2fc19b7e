"""Let threads as ranks wait for each other, and detect when no rank can continue."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Ended(BaseException):
    """Ends a rank that waits in vain; ``except Exception`` does not catch it."""


class Rendezvous:
    """Ranks that run or wait, and collectives and messages in flight."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.changed = threading.Condition()
        self.running = set(range(ranks))
        self.waiting: dict[int, tuple[Callable[[], bool], Callable[[], str]]] = {}
        self.ended: str | None = None
        self.interrupted = False  # by the caller: then no rank continues
        self.calls: dict[tuple, Any] = {}
        self.messages: dict[tuple, tuple[Tensor, Any]] = {}

    def wait(self, rank: int, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Raises Ended if a rank has failed, or none can continue."""
        with self.changed:
            if self.interrupted:
                raise Ended(self.ended)
            if ready():
                return
            self.waiting[rank] = (ready, describe)
            try:
                while not ready():
                    self._end_if_stuck()
                    if self.ended is not None:
                        raise Ended(self.ended)
                    self.changed.wait()
            finally:
                del self.waiting[rank]

    def leave(self, rank: int, failure: str | None = None) -> None:
        with self.changed:
            self.running.discard(rank)
            self.interrupted |= rank == self.ranks
            self.ended = self.ended or failure
            self._end_if_stuck()
            self.changed.notify_all()

    def _end_if_stuck(self) -> None:
        if self.ended or not self.waiting or self.waiting.keys() < self.running:
            return
        if not any(ready() for ready, _ in self.waiting.values()):
            states = [
                f"rank {rank} waits in {describe()}"
                for rank, (_, describe) in sorted(self.waiting.items())
            ]
            states += [
                f"rank {rank} has returned"
                for rank in range(self.ranks)
                if rank not in self.running
            ]
            self.ended = f"no rank can continue: {'; '.join(states)}"
            self.changed.notify_all()


def rank_error(rank: int, error: BaseException, details: str = "") -> RuntimeError:
    """Return an error that names the rank."""
    return RuntimeError(
        f"rank {rank}: {type(error).__name__}: {error}" + (f"\n{details}" if details else "")
    )


def print_by_rank(outputs: list[str]) -> None:
    """Print the output of all ranks in order."""
    for rank, text in enumerate(outputs):
        for line in text.splitlines():
            print(f"rank {rank} │ {line}")
