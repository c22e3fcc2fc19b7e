"""How the digest of a call reaches the other ranks: 8 bytes a rank, while the call goes on.

    SharedDigests      one host: a word for each rank in memory that all of them share; a few microseconds
    GatheredDigests    several hosts, or ranks as threads: an all-gather in the background

A word holds the number of the call (8 bits) and the digest (56 bits), so it is written at once. A rank posts call n + 1 only
after it has read what all ranks posted for call n, so a word is never overwritten before it is read.
"""

import mmap
import os
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SLOTS = 4  # calls whose words are kept
SPINS = 200  # looks before a rank sleeps between them
DIGEST = (1 << 56) - 1


class SharedDigests:
    """Words in a file that all ranks have mapped: SLOTS for each rank, then the process number of each rank."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout: float):
        self.words, self.rank, self.ranks, self.timeout = memoryview(memory)[16:].cast("Q"), rank, ranks, timeout
        self.words[SLOTS * ranks + rank] = os.getpid()
        self.seen: set[int] = set()  # ranks whose processes have been seen to run

    def post(self, number: int, digest: int) -> "SharedPost":
        """Write this rank's digest of call ``number``."""
        self.words[SLOTS * self.rank + number % SLOTS] = (number & 255) << 56 | digest
        return SharedPost(self, number)

    def check_processes(self) -> None:
        """Raise RuntimeError if the process of a rank, seen to run before, has ended."""
        for rank in range(self.ranks):
            if runs(self.words[SLOTS * self.ranks + rank]):
                self.seen.add(rank)
            elif rank in self.seen:  # containers with process numbers of their own may never see it
                raise RuntimeError(f"connection lost: the process of rank {rank} has ended")


class SharedPost:
    """The words of one call."""

    def __init__(self, shared: SharedDigests, number: int):
        self.shared, self.places = shared, [SLOTS * rank + number % SLOTS for rank in range(shared.ranks)]
        self.number = number & 255
        if number == 2:  # all ranks have made call 1, so their process numbers are there
            shared.check_processes()

    def digests(self) -> list[int] | None:
        """Return every rank's digest, or None if one is not there yet."""
        words = [self.shared.words[place] for place in self.places]
        return [word & DIGEST for word in words] if all(word >> 56 == self.number for word in words) else None

    def wait(self) -> list[int]:
        """Return every rank's digest. Raises RuntimeError if a rank's process has ended, or after the group's timeout."""
        for _ in range(SPINS):
            if (digests := self.digests()) is not None:
                return digests
        start = looked = time.monotonic()
        while (digests := self.digests()) is None:
            time.sleep(2e-5 if time.monotonic() < start + 0.01 else 1e-3)
            if (now := time.monotonic()) > looked + 0.5:
                looked = now
                self.shared.check_processes()
            if now > start + self.shared.timeout:
                raise RuntimeError(f"timed out: a rank has not made the call within {self.shared.timeout:.0f} s")
        return digests


class GatheredDigests:
    """All-gathers of a group that moves CPU tensors."""

    def __init__(self, channel: Any, ranks: int):
        self.channel, self.ranks = channel, ranks

    def post(self, number: int, digest: int) -> "GatheredPost":
        """Start to gather the digests of a call."""
        return GatheredPost(self.channel(), self.ranks, digest)


class GatheredPost:
    """One all-gather."""

    def __init__(self, channel: Any, ranks: int, digest: int):
        self.sent = torch.tensor([digest])
        self.table = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
        self.work = channel.allgather([self.table], [self.sent])

    def digests(self) -> list[int] | None:
        """Return every rank's digest, or None if one is not there yet."""
        return [x.item() for x in self.table] if self.work.is_completed() else None

    def wait(self) -> list[int]:
        """Return every rank's digest. Raises RuntimeError as the group's messages do."""
        self.work.wait()
        return [x.item() for x in self.table]


def runs(process: int) -> bool:
    """Return whether a process of this number runs: one that has ended counts as gone, even if its parent has not noticed."""
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
    """Return memory that all ranks of a group share, or None if one of them cannot reach it. A collective, by the store."""
    size, folder = 8 * (SLOTS + 1) * ranks, "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
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
