"""Schedules agree before they are timed, and torch's context parallel, which is measured beside
them, may fail.
"""

import contextlib
import functools
import json
import pickle
from dataclasses import replace

import pytest
from benching import CPU, no_clock_of_schedules, on_cpu, options_of  # noqa: F401 (a fixture)

from canon.bench import (
    bench_command,
    schedule_peers,
    schedules,
    shapes,
)
from canon.bench.on_ranks import OnRanks
from canon.testing import process_groups

SHAPE = shapes.shape_of("1,64,2,2,16,documents:20")
EXPOSED = schedules._exposed
SHORT = shapes.shape_of("1,8,2,2,16,causal")


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    """Leave PyTorch's switch alone: it belongs to a process, and ranks here are threads."""
    monkeypatch.setattr(schedule_peers, "deterministic", contextlib.nullcontext)


def of(*given, only="", **options):
    """Return a program of one round for ranks on the CPU."""
    return OnRanks(functools.partial(schedules.measure, **options), given, on_cpu(only, 1))


def test_schedules_agree_before_they_are_timed():
    rows, others = process_groups.threads(of(SHAPE), 2)
    assert [row["schedule"] for row in rows] == [row["schedule"] for row in others]
    found = {row["schedule"] for row in rows}
    mesh = "mesh 1 x 2, strided zigzag"
    assert {"ring zigzag", "strided zigzag 2, small ends", "magi, 2 stages", mesh} <= found
    assert {"one GPU", "magi, repeatable"} <= found
    assert all(row["agrees"] for row in rows if row["schedule"] != "one GPU")
    assert all(
        row["forward_tflops"] > 0 and row["both_ms"] == [1.0] and row["both_launches_ms"] == [0.5]
        for row in rows
    )
    assert not any(row["peer"] for row in rows)
    assert schedules.tables(rows)[0].row_count == len(rows)


def test_what_was_measured_is_kept_after_each_shape(tmp_path):
    """By rank 0, in the record: where a later shape fails, or the command is ended, it stands
    there.
    """
    path, told = tmp_path / "record.json", []
    options = options_of("schedules", "--record", str(path))

    def keep(rows):
        # as it comes to a rank
        pickle.loads(pickle.dumps(functools.partial(bench_command._keep, options)))(rows)
        told.append([row["shape"] for row in json.loads(path.read_text())["results"]])

    program = replace(of(SHAPE, SHORT, only="ring"), keep=keep)
    rows, _ = process_groups.threads(program, 2)
    assert told == [[str(SHAPE)] * 3, [row["shape"] for row in rows]]
    assert [row["shape"] for row in rows] == [str(SHAPE)] * 3 + [str(SHORT)] * 3


def test_exposed_is_what_no_kernel_covers():
    waiting = (0.0, 90.0, "at::cuda::spin_kernel(long)")
    meeting = (92.0, 100.0, "ncclDevKernel_AllReduce")
    message = (100.0, 140.0, "ncclDevKernel_SendRecv")
    kernels = [
        (110.0, 120.0, "forward_kernel"),
        (115.0, 130.0, "merge_kernel"),
        (150.0, 160.0, "dq_kernel"),
    ]
    copied = (160.0, 165.0, "Memcpy DtoD")
    assert schedules.uncovered([message, waiting, copied, *kernels, meeting]) == 10 + 20 + 5
    assert schedules.uncovered(kernels) == 20
    assert schedules.uncovered([]) == 0


def test_exposed_is_the_median_of_several_runs_and_never_longer_than_both_passes(monkeypatch):
    """A profiler that delays the host once changes nothing. One that always does leaves a reason
    instead of a time.
    """
    delays = iter([300.0, 1.0, 0.5, 400.0, 0.25])

    def profiled(run, device):
        run()
        return [(0.0, 1e3 * next(delays), "ncclDevKernel_SendRecv"), (0.0, 0.0, "forward_kernel")]

    monkeypatch.setattr(schedules, "_profiled", profiled)
    runs = []
    assert process_groups.threads(lambda: EXPOSED(lambda: runs.append(0), CPU), 1) == [1.0]
    assert len(runs) == 1 + schedules.PROFILED
    for exposed, kept in ((0.75, True), (237.76, False)):
        monkeypatch.setattr(schedules, "_exposed", lambda run, device, exposed=exposed: exposed)
        (row,) = process_groups.threads(of(SHORT, only="ring zigzag"), 1)[0]
        assert (row.get("exposed_ms") == exposed) is kept
        assert ("237.76 ms, longer than both passes" in row.get("exposed_failed", "")) is not kept


def test_torch_context_parallel_is_for_causal_sequences_that_it_can_balance():
    def found(text, ranks, only=""):
        return [
            each.name
            for each in schedule_peers.peer_schedules(shapes.shape_of(text), ranks, on_cpu(only))
        ]

    ways = [
        "torch cudnn allgather",
        "torch cudnn alltoall",
        "torch flash allgather",
        "torch flash alltoall",
    ]
    assert found("1,64,4,2,16,causal", 4) == ways
    assert found("1,64,4,2,16,causal", 4, "flash") == ways[2:]
    assert found("1,64,4,2,16,causal", 4, "flash allgather|cudnn") == ways[:3]
    assert (
        found("1,60,4,2,16,causal", 4)
        == found("1,64,4,2,16,full", 4)
        == found("1,64,4,2,16,causal", 1)
        == []
    )
