"""The state of a process group, and the check that all its ranks make the same call.

Every call posts a digest of its arguments (`digests`), as different ones could deadlock:

    call n, forward     post digest n                       messages, kernels
    call n, backward    read all digests n, post n'         messages, kernels
    call n + 1          read all digests n', post n + 1     ...

On CPUs, and if a call is new to a rank, the rank waits for all digests before it sends. On GPUs a
known call continues at once: its digests are read at the next call, or after a second by a thread,
which aborts messages that cannot succeed.

After a failure, running ranks answer through the group's store, so errors name the missing ones. A
rank writes an exception of a pass to the store. If others do not raise the same in that call, every
rank logs it within 3 s and aborts the group, and the next call raises it.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from canon.ranks.digests import Fields, digest_of, versioned
from canon.ranks.group import (
    ENDED,
    Mesh,
    abort_group,
    digests_of,
    is_from_messages,
    own_store,
)

BUILT = "mask", "layout"  # fields that are plans of a rank
KNOWN = 65536  # the most digests that a group remembers
ANSWER_SECONDS = 5.0
POLL_SECONDS = 1.0
REPORT_SECONDS = 3 * POLL_SECONDS  # all ranks have looked twice
RAISED = (Exception, KeyboardInterrupt, SystemExit)  # a pass ends with one of these

_lock = threading.Lock()  # ranks may be threads
_states: WeakKeyDictionary[Any, "GroupState"] = WeakKeyDictionary()
_watched: WeakSet[Any] = WeakSet()
_thread: list[threading.Thread] = []
_ending = threading.Event()


@dataclass(eq=False)
class Liveness:
    """The entries of the ranks of a group in its store."""

    store: Any
    rank: int
    ranks: int

    def exchange(self, about: str, mine: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Write ``mine``. Return the entries of the ranks that write within `ANSWER_SECONDS`, None
        if the store does not answer.
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
        """Name the ranks that do not answer, or have fewer calls."""
        answers = self.exchange("failure", {"calls": calls})
        if answers is None:
            return (
                "the group's store does not answer, so the process that serves it is missing, "
                "often rank 0"
            )
        if missing := [str(rank) for rank in range(self.ranks) if rank not in answers]:
            return f"rank {', '.join(missing)} is missing: it does not answer"
        behind = {
            rank: answer["calls"] for rank, answer in answers.items() if answer["calls"] < calls
        }
        if behind:
            return "; ".join(
                f"rank {rank} is missing: it runs, but is at call {made}"
                for rank, made in behind.items()
            )
        return "all ranks still run"

    def report(self, call: int, error: str) -> None:
        """Write that this rank has raised an error."""
        with suppress(RuntimeError):
            self.store.set(f"raised/{self.rank}", json.dumps({"call": call, "error": error}))
            self.store.add("raised", 1)

    def reports(self) -> int:
        """Return the number of reports of all ranks."""
        return self.store.add("raised", 0) if self.store.check(["raised"]) else 0

    def raised_alone(self) -> str:
        """Return the last exception that not all ranks have raised, or ""."""
        with suppress(RuntimeError):
            if not self.reports():
                return ""
            raised = {
                rank: json.loads(self.store.get(key))
                for rank in range(self.ranks)
                if self.store.check([key := f"raised/{rank}"])
            }
            last = max(entry["call"] for entry in raised.values())
            errors = {
                rank: entry["error"] for rank, entry in raised.items() if entry["call"] == last
            }
            if len(errors) < self.ranks or len(set(errors.values())) > 1:
                rank, error = next(iter(errors.items()))
                return f"call {last}: rank {rank} raised {error}"
        return ""

    def first(self, alone: str) -> str:
        """Return the first rank's ``alone``: all raise the same text."""
        with suppress(RuntimeError):
            return self.store.compare_set("raised/first", "", alone).decode()
        return alone

    def answer(self, calls: int) -> None:
        """Write the number of this rank's calls if another has reported a failure."""
        if self.store.check(["failure"]):
            self._write("failure", {"calls": calls})

    def _write(self, about: str, mine: dict[str, Any]) -> None:
        self.store.set(f"{about}/{self.rank}", json.dumps(mine))
        self.store.set(f"{about}", "1")


@dataclass(eq=False)
class PendingCall:
    """A call whose digest is posted and not compared yet."""

    name: str
    number: int
    digest: int
    fields: Fields
    started: float = field(default_factory=time.monotonic)


