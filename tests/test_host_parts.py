"""Claims about the parts of a call's host time."""

import importlib
import time

import torch

from canon import Mask, fast
from canon.bench import host_parts, host_time
from canon.bench.peers import Contender
from canon.bench.shapes import shape_of
from canon.fast import local
from canon.testing import process_groups

SLEEP = 5e-3


def test_parts_add_up_and_one_part_inside_another_counts_once(monkeypatch):
    arguments = [torch.randn(1, 8, 1, 16) for _ in range(3)]
    original = local.empty_result

    def slow(*some):
        time.sleep(SLEEP)
        return original(*some)

    monkeypatch.setattr(local, "empty_result", slow)
    run = lambda: fast.attention(*arguments, Mask.causal(8))
    run()
    start = time.perf_counter()
    found = host_parts.host_parts(run, 4)
    spent = 1e3 * (time.perf_counter() - start) / 4
    assert set(found) == set(host_parts.PARTS)
    assert min(found.values()) >= 0
    assert 1e3 * SLEEP <= found["results"] <= sum(found.values()) <= spent
    assert found["arguments"] < 1e3 * SLEEP, "the sleep is in no other part"
    assert found["digests"] == found["messages"] == 0


def parts_of_a_ring():
    q, k, v = (torch.randn(1, 8, 1, 16, requires_grad=True) for _ in range(3))
    return host_parts.host_parts(lambda: fast.ring_attention(q, k, v).sum().backward(), 2)


def test_distributed_calls_have_digests_and_messages():
    for found in process_groups.processes(parts_of_a_ring, 2):
        assert min(found["arguments"], found["digests"], found["messages"]) > 0


def test_every_name_exists():
    """A function that was renamed would silently count as another part."""
    modules = [importlib.import_module(f"canon.fast.{name}") for name in host_parts.MODULES]
    assert all(any(hasattr(module, name) for module in modules) for name in host_parts.FUNCTIONS)


def test_the_bench_times_the_training_loop_and_splits_each_call_of_canon(monkeypatch):
    """A CPU has no cuDNN: another contender has its name here."""
    monkeypatch.setattr(host_time, "CUDNN", "SDPA flash")
    rows = host_time.host(
        shape_of("1,16,2,1,16,causal"), torch.float32, torch.device("cpu"), 3, "canon auto|SDPA flash"
    )
    split = [row for row in rows if row["contender"].startswith("canon")]
    assert all(set(row["part_ms"]) == set(host_parts.PARTS) for row in split)
    assert host_time.tables(rows)[1].row_count == len(split) > 0
    assert host_time.tables(rows)[0].row_count == len(rows)
    assert rows[-1]["contender"] == host_time.NO_KERNELS
    assert all(rows[-1][f"{name}_wall_ms"] for name in host_time.MEASURES)
    timed = {row["contender"]: row for row in rows if "failed" not in row}
    assert {"canon auto", "SDPA flash"} <= set(timed)
    assert all(len(row["loop_wall_ms"]) == 3 for row in timed.values())
    assert timed["SDPA flash"]["loop_to_cudnn"] == 1.0
    assert timed["canon auto"]["loop_to_cudnn"] > 0


def test_an_iteration_of_the_loop_replaces_the_gradients():
    q, k, v = (torch.randn(1, 8, 1, 16, requires_grad=True) for _ in range(3))
    contender = Contender("canon auto", lambda: fast.attention, "canon auto")
    measures = host_time._measures({}, contender, fast.attention, [q, k, v], torch.ones_like(q))
    loop = dict(zip(host_time.MEASURES, measures, strict=True))["loop"].run
    loop()
    first = q.grad.clone()
    loop()
    assert torch.equal(q.grad, first)
