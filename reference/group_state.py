"""The state of a process group, and the check that all its ranks make the same call.

Ranks that pass different masks, shapes or options would wait for each other for ever, or compute wrong numbers without an
error. So every call posts a digest of its arguments, 8 bytes a rank (`digests`), apart from its messages:

    call n, forward     post digest n                       messages, kernels
    call n, backward    read all digests n, post n'         messages, kernels
    call n + 1          read all digests n', post n + 1     ...

On CPUs, and where a call is new to a rank, the rank waits for all digests before it sends anything. On GPUs
a known call goes on at once, and the digests are read at the next call. A thread looks at digests that were not read
within a second: if the ranks differ, it ends the messages in flight, so no rank hangs. A replayed CUDA graph makes no
call, so it checks nothing.

If a rank has died or stopped, the other ranks name it in their errors: each rank that still runs answers through the
group's store (`liveness`). Later calls of the group raise the same error.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from canon.reference.digests import GatheredDigests, SharedDigests, shared_memory
from canon.reference.liveness import POLL_SECONDS, Liveness, watch

Fields = tuple[tuple[str, Any], ...]
KNOWN = 65536  # digests that are remembered at most

_states: WeakKeyDictionary[Any, "GroupState"] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


class Verdict:
    """A call whose digest is on its way to all ranks."""

    def __init__(self, name: str, number: int, digest: int, fields: Fields, post: Any):
        self.name, self.number, self.digest, self.fields, self.post = name, number, digest, fields, post
        self.begun = time.monotonic()


class GroupState:
    """The rank, the ranks, and the calls of one process group, as this rank has made them."""

    def __init__(self, group: Any):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.transports: dict[torch.device, Any] = {}  # of `canon.fast.transport`
        self.aborted: list[Any] = []  # other groups whose messages end with this one's
        self._group = ref(group)  # no strong reference: the group may end before
        store = _own_store(dist.distributed_c10d._get_process_group_store(group), self.ranks)
        self.liveness = Liveness(store, self.rank, self.ranks)
        self.digests = _digests(group, store, self.rank, self.ranks)
        self.calls = 0
        self.known: set[int] = set()  # digests on which all ranks agreed
        self.pending: Verdict | None = None
        self.broken: Exception | None = None  # why the group cannot be used any more
        self.lock = threading.RLock()
        watch(self)

    # ------------------------------------------------------------------ agreement
    def agree(self, name: str, fields: Fields, wait: bool) -> None:
        """Compare a call named ``name`` with the other ranks' calls.

        Args:
            fields: (name, value) of everything that all ranks must pass alike; a value's ``digest`` or repr is compared.
            wait: wait for the verdict now, even if this rank knows the call.

        Raises:
            ValueError: the ranks differ, in this call or in the one before.
            RuntimeError: a rank is missing, or the group was broken by an earlier error.
        """
        digest = digest_of(tuple((field, getattr(value, "digest", value)) for field, value in fields))
        with self.lock:
            self.settle()
            self.calls += 1
            with self.failures(name):
                self.pending = Verdict(name, self.calls, digest, fields, self.digests.post(self.calls, digest))
            if wait or digest not in self.known:
                self.settle(before_messages=True)

    def settle(self, before_messages: bool = False, digests: list[int] | None = None) -> None:
        """Compare the digests of the last call, waiting for them if they are not given. Raise if the ranks differ."""
        with self.lock:
            if self.broken:
                raise type(self.broken)(*self.broken.args)
            verdict, self.pending = self.pending, None
            if verdict is None:
                return
            with self.failures(verdict.name):
                found = verdict.post.wait() if digests is None else digests
            if all(digest == verdict.digest for digest in found):
                if len(self.known) >= KNOWN:
                    self.known.clear()
                self.known.add(verdict.digest)
                return
            problem = ValueError(self._difference(verdict))
            if not before_messages:
                self.broken = ValueError(f"{problem}\nMessages of that call were under way: make a new process group.")
            raise self.broken or problem

    def _difference(self, verdict: Verdict) -> str:
        """Exchange, through the store, what each rank has passed, and name the fields and the ranks that differ."""
        fields = {name: value if isinstance(value, str) else repr(value) for name, value in verdict.fields}
        everyone = self.liveness.exchange(f"call {verdict.number}", fields) or {self.rank: fields}
        if any(theirs.get("arguments") for theirs in everyone.values()):
            everyone = {rank: {"arguments": theirs.get("arguments", "")} for rank, theirs in everyone.items()}
        lines = ["the ranks disagree:"]
        for name in dict.fromkeys(name for theirs in everyone.values() for name in theirs):
            holders: dict[str, list[int]] = {}
            for rank, theirs in everyone.items():
                holders.setdefault(theirs.get(name, ""), []).append(rank)
            if len(holders) > 1:
                told = "; ".join(f"rank {', '.join(map(str, r))}: {text or 'fine'}" for text, r in holders.items())
                lines.append(f"  {name}: {told}")
        if silent := [str(rank) for rank in range(self.ranks) if rank not in everyone]:
            lines.append(f"  rank {', '.join(silent)} did not say what it passed")
        return "\n".join(lines)

    # ------------------------------------------------------------------ missing ranks
    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """Name the missing ranks in errors of the messages inside, and mark the group as broken."""
        try:
            yield
        except RuntimeError as error:
            if self.broken or not _of_messages(error):
                raise
            who = self.liveness.missing(self.calls)
            cause = str(error).splitlines()[0][:200]
            self.broken = RuntimeError(
                f"{name}, call {self.calls} of rank {self.rank}: {who}. The messages of the call failed ({cause}), "
                "so make a new process group."
            )
            raise self.broken from error

    # ------------------------------------------------------------------ the watching thread
    def look(self) -> None:
        """End the messages of a call on which the ranks differ, if the rank itself does not come to read the verdict."""
        if self.broken is None:
            self.liveness.answer(self.calls)
        verdict = self.pending
        if verdict is None or time.monotonic() - verdict.begun < POLL_SECONDS:
            return
        if (digests := verdict.post.digests()) is None:
            return
        if not self.lock.acquire(blocking=False):
            return  # the rank reads it now
        try:
            if self.pending is verdict:
                self.settle(digests=digests)
        except (ValueError, RuntimeError) as error:
            logging.getLogger(__name__).error("%s", error)
            for group in (self._group(), *self.aborted):
                with suppress(Exception):
                    group.abort()
        finally:
            self.lock.release()


def group_state(group: Any) -> GroupState:
    """Return the state of a group (None: all ranks) that this rank is a member of. The first call is a collective."""
    group = dist.group.WORLD if group is None else group
    with _lock:
        state = _states.get(group)
    if state is None:  # only this rank's thread uses its group
        state = GroupState(group)
        with _lock:
            _states[group] = state
    return state


@contextmanager
def refused_together(name: str, group: Any, ranks: int) -> Iterator[None]:
    """Check the arguments of a collective inside: what raises on one rank raises on every rank.

    The other ranks find out as they compare their own arguments by `GroupState.agree`.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if ranks > 1:
            group_state(group).agree(name, (("function", name), ("arguments", str(error))), wait=True)
        raise


