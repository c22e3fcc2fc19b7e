"""Digests in shared memory: every rank reads the digests of all ranks, and detects an ended
process.
"""

import mmap
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from canon.ranks.digests import SLOTS, SharedDigests, runs, shared_memory


def memory(ranks):
    return mmap.mmap(-1, 16 + 8 * (SLOTS + 2) * ranks)


def test_every_rank_reads_the_digests_of_all_ranks():
    shared = memory(3)
    ranks = [SharedDigests(shared, rank, 3, timeout=5.0) for rank in range(3)]
    for number in range(1, 600):  # the numbers of calls wrap at 256
        for rank, each in enumerate(ranks):
            each.post(number, 1000 * number + rank)
        assert all(each.wait() == [1000 * number + rank for rank in range(3)] for each in ranks)


def test_a_rank_waits_for_a_rank_that_has_not_posted():
    shared = memory(2)
    first, second = (SharedDigests(shared, rank, 2, timeout=0.2) for rank in range(2))
    first.post(1, 7)
    assert first.read() is None
    with pytest.raises(RuntimeError, match="timed out"):
        first.wait()
    second.post(1, 8)
    assert first.wait() == [7, 8]


def test_digests_of_the_previous_call_do_not_count_for_this_one():
    shared = memory(2)
    first, second = (SharedDigests(shared, rank, 2, timeout=5.0) for rank in range(2))
    for number in range(1, 10):
        second.post(number, 5)
        first.post(number, 5)
        first.wait()
    first.post(10, 5)
    assert first.read() is None


def test_an_ended_process_is_detected_before_its_parent_waits_for_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        mine = SharedDigests(memory(2), 0, 2, timeout=60.0)
        place = mine.place_of_process(1)
        mine.words[place], mine.words[place + 1] = mine.namespace, child.pid
        assert runs(child.pid)
        mine.check_processes()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
        with pytest.raises(RuntimeError, match="rank 1 is missing: its process has ended"):
            mine.check_processes()
        mine.words[place] += 1  # of another container
        mine.check_processes()
    finally:
        child.kill()
        child.wait()
    assert not runs(child.pid)


def test_one_rank_shares_memory_with_itself_and_leaves_no_file():
    before = set(os.listdir("/dev/shm"))
    assert shared_memory(dist.HashStore(), 0, 1) is not None
    assert {
        name for name in set(os.listdir("/dev/shm")) - before if name.startswith("canon-")
    } == set()
