"""Claims about process groups: a program gives the same results on threads and on processes."""

import ctypes
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from canon.testing import process_groups

LAUNCHERS = [process_groups.threads, process_groups.processes]
# torch 2.13 renames these functions and warns about the old names.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collectives():
    """Call every collective that the library uses, synchronous or not, and return plain numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, whole = torch.full((2,), float(rank)), torch.empty(2 * ranks)
    parts, objects = [torch.empty(2) for _ in range(ranks)], [None] * ranks
    total, largest, share = mine.clone(), torch.tensor([rank]), torch.empty(1)
    dist.all_gather(parts, mine)
    gather_single(whole, mine, async_op=True).wait()
    dist.all_gather_object(objects, {"rank": rank})
    dist.all_reduce(total)
    dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).wait()
    dist.reduce_scatter(share, [torch.tensor([10.0 * rank + i]) for i in range(ranks)])
    found = [torch.cat(parts), whole, total, largest, share.clone()]
    scatter_single(share, torch.arange(ranks).float() + rank)
    root = mine.clone() if rank == 1 else torch.empty(2)
    dist.broadcast(root, 1)
    dist.barrier()
    return objects, [x.tolist() for x in (*found, share, root)]


@pytest.mark.parametrize("start", LAUNCHERS)
def test_collectives(start):
    for rank, (objects, found) in enumerate(start(collectives, 3)):
        gathered = [0, 0, 1, 1, 2, 2]
        reduced = [30 + 3 * rank], [3 + 3 * rank]
        assert objects == [{"rank": r} for r in range(3)]
        assert found == [gathered, gathered, [3, 3], [2], *reduced, [1, 1]]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_threads_have_left_the_process_when_the_group_has_ended():
    """A fork would inherit the locks that their last C code holds: here that sleeps for 0.2 s."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    libc.pthread_key_create(ctypes.byref(key), libc.usleep)

    def program():
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))
        return Path(f"/proc/self/task/{threading.get_native_id()}")

    assert not any(task.exists() for task in process_groups.threads(program, 2))


def test_backward_stays_in_the_thread_of_its_rank():
    """On a GPU, torch would otherwise run it in a thread of the device, which has no rank."""
    assert not any(process_groups.threads(torch._C._is_multithreading_enabled, 2))


def test_asynchronous_calls_wait_for_late_ranks():
    def program():
        rank = dist.get_rank()
        total = torch.tensor([1.0])
        if rank == 0:
            work = dist.all_reduce(total, async_op=True)
            early = work.is_completed()
            # rank 1 joins only after this: a blocking call would never get here
            dist.send(torch.zeros(1), 1)
            work.wait()
            return early, total.item()
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(total)
        return None, total.item()

    assert process_groups.threads(program, 2) == [(False, 2.0), (None, 2.0)]


def test_another_thread_of_a_waiting_rank_may_read_finished_work():
    """The thread that watches for missing ranks does this."""
    read = threading.Event()

    def program():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()
        if dist.get_rank() == 1:
            read.wait(10)
            dist.send(torch.ones(1), 0)
            return None
        waiting = dist.group.WORLD.rendezvous.waiting

        def read_while_the_rank_waits():
            while 0 not in waiting:
                pass
            work.wait()
            read.set()

        watcher = threading.Thread(target=read_while_the_rank_waits)
        watcher.start()
        dist.recv(received := torch.zeros(1), 1)
        watcher.join()
        return received.item()

    assert process_groups.threads(program, 2) == [1.0, None]


def test_an_interrupt_waits_for_all_ranks():
    """An interrupted Thread.join of Python 3.11 forgets its thread. A rank that runs on can abort
    the process at its end.
    """
    working, ended = [threading.Event() for _ in range(3)], []

    def program():
        working[dist.get_rank()].set()
        time.sleep(0.1 if dist.get_rank() else 1.0)  # rank 0 is the first to be waited for
        ended.append(dist.get_rank())

    def interrupt():
        for rank in working:
            rank.wait()
        time.sleep(0.3)  # the caller waits for rank 0 by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    # a test run in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            process_groups.threads(program, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    interrupter.join()
    assert sorted(ended) == [0, 1, 2]
