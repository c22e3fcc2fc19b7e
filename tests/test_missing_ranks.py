"""If a rank dies, stops or is late, the other ranks raise an error that names it, and later calls raise it again."""

import functools
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import canon
from canon import Mask, fast, reference
from canon.runtime.agreement import group_state
from canon.runtime.call import ALGORITHMS
from canon.testing import process_groups

HALVES = {"reference": reference, "fast": fast}
RANKS, LOST, TIMEOUT = 3, 1, 4.0  # LOST is the missing rank; TIMEOUT, in seconds, that of the process group
MASK = Mask.documents([0, 7, 24])


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def late():
    time.sleep(1000)


def raises():
    raise ValueError("an error of the user's")


def program(half, function, where, how):
    """Run two training steps of a function. The missing rank fails in the second one, before the pass ``where``."""
    half, layout = HALVES[half], canon.Layout.contiguous(24, RANKS)
    q, k, v = (torch.ones(1, 8, heads, 8).requires_grad_() for heads in (4, 2, 2))
    others = {
        "unshard": lambda: layout.unshard(k, partial_grad=True),
        "redistribute": lambda: layout.redistribute(k, canon.Layout.zigzag(24, RANKS)),
        "decode_attention": lambda: half.decode_attention(q, k, v),
        "group_cast": lambda: half.group_cast(k[0], half.cast_plan(MASK, layout), 0),
    }
    call = others.get(function, lambda: getattr(half, function)(q, k, v, MASK))
    for step in range(2):
        lose = how if step and dist.get_rank() == LOST else lambda: None
        if where == "forward":
            lose()
        out = call()
        if where == "backward":
            lose()
        if out.requires_grad:
            out.sum().backward()


def rank_main(rank, folder, run):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TRITON_INTERPRET"] = "1"
    store, report = dist.FileStore(f"{folder}/store", RANKS), Path(folder) / f"rank{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT))
    (Path(folder) / f"started{rank}").touch()
    try:
        run()
        report.write_text("finished")
    except RuntimeError as error:
        again = "not raised"
        try:
            reference.ring_attention(*(torch.ones(1, 8, 2, 8) for _ in range(3)))
        except RuntimeError as second:
            again = str(second)
        report.write_text(f"{error}\n---\n{again}")
        time.sleep(4)  # the others must detect the failure themselves, not from closed connections
    except ValueError:
        report.write_text(traceback.format_exc())
    os._exit(0)


