"""If a rank dies, stops or is late, the other ranks raise an error that names it, and later calls
raise it again.
"""

import os
import signal
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from programs import printed
from short_waits import shorten_waits

import canon
from canon import Mask, fast, reference
from canon.ranks.agreement import group_state

# LOST is the missing rank; TIMEOUT, in seconds, that of the process group
RANKS, LOST, TIMEOUT = 3, 1, 1.5
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
    """Run two training steps of a function. The missing rank fails in the second one, before the
    pass ``where``.
    """
    layout = canon.Layout.contiguous(24, RANKS)
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

    def tell(text):  # all at once: the test reads the report as soon as it exists
        part = report.with_suffix(".part")
        part.write_text(text)
        part.rename(report)

    torch.set_num_threads(1)
    shorten_waits()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    start = time.monotonic()
    try:
        run()
        tell("finished")
    except RuntimeError as error:
        again = "not raised"
        try:
            reference.ring_attention(*(torch.ones(1, 8, 2, 8) for _ in range(3)))
        except RuntimeError as second:
            again = str(second)
        tell(f"{error}\n---\n{again}\n---\n{time.monotonic() - start}")
        time.sleep(4)  # the others must detect the failure themselves, not from closed connections
    except ValueError:
        tell(traceback.format_exc())
    os._exit(0)


def survivors(run, folder):
    """Return the first and the second error of the other ranks, and their seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    children = [
        context.Process(target=rank_main, args=(rank, str(folder), run), daemon=True)
        for rank in range(RANKS)
    ]
    reports = [folder / f"rank{rank}" for rank in range(RANKS) if rank != LOST]
    try:
        for child in children:
            child.start()
        limit = time.monotonic() + 210
        while not all(report.exists() for report in reports) and time.monotonic() < limit:
            time.sleep(0.05)
        return [report.read_text().split("\n---\n") for report in reports]
    finally:
        for child in children:
            child.kill()
            child.join()


@pytest.mark.parametrize(
    ("how", "half", "function", "where", "title"),
    [
        (killed, reference, "ring_attention", "forward", "ring_attention (forward)"),
        (killed, fast, "ring_attention", "backward", "ring_attention (backward)"),
        (stopped, fast, "strided_attention", "forward", "strided_attention (forward)"),
        (late, reference, "magi_attention", "backward", "magi_attention (backward)"),
        (raises, fast, "magi_attention", "backward", "magi_attention (backward)"),
        (killed, reference, "unshard", "forward", "unshard"),
        (stopped, reference, "unshard", "backward", "unshard (backward)"),
        (killed, reference, "redistribute", "backward", "redistribute"),
        (stopped, reference, "decode_attention", "forward", "decode_attention"),
        (killed, fast, "group_cast", "forward", "group_cast"),
    ],
)
def test_a_missing_rank_is_named(how, half, function, where, title, tmp_path):
    run = partial(program, half, function, where, how)
    for error, again, seconds in survivors(run, tmp_path):
        assert error.startswith(f"{title}, call")
        assert "rank 1 is missing" in error
        assert again == error, "a later call of the group raises the same error"
        assert float(seconds) < TIMEOUT + 30


def end_while_messages_are_in_flight():
    """Make a call known, end one rank, and let the others make the call without waiting for
    digests, as on GPUs.
    """
    state, fields = group_state(None), (("function", "ring_attention"),)
    state.agree("ring_attention", fields, wait=True)
    if dist.get_rank() == LOST:
        os._exit(0)
    state.aborted.append(aborted := mock.Mock())  # a group
    state.agree("ring_attention", fields, wait=False)
    start = time.monotonic()
    while not aborted.abort.called and time.monotonic() < start + 10:
        time.sleep(0.1)  # a user's code waits for the GPU here, until the messages are aborted
    assert aborted.abort.called
    state.agree("ring_attention", fields, wait=False)


def test_messages_in_flight_are_aborted_if_a_rank_ends(tmp_path):
    for error, again, _ in survivors(end_while_messages_are_in_flight, tmp_path):
        assert "rank 1 is missing: its process has ended" in error
        assert "make a new process group" in error
        assert again == error


ENDS = """
import time
import torch.distributed as dist
from canon.ranks import agreement

class State:
    store = dist.TCPStore("localhost", 0, is_master=True)
    raised = broken = False

    def look(self):
        for _ in range(20000):
            self.store.check(["failure"])

agreement.POLL_SECONDS = 0.01
state = State()
agreement.watch(state)
time.sleep(0.2)
"""


def test_a_process_ends_while_its_watching_thread_uses_the_store():
    """Without `atexit` in `canon.ranks.agreement`, all of six such processes ended by SIGABRT."""
    printed(ENDS)