class GroupState:
    """The calls of this rank in one process group."""

    def __init__(self, group: Any):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.transports: dict[torch.device, Any] = {}  # of `canon.fast.transport.messages`
        self.aborted: list[Any] = []  # other groups, aborted with this one
        self.meshes: set[Mesh] = set()  # of these ranks: their rows and columns, likewise
        self._group = ref(group)  # weak: the group may end before the state
        store = own_store(dist.distributed_c10d._get_process_group_store(group), self.ranks)
        self.liveness = Liveness(store, self.rank, self.ranks)
        self.digests = digests_of(group, store, self.rank, self.ranks)
        self.calls = 0
        self.known: set[int] = set()  # digests on which all ranks agreed
        self.pending: PendingCall | None = None
        self.broken: Exception | None = None  # the error that made the group unusable
        self.raised = False  # an exception of this rank is not compared yet
        self.reports = 0  # of exceptions that all ranks raised
        self.doubtful = False  # whether there are others
        self.lock = threading.RLock()
        watch(self)

    def agree(self, name: str, fields: Fields, wait: bool, digest: int | None = None) -> None:
        """Compare a call with the other ranks' calls, now if ``wait`` or if it is new.

        Raises ValueError if the ranks differ, in this call or the previous one; RuntimeError if a
        rank is missing, or the group is broken.
        """
        digest = digest_of(fields) if digest is None else digest
        with self.lock:
            self.settle()
            if self.raised:
                self._compare_exceptions()
            self.calls += 1
            try:
                self.digests.post(self.calls, digest)
            except RAISED as error:
                self._fail(name, error)
            self.pending = PendingCall(name, self.calls, digest, fields)
            if wait or digest not in self.known:
                self.settle(before_messages=True)

    def settle(self, before_messages: bool = False, digests: list[int] | None = None) -> None:
        """Compare the digests of the pending call. Before its messages, the group stays usable."""
        with self.lock:
            if self.broken:
                raise type(self.broken)(*self.broken.args)
            call, self.pending = self.pending, None
            if call is None:
                return
            try:
                found = self.digests.wait() if digests is None else digests
            except RAISED as error:
                self._fail(call.name, error)
            if all(digest == call.digest for digest in found):
                if len(self.known) >= KNOWN:
                    self.known.clear()
                self.known.add(call.digest)
                return
            if alone := self.liveness.raised_alone():
                raise self._lose(alone)
            problem = ValueError(self._difference(call))
            if not before_messages:
                self.broken = ValueError(
                    f"{problem}\nMessages of that call were in flight: make a new process group."
                )
            raise self.broken or problem

    def _difference(self, call: PendingCall) -> str:
        fields = {
            name: value if isinstance(value, str) else repr(value)
            for name, value in versioned(call.fields)
        }
        by_rank = self.liveness.exchange(f"call {call.number}", fields) or {self.rank: fields}
        # a rank has refused its arguments
        if any(theirs.get("arguments") for theirs in by_rank.values()):
            by_rank = {
                rank: {"arguments": theirs.get("arguments", "")} for rank, theirs in by_rank.items()
            }
        lines = ["the ranks disagree:"]
        for name in dict.fromkeys(name for theirs in by_rank.values() for name in theirs):
            holders: dict[str, list[int]] = {}
            for rank, theirs in by_rank.items():
                holders.setdefault(theirs.get(name, ""), []).append(rank)
            if len(holders) > 1:
                values = (
                    f"rank {', '.join(map(str, ranks))}: {text or 'fine'}"
                    for text, ranks in holders.items()
                )
                remedy = ": build it from the same arguments on every rank" * (name in BUILT)
                lines.append(f"  {name}: {'; '.join(values)}{remedy}")
        if missing := [str(rank) for rank in range(self.ranks) if rank not in by_rank]:
            lines.append(f"  rank {', '.join(missing)} did not write its arguments")
        return "\n".join(lines)

    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """Report an exception inside to the other ranks. Errors of messages name missing ranks."""
        try:
            yield
        except RAISED as error:
            self._fail(name, error)

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        if self.broken and isinstance(error, Exception):
            raise type(self.broken)(*self.broken.args) from error
        cause = (str(error).splitlines() or [""])[0][:200]
        if not is_from_messages(error):
            self.raised = True
            self.liveness.report(
                self.calls, f"{type(error).__name__} in {name}" + (f": {cause}" if cause else "")
            )
            raise error
        if alone := self.liveness.raised_alone():
            raise self._lose(alone) from error
        missing = self.liveness.missing(self.calls)
        self.broken = RuntimeError(
            f"{name}, call {self.calls} of rank {self.rank}: {missing}. The messages of the call "
            f"failed ({cause}), so make a new process group."
        )
        raise self.broken from error

    def look(self) -> None:
        """Answer a liveness check. Abort the messages of a call that cannot succeed."""
        if self.broken is None:
            self.liveness.answer(self.calls)
            self._look_for_exceptions()
        call = self.pending
        if self.broken or call is None or time.monotonic() - call.started < POLL_SECONDS:
            return
        if not self.lock.acquire(blocking=False):
            return  # the rank reads the digests now
        try:
            if self.pending is call:
                self._read_late(call)
        except (ValueError, RuntimeError) as error:
            self._abort(error)
        finally:
            self.lock.release()

    def _look_for_exceptions(self) -> None:
        """Abort the group if a rank has raised, and others have not until the next look."""
        if (reports := self.liveness.reports()) == self.reports:
            return
        if not (alone := self.liveness.raised_alone()):
            self.reports, self.doubtful = reports, False
        elif self.doubtful:
            self._abort(self._lose(alone))
        else:
            self.doubtful = True

    def _compare_exceptions(self) -> None:
        """Wait until all ranks have raised this exception, or it has broken the group."""
        while not self.broken and self.liveness.raised_alone():
            time.sleep(0.01)
        self.raised = False
        self.settle()

    def _lose(self, alone: str) -> Exception:
        """Make the group unusable. Return the error of later calls."""
        lost = (
            "The other ranks have not raised it, so their messages are lost: make a new "
            "process group."
        )
        self.broken = RuntimeError(f"{self.liveness.first(alone)}. {lost}")
        return self.broken

    def _abort(self, error: Exception) -> None:
        logging.getLogger(__name__).error("%s", error)
        self.digests.abort()
        for group in self._groups():
            with suppress(Exception):
                abort_group(group)

    def _groups(self) -> Iterator[Any]:
        yield from (self._group(), *self.aborted)
        for mesh in self.meshes:
            for group in mesh.parts():
                with _lock:
                    state = _states.get(group)
                yield from (group, *(() if state is None else state.aborted))

    def _read_late(self, call: PendingCall) -> None:
        try:
            if (digests := self.digests.read()) is None:
                self.digests.check_processes()
                return
        except RuntimeError as error:
            self.pending = None
            self.broken = RuntimeError(
                f"{call.name}, call {call.number} of rank {self.rank}: {error}. The messages of "
                "the call were in flight, so make a new process group."
            )
            raise self.broken from error
        self.settle(digests=digests)


