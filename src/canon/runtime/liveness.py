"""A check of the ranks of a group after messages have failed: the running ranks answer through the group's store.

A thread of each process checks the groups of its rank once a second. If a rank has reported a failure in the store, the
thread answers for its own rank, even while the rank waits for a message. A rank that has died or stopped does not answer.
"""

import atexit
import json
import threading
import time
from contextlib import suppress
from typing import Any
from weakref import WeakSet

ANSWER_SECONDS = 5.0  # the time for a rank to answer
POLL_SECONDS = 1.0

_watched: WeakSet[Any] = WeakSet()
_thread: list[threading.Thread] = []
_lock = threading.Lock()
_ending = threading.Event()


class Liveness:
    """The entries of the ranks of a group in its store."""

    def __init__(self, store: Any, rank: int, ranks: int):
        self.store, self.rank, self.ranks = store, rank, ranks

    def exchange(self, about: str, mine: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Write ``mine`` under the name ``about``. Return the entries of that name by rank, of ranks that write in time.

        Returns None if the store does not answer, for example because its process has ended.
        """
        written = {self.rank: mine}
        try:
            self._write(about, mine)
            limit = time.monotonic() + ANSWER_SECONDS
            while len(written) < self.ranks and time.monotonic() < limit:
                for rank in set(range(self.ranks)) - written.keys():
                    if self.store.check([key := f"{about}/{rank}"]):
                        written[rank] = json.loads(self.store.get(key))
                time.sleep(0.01)
        except RuntimeError:
            return None
        return dict(sorted(written.items()))

    def missing(self, calls: int) -> str:
        """Return a text that names the ranks that do not answer, or else those with fewer calls than this rank."""
        answers = self.exchange("failure", {"calls": calls})
        if answers is None:
            return "the group's store does not answer, so the process that serves it is missing, often rank 0"
        if missing := [str(rank) for rank in range(self.ranks) if rank not in answers]:
            return f"rank {', '.join(missing)} is missing: it does not answer"
        behind = {rank: answer["calls"] for rank, answer in answers.items() if answer["calls"] < calls}
        if behind:
            return "; ".join(f"rank {rank} is missing: it runs, but is at call {made}" for rank, made in behind.items())
        return "all ranks still run"

    def answer(self, calls: int) -> None:
        """Write the number of calls of this rank if another rank has reported a failure."""
        if self.store.check(["failure"]):
            self._write("failure", {"calls": calls})

    def _write(self, about: str, mine: dict[str, Any]) -> None:
        self.store.set(f"{about}/{self.rank}", json.dumps(mine))
        self.store.set(f"{about}", "1")


def watch(group_state: Any) -> None:
    """Call ``group_state.look()`` once a second in a thread, as long as the object lives."""
    with _lock:
        _watched.add(group_state)
        if not _thread or not _thread[0].is_alive():
            _thread[:] = [threading.Thread(target=_look, name="canon-liveness", daemon=True)]
            _thread[0].start()


def _look() -> None:
    while not _ending.wait(POLL_SECONDS):
        with _lock:
            states = list(_watched)
        for state in states:
            if _ending.is_set():
                return
            with suppress(Exception):  # a group may end meanwhile
                state.look()
        states = state = None  # hold no reference while the thread sleeps


@atexit.register
def _end() -> None:
    """Wait until the thread has left the store. Python ends daemon threads, and inside C++ code that aborts the process."""
    _ending.set()
    for thread in _thread:
        thread.join(ANSWER_SECONDS)
