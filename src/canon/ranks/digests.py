"""The digest of a call, and its exchange with the other ranks while the call continues.

    SharedDigests      one host: a word for each rank in shared memory; a few microseconds
    GatheredDigests    several hosts: an all-gather in the background

A word holds the number of the call (8 bits) and the digest (56 bits). A rank posts call n + 1 after
it has read all words for call n, so no word is overwritten too early.
"""

import hashlib
import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import canon

Fields = tuple[tuple[str, Any], ...]  # (name, value) of each argument
SLOTS = 4  # words of each rank
SPINS = 200  # reads without a pause
DIGEST = (1 << 56) - 1


def versioned(fields: Fields) -> Fields:
    """Return the fields with the version of Canon."""
    return ("version of Canon", canon.__version__), *fields


def digest_of(fields: Fields) -> int:
    """Return a 56-bit digest of the fields, by each value's ``digest`` or repr."""
    values = tuple((name, getattr(value, "digest", value)) for name, value in versioned(fields))
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "big")


class SharedDigests:
    """Words in shared memory: SLOTS for each rank, then its PID namespace and PID. Reads are of the
    call that was posted last.
    """

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout: float):
        self.words = memoryview(memory)[16:].cast("Q")
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.namespace, self.number, self.aborted = pid_namespace(), 0, False
        place = self.place_of_process(rank)
        self.words[place], self.words[place + 1] = self.namespace, os.getpid()

    def post(self, number: int, digest: int) -> None:
        """Write this rank's digest of call ``number`` (from 1)."""
        self.number = number
        self.words[SLOTS * self.rank + number % SLOTS] = (number & 255) << 56 | digest

    def read(self) -> list[int] | None:
        """Return the digests of all ranks, or None if one is missing yet."""
        slot, number = self.number % SLOTS, self.number & 255
        words = [self.words[SLOTS * rank + slot] for rank in range(self.ranks)]
        complete = all(word >> 56 == number for word in words)
        return [word & DIGEST for word in words] if complete else None

    def wait(self) -> list[int]:
        """Wait for the digests. Raises RuntimeError if a process ends, or after the timeout."""
        for _ in range(SPINS):
            if (digests := self.read()) is not None:
                return digests
        start = checked = time.monotonic()
        while (digests := self.read()) is None:
            time.sleep(2e-5 if time.monotonic() < start + 0.01 else 1e-3)
            if self.aborted:
                raise RuntimeError("connection lost: the group is aborted")
            if (now := time.monotonic()) > checked + 0.5:
                checked = now
                self.check_processes()
            if now > start + self.timeout:
                raise RuntimeError(
                    f"timed out: a rank has not made the call within {self.timeout:.0f} s"
                )
        return digests

    def abort(self) -> None:
        """End all waits of this rank with an error."""
        self.aborted = True

    def place_of_process(self, rank: int) -> int:
        """Return the place of a rank's PID namespace; its PID follows."""
        return SLOTS * self.ranks + 2 * rank

    def check_processes(self) -> None:
        """Raise RuntimeError if a process has ended. Those of other containers are invisible."""
        for rank in range(self.ranks):
            namespace, process = self.words[(place := self.place_of_process(rank)) : place + 2]
            if process and namespace == self.namespace and not runs(process):
                raise RuntimeError(
                    f"connection lost: rank {rank} is missing: its process has ended"
                )


@dataclass(eq=False)
class GatheredDigests:
    """All-gathers of digests, by the group that ``channel`` returns. ``abort`` ends their waits."""

    channel: Callable[[], Any]
    ranks: int
    abort: Callable[[], None]

    def post(self, number: int, digest: int) -> None:
        """Start to gather the digests of a call."""
        self.sent = torch.tensor([digest], device="cpu")
        self.table = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.ranks)]
        self.work = self.channel().allgather([self.table], [self.sent])

    def read(self) -> list[int] | None:
        """As `SharedDigests.read`."""
        return self.wait() if self.work.is_completed() else None

    def wait(self) -> list[int]:
        """Wait for the digests. Raises RuntimeError if the all-gather fails."""
        self.work.wait()
        digests = [x.item() for x in self.table]
        del self.sent, self.table, self.work
        return digests

    def check_processes(self) -> None:
        """Do nothing: the all-gather fails if a rank is lost."""


def pid_namespace() -> int:
    """Return this process's PID namespace: PIDs of others are not comparable."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def runs(process: int) -> bool:
    """Return whether the process with this ID runs. A zombie does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as another user
        return True
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def shared_memory(store: Any, rank: int, ranks: int) -> mmap.mmap | None:
    """Return memory that all ranks share, or None if one cannot reach it. A collective. A secret in
    the first 16 bytes identifies the file; rank 0 removes its name.
    """
    size = 8 * (SLOTS + 2) * ranks
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    if rank == 0:
        path, secret = Path(folder) / f"canon-{uuid.uuid4().hex}", uuid.uuid4().bytes
        with suppress(OSError):
            path.write_bytes(secret + bytes(size))
            path.chmod(0o600)
        store.set("memory", f"{path}|{secret.hex()}")
    path, _, secret = store.get("memory").decode().rpartition("|")
    memory = None
    with suppress(OSError, ValueError), open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 16 + size)
    reached = memory is not None and memory[:16] == bytes.fromhex(secret)
    store.set(f"memory/{rank}", "1" if reached else "0")
    everyone = all(store.get(f"memory/{other}") == b"1" for other in range(ranks))
    if rank == 0:
        Path(path).unlink(missing_ok=True)
    return memory if everyone else None
