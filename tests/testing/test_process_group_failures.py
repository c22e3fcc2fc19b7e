"""Claims about failing process groups: the error names the rank, no rank hangs, and no state
remains.
"""

import contextvars
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from canon.testing import process_groups

LAUNCHERS = [process_groups.threads, process_groups.processes]
BACKEND = contextvars.ContextVar("backend", default="triton")


def fails_on_one():
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def returns_early():
    if dist.get_rank() != 2:
        dist.barrier()


def sleeps_on_one():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize("start", LAUNCHERS)
def test_the_error_names_the_failing_rank_and_no_rank_hangs(start):
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1: KeyError: 'lost'") as caught:
        start(fails_on_one, 3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - begun < 20


def test_threads_that_wait_for_each_other_raise():
    message = (
        "rank 0 waits in barrier for rank 2; rank 1 waits in barrier for rank 2; rank 2 has "
        "returned"
    )
    with pytest.raises(RuntimeError, match=message):
        process_groups.threads(returns_early, 3)
    with pytest.raises(
        RuntimeError,
        match="rank 0 waits in a receive from rank 1; rank 1 waits in a receive from rank 0",
    ):
        process_groups.threads(lambda: dist.recv(torch.empty(1), 1 - dist.get_rank()), 2)


def test_a_hard_timeout_names_the_unfinished_ranks():
    with pytest.raises(TimeoutError, match="rank 0, 1 had not finished") as caught:
        process_groups.processes(sleeps_on_one, 2, timeout=3)
    assert "in sleeps_on_one" in str(caught.value)


def test_disagreements_are_errors():
    def other_collectives():
        dist.barrier() if dist.get_rank() else dist.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError, match="rank 0 called all_reduce, rank 1 called barrier"):
        process_groups.threads(other_collectives, 2)

    def other_dtypes():
        mine = torch.zeros(2, dtype=torch.float32 if dist.get_rank() else torch.float64)
        dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)

    with pytest.raises(RuntimeError, match="do not fit"):
        process_groups.threads(other_dtypes, 2)


def test_no_state_remains():
    with pytest.raises(RuntimeError):
        process_groups.threads(fails_on_one, 3)
    assert not dist.is_initialized()
    assert process_groups.threads(dist.get_rank, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="a rank cannot start"):
        process_groups.threads(partial(process_groups.threads, dist.get_rank, 2), 2)
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        process_groups.threads(dist.get_rank, 0)
    with pytest.raises(ValueError, match="picklable"):
        process_groups.processes(lambda: None, 2)


def prints():
    print(f"I am {dist.get_rank()}")
    dist.barrier()
    print("done")


@pytest.mark.parametrize("start", LAUNCHERS)
def test_prints_come_in_rank_order(start, capsys):
    start(prints, 2)
    assert capsys.readouterr().out == (
        "rank 0 │ I am 0\nrank 0 │ done\nrank 1 │ I am 1\nrank 1 │ done\n"
    )


def test_context_variables_reach_the_ranks():
    context = contextvars.copy_context()
    context.run(BACKEND.set, "gluon")
    assert context.run(process_groups.threads, BACKEND.get, 2) == ["gluon", "gluon"]
