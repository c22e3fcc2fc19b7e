"""An exception that one rank survives, and a call on an ended group, raise on every rank: nothing
waits for lost messages.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from short_waits import shorten_waits

from canon import Layout, fast, reference
from canon.route.algorithm import ALGORITHMS
from canon.testing import process_groups


def survive_an_exception(half, function, where, when, error=MemoryError):
    """Rank 1 raises at one end of a pass, and continues. Return each rank's later errors, its log,
    and the seconds.
    """
    shorten_waits()
    log, errors = [], []
    logging.getLogger("canon.ranks.agreement").addFilter(
        lambda record: log.append(record.getMessage())
    )
    leaves = [torch.ones(1, 8, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    step = lambda: getattr(half, function)(*leaves).sum().backward()
    step()
    algorithm = ALGORITHMS[half.__name__.removeprefix("canon."), function]
    run = getattr(algorithm, where)

    def fails(*arguments):
        if when == "after":
            run(*arguments)
        raise error("out of memory")

    if dist.get_rank() == 1:
        object.__setattr__(algorithm, where, fails)
        with pytest.raises(error):
            step()
        object.__setattr__(algorithm, where, run)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            step()
        errors.append(str(raised.value))
    return errors, log, time.monotonic() - start


@pytest.mark.parametrize(
    ("half", "function", "where", "when", "error"),
    [
        (reference, "ring_attention", "forward", "before", MemoryError),
        (fast, "magi_attention", "backward", "before", MemoryError),
        (reference, "strided_attention", "forward", "after", MemoryError),
        (fast, "ring_attention", "forward", "after", MemoryError),
        (reference, "ring_attention", "backward", "before", KeyboardInterrupt),
        (fast, "ring_attention", "forward", "before", SystemExit),
    ],
)
def test_an_exception_that_one_rank_survives_raises_on_every_rank(
    half, function, where, when, error
):
    expected = f"rank 1 raised {error.__name__} in {function} ({where}): out of memory"
    found = process_groups.processes(
        partial(survive_an_exception, half, function, where, when, error), 2
    )
    for errors, _, seconds in found:
        assert all(expected in error for error in errors)
        assert seconds < 9, "two looks of the watching thread are a tenth of a second apart"
    assert when == "after" or any(expected in line for _, log, _ in found for line in log)


END = """
import sys, torch, torch.distributed as dist
from canon import reference
from short_waits import shorten_waits

shorten_waits()
port, rank, error = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    {"interrupt": KeyboardInterrupt(), "exit": SystemExit(3)}[sys.argv[3]],
)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.ones(1, 8, 2, 8)
reference.ring_attention(x, x, x)
print("ready", flush=True)
sys.stdin.readline()


def raises(*_):
    raise error


if rank == 0:
    dist.batch_isend_irecv = raises
reference.ring_attention(x, x, x)
"""


@pytest.mark.parametrize(
    ("how", "error", "code"), [("interrupt", "KeyboardInterrupt", -2), ("exit", "SystemExit", 3)]
)
def test_a_process_that_is_interrupted_in_a_pass_ends_and_the_others_name_it(how, error, code):
    """Rank 0 serves the store, as without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"stdin": -1, "stdout": -1, "stderr": -1, "text": True}
    options["env"] = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start_rank = lambda rank: subprocess.Popen(
        [sys.executable, "-c", END, str(port), str(rank), how], **options
    )
    with start_rank(0) as first, start_rank(1) as second:
        assert [rank.stdout.readline() for rank in (first, second)] == ["ready\n"] * 2
        start = time.monotonic()
        for rank in (first, second):
            rank.stdin.write("\n")
            rank.stdin.flush()
        errors = [rank.communicate(timeout=60)[1] for rank in (first, second)]
        assert time.monotonic() - start < 10
        assert [first.returncode, second.returncode] == [code, 1]
        assert f"rank 0 raised {error} in ring_attention (forward)" in errors[1]


def survive_the_same_exception():
    """All ranks raise the same, so the group can still be used. Rank 1 then raises alone."""
    shorten_waits()
    layout = Layout([[range(8)], []], 8)
    for _ in range(2):
        x = torch.ones(1, layout.size(dist.get_rank()), 2, 8)
        with pytest.raises(ValueError, match="head_stride"):
            reference.strided_attention(x, x, x, layout=layout, head_stride=3)
        time.sleep(0.25)  # two looks of the watching thread
    reference.ring_attention(*(torch.ones(1, 8, 2, 8) for _ in range(3)))


def test_an_exception_of_all_ranks_leaves_the_group_usable():
    process_groups.processes(survive_the_same_exception, 2)


def use_an_ended_group(half):
    group, x = dist.new_group([0, 1]), torch.ones(1, 8, 2, 8).requires_grad_()
    layout = Layout.contiguous(16, 2)
    out = half.ring_attention(x, x, x, group=group)
    dist.destroy_process_group(group)
    for use in (
        lambda: half.ring_attention(x, x, x, group=group),
        lambda: layout.unshard(x, group),
        out.sum().backward,
    ):
        with pytest.raises(
            (RuntimeError, ValueError), match="the process group has ended: make a new one"
        ) as raised:
            use()
        assert len(str(raised.value)) < 150


def test_a_call_on_an_ended_group_raises_one_sentence(half):
    process_groups.processes(partial(use_an_ended_group, half), 2)