def group_state(group: Any) -> GroupState:
    """Return the state of a group; None is all ranks. A collective at first."""
    world = dist.distributed_c10d._world
    group = world.default_pg if group is None else group
    if group is None or group not in world.pg_map:
        raise RuntimeError(ENDED)
    with _lock:
        state = _states.get(group)
    if state is None:  # only this rank's thread uses its group
        state = GroupState(group)
        with _lock:
            _states[group] = state
    return state


@contextmanager
def refused_together(name: str, group: Any, ranks: int) -> Iterator[None]:
    """Check the arguments of a collective inside: an error on one rank, or a warning that is one,
    raises on every rank, in its next `GroupState.agree`.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError, Warning) as error:
        if ranks > 1:
            fields = ("function", name), ("arguments", str(error))
            try:
                group_state(group).agree(name, fields, wait=True)
            except ValueError as disagreement:  # it has the text of the error
                raise disagreement from None
        raise


def report(name: str, mesh: Any, error: ValueError) -> NoReturn:
    """Raise an error about a mesh, and report it to the ranks of the mesh if they have made calls
    of one group: they may wait there for this rank.
    """
    if isinstance(mesh, dist.DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
        for group in list(dist.distributed_c10d._world.pg_map):
            state = _states.get(group)
            if state is not None and dist.get_process_group_ranks(group) == ranks:
                state.calls += 1
                state._fail(name, error)
    raise error


def agree(name: str, group: Any, ranks: int, x: torch.Tensor, *fields: tuple[str, Any]) -> None:
    """Compare a call between ranks: its name, the dtype of x, and ``fields``."""
    if ranks > 1:
        fields = (("function", name), ("dtype", x.dtype), *fields)
        group_state(group).agree(name, fields, wait=x.device.type == "cpu")


def named_failures(name: str, group: Any, ranks: int) -> AbstractContextManager[None]:
    """Return `GroupState.failures` of a group. A single rank needs none."""
    return group_state(group).failures(name) if ranks > 1 else nullcontext()


def watch(group_state: Any) -> None:
    """Call ``group_state.look()`` once a second, as long as the object lives."""
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
    """Wait until the thread has left the store: Python may end it inside C++ code, which aborts the
    process. After an exception, give the others time to read it: this process may serve the store.
    """
    if any(state.raised and not state.broken for state in list(_watched)):
        time.sleep(REPORT_SECONDS)
    _ending.set()
    for thread in _thread:
        thread.join(ANSWER_SECONDS)