@lru_cache(maxsize=256)
def digest_of(fields: Fields) -> int:
    """Return a digest of the fields in 56 bits, equal in every process."""
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:7], "big")


def new_group_of(group: Any, backend: str, options: Any = None, timeout: timedelta | None = None) -> Any:
    """Return a new group of the same ranks, in ascending order. Only they take part."""
    ranks = sorted(dist.get_process_group_ranks(group))
    with _unbound():
        return dist.new_group(
            ranks, timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )


@contextmanager
def _unbound() -> Iterator[None]:
    """A world that is bound to its GPUs splits new NCCL groups off itself, which takes all its ranks. Unbound, it does not."""
    everyone = dist.group.WORLD
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        yield
    finally:
        everyone.bound_device_id = bound


def backend_of(group: Any, device: torch.device) -> str:
    """Return the backend by which the group moves tensors of the device: "nccl", "gloo", "threads"."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",")).get(device.type, "")


def _own_store(store: Any, ranks: int) -> Any:
    """Return a part of the store for this group alone: a group that ended may have left entries under the same names."""
    generation = (store.add("canon/generation", 1) - 1) // ranks
    return dist.PrefixStore(f"canon/{generation}", store)


def _digests(group: Any, store: Any, rank: int, ranks: int) -> Any:
    """Return what carries the digests of a group: memory that the ranks share, or all-gathers. A collective."""
    if backend_of(group, torch.device("cpu")) == "threads":
        return GatheredDigests(ref(group), ranks)
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
    if (memory := shared_memory(store, rank, ranks)) is not None:
        return SharedDigests(memory, rank, ranks, timeout.total_seconds())
    if backend_of(group, torch.device("cpu")) in ("gloo", "mpi"):
        return GatheredDigests(ref(group), ranks)
    channel = new_group_of(group, "gloo", timeout=timeout)
    return GatheredDigests(lambda: channel, ranks)


def _of_messages(error: RuntimeError) -> bool:
    """Return whether an error comes from messages between ranks."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