def survivors(run, folder):
    """Return the reports of the other ranks, and the seconds since all ranks have started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    children = [context.Process(target=rank_main, args=(rank, str(folder), run), daemon=True) for rank in range(RANKS)]
    others = [rank for rank in range(RANKS) if rank != LOST]
    try:
        for child in children:
            child.start()
        limit = time.monotonic() + 120
        while not all((folder / f"started{rank}").exists() for rank in range(RANKS)) and time.monotonic() < limit:
            time.sleep(0.05)
        start = time.monotonic()
        while not all((folder / f"rank{rank}").exists() for rank in others) and time.monotonic() < start + 90:
            time.sleep(0.05)
        return [(folder / f"rank{rank}").read_text() for rank in others], time.monotonic() - start
    finally:
        for child in children:
            child.kill()
            child.join()


@pytest.mark.parametrize(
    ("how", "half", "function", "where", "title"),
    [
        (killed, "reference", "ring_attention", "forward", "ring_attention (forward)"),
        (killed, "fast", "ring_attention", "backward", "ring_attention (backward)"),
        (stopped, "fast", "strided_attention", "forward", "strided_attention (forward)"),
        (late, "reference", "magi_attention", "backward", "magi_attention (backward)"),
        (raises, "fast", "magi_attention", "backward", "magi_attention (backward)"),
        (killed, "reference", "unshard", "forward", "unshard"),
        (stopped, "reference", "unshard", "backward", "unshard (backward)"),
        (killed, "reference", "redistribute", "backward", "redistribute"),
        (stopped, "reference", "decode_attention", "forward", "decode_attention"),
        (killed, "fast", "group_cast", "forward", "group_cast"),
    ],
)
def test_a_missing_rank_is_named(how, half, function, where, title, tmp_path):
    reports, seconds = survivors(functools.partial(program, half, function, where, how), tmp_path)
    for text in reports:
        error, again = text.split("\n---\n")
        assert error.startswith(f"{title}, call")
        assert "rank 1 is missing" in error
        assert again == error, "a later call of the group raises the same error"
    assert seconds < TIMEOUT + 30


class Aborted:
    """A group that is aborted together with the group of a test, and the error that later calls raise."""

    def __init__(self):
        self.times = []

    def abort(self):
        self.times.append(time.monotonic())


def end_while_messages_are_in_flight():
    """Make a call known, end one rank, and let the others make the call without waiting for digests, as on GPUs."""
    state, fields = group_state(None), (("function", "ring_attention"),)
    state.agree("ring_attention", fields, wait=True)
    if dist.get_rank() == LOST:
        os._exit(0)
    state.aborted.append(aborted := Aborted())
    state.agree("ring_attention", fields, wait=False)
    start = time.monotonic()
    while not aborted.times and time.monotonic() < start + 10:
        time.sleep(0.1)  # a user's code waits for the GPU here, until the messages are aborted
    assert aborted.times
    state.agree("ring_attention", fields, wait=False)


def test_messages_in_flight_are_aborted_if_a_rank_ends(tmp_path):
    reports, _ = survivors(end_while_messages_are_in_flight, tmp_path)
    for text in reports:
        error, again = text.split("\n---\n")
        assert "rank 1 is missing: its process has ended" in error
        assert "make a new process group" in error
        assert again == error


def survive_an_exception(half, function, where, when):
    """Rank 1 raises at one end of a pass, and continues. Return each rank's later errors, its log, and the seconds."""
    log, errors = [], []
    logging.getLogger("canon.runtime.agreement").addFilter(lambda record: log.append(record.getMessage()))
    leaves = [torch.ones(1, 8, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    step = lambda: getattr(HALVES[half], function)(*leaves).sum().backward()
    step()
    algorithm = ALGORITHMS[half, function]
    run = getattr(algorithm, where)

    def fails(*arguments):
        if when == "after":
            run(*arguments)
        raise MemoryError("out of memory")

    if dist.get_rank() == LOST:
        object.__setattr__(algorithm, where, fails)
        with pytest.raises(MemoryError):
            step()
        object.__setattr__(algorithm, where, run)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            step()
        errors.append(str(raised.value))
    return errors, log, time.monotonic() - start


@pytest.mark.parametrize(
    ("half", "function", "where", "when"),
    [
        ("reference", "ring_attention", "forward", "before"),
        ("fast", "magi_attention", "backward", "before"),
        ("reference", "strided_attention", "forward", "after"),
        ("fast", "ring_attention", "forward", "after"),
    ],
)
def test_an_exception_that_one_rank_survives_raises_on_every_rank(half, function, where, when):
    expected = f"rank 1 raised MemoryError in {function} ({where}): out of memory"
    found = process_groups.processes(functools.partial(survive_an_exception, half, function, where, when), 2)
    for errors, _, seconds in found:
        assert all(expected in error for error in errors)
        assert seconds < 10, "two looks of the watching thread are a second apart"
    assert when == "after" or any(expected in line for _, log, _ in found for line in log)


def survive_the_same_exception():
    """All ranks raise the same, so the group can still be used. Rank 1 then raises alone."""
    layout = canon.Layout([[range(8)], []], 8)
    for _ in range(2):
        x = torch.ones(1, layout.size(dist.get_rank()), 2, 8)
        with pytest.raises(ValueError, match="head_stride"):
            reference.strided_attention(x, x, x, layout=layout, head_stride=3)
        time.sleep(2.5)  # two looks of the watching thread
    reference.ring_attention(*(torch.ones(1, 8, 2, 8) for _ in range(3)))


def test_an_exception_of_all_ranks_leaves_the_group_usable():
    process_groups.processes(survive_the_same_exception, 2)


def use_an_ended_group(half):
    group, x = dist.new_group([0, 1]), torch.ones(1, 8, 2, 8).requires_grad_()
    layout = canon.Layout.contiguous(16, 2)
    out = HALVES[half].ring_attention(x, x, x, group=group)
    dist.destroy_process_group(group)
    for use in (
        lambda: HALVES[half].ring_attention(x, x, x, group=group),
        lambda: layout.unshard(x, group),
        out.sum().backward,
    ):
        with pytest.raises((RuntimeError, ValueError), match="the process group has ended: make a new one") as raised:
            use()
        assert len(str(raised.value)) < 150


@pytest.mark.parametrize("half", HALVES)
def test_a_call_on_an_ended_group_raises_one_sentence(half):
    process_groups.processes(functools.partial(use_an_ended_group, half), 2)


ENDS = """
import time
import torch.distributed as dist
from canon.runtime import agreement

class State:
    store = dist.TCPStore("localhost", 0, is_master=True)

    def look(self):
        for _ in range(20000):
            self.store.check(["failure"])

agreement.POLL_SECONDS = 0.01
state = State()
agreement.watch(state)
time.sleep(0.2)
"""


def test_a_process_ends_while_its_watching_thread_uses_the_store():
    """Without `atexit` in `canon.runtime.agreement`, all of six such processes ended by SIGABRT."""
    paths = os.pathsep.join([str(Path(canon.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
