"""A plan lives as long as its readers, and all plans together stay within a limit of bytes."""

import functools
import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper import captured, inputs
from sharded import all_equal

from canon import Mask, fast, reference
from canon.fast.tables import device_plans
from canon.fast.tables.cells import Cells
from canon.fast.tables.work_tables import work_table
from canon.masks import plan_cache
from canon.masks.plan_cache import PlanCache, sizes
from canon.testing import process_groups

pytestmark = pytest.mark.interpreted


def block(size):
    return torch.empty(size, dtype=torch.uint8)


def test_a_device_drops_its_own_least_recently_used_plans(monkeypatch):
    """Meta stands for a GPU. An eviction there does not look at the plans of the host."""
    on_gpu = lambda: torch.empty(1000, dtype=torch.uint8, device="meta")
    cache = PlanCache(device_limit=3000)
    monkeypatch.setattr(cache.plans, "items", lambda: pytest.fail("it scans"), raising=False)
    for key in "abc":
        cache.find(key, on_gpu)
        cache.find(f"host {key}", lambda: block(10))
    cache.find("a", lambda: pytest.fail("a is in the cache"))
    cache.find("d", on_gpu)
    assert set(cache.plans) == {"host a", "host b", "c", "host c", "a", "d"}
    cache.drop("c")
    cache.find("e", on_gpu)
    assert set(cache.plans) == {"host a", "host b", "host c", "a", "d", "e"}
    assert cache.held == {"meta": 3000, "cpu": 30 + 6 * plan_cache.ENTRY}


def test_a_plan_larger_than_the_limit_is_kept_until_the_next_one():
    cache = PlanCache(host_limit=100)
    first = cache.find("a", lambda: block(1000))
    assert cache.find("a", lambda: pytest.fail("a is in the cache")) is first
    cache.find("b", lambda: block(1000))
    assert list(cache.plans) == ["b"]
    assert first.numel() == 1000, "a plan in use stays valid"


def test_a_call_has_one_key_however_it_passes_its_arguments(monkeypatch):
    monkeypatch.setattr(plan_cache, "PLANS", cache := PlanCache())

    @plan_cache.cached_plan
    def made(a, b=2, c=3):
        return [a, b, c]

    first = made(1)
    for same in (made(1, 2), made(1, c=3), made(c=3, b=2, a=1), made(1, 2, 3)):
        assert same is first
    assert made(1, c=4) == [1, 2, 4]
    assert len(cache.plans) == 2


def test_masks_and_tables_state_their_size():
    mask = Mask.documents(list(range(0, 3001, 3)))
    assert 100 * len(mask.bands) < sizes(mask)["cpu"] < 1000 * len(mask.bands)
    table = work_table(Cells(mask), 128, 128, 128, False, True, "cpu")
    assert sizes(table)["cpu"] >= table.tiles.nbytes + table.spans.nbytes
    plan = reference.cast_plan(Mask.full(3000), reference.Layout.zigzag(3000, 4))
    assert sizes(plan.casts_of(plan, 0))["cpu"] > 100 * len(plan.received(0, 0))


def test_120_steps_with_new_masks_leave_memory_flat(monkeypatch):
    """The lowered limits are reached within the first steps."""
    monkeypatch.setattr(plan_cache, "PLANS", cache := PlanCache(host_limit=1 << 20))
    resident = []

    def step(number):
        mask = Mask.documents(
            sorted({*range(0, 32 + number % 60, 2), 1 + number % 95, 96}), window=(number, 0)
        )
        q, k, v = (torch.ones(48, 1, 4).requires_grad_() for _ in range(3))
        layout = fast.dispatch(mask, 2, chunk=4)
        for _ in range(2):  # layers
            reference.magi_attention(q, k, v, mask, layout).sum().backward()

    def program():
        for number in range(120):
            step(number)
            if torch.distributed.get_rank() == 0 and number in (60, 119):
                gc.collect()
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident.append(pages * os.sysconf("SC_PAGESIZE"))

    process_groups.threads(program, 2)
    assert cache.held["cpu"] <= 1 << 20
    assert cache.made > 480
    assert resident[1] - resident[0] < 9 << 20, "plans of 60 steps would be larger"


def test_the_second_thread_gets_the_plan_of_the_first():
    cache = PlanCache()

    def make():
        cache.find("key", lambda: "first")  # another thread, meanwhile
        return "second"

    assert cache.find("key", make) == "first"


class Graph:
    """A torch.cuda.CUDAGraph without a GPU."""

    get_currently_capturing_graph = None


class PlanOnAGpu:
    is_cuda = True

    def data_ptr(self):
        return 8


def test_plans_of_a_captured_graph_live_as_long_as_the_graph(monkeypatch):
    graphs = [Graph(), Graph()]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Graph, "get_currently_capturing_graph", lambda: graphs[-1])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    plans = [PlanOnAGpu(), PlanOnAGpu()]
    alive = [weakref.ref(plan) for plan in plans]
    plan_cache.keep_for_stream(plans.pop())
    del graphs[1]
    gc.collect()
    assert alive[1](), "the graph may still run"
    plan_cache.keep_for_stream(plans.pop())  # the next capture
    assert alive[0]()
    assert not alive[1]()
    graphs.clear()
    assert not plan_cache._captured


def test_only_other_streams_and_captures_wait_for_a_plan_and_keep_it(monkeypatch):
    """An upload, its memory and kernels are in order on one stream. Numbers stand for streams."""
    now, waits, kept = {"stream": 7, "captures": False}, [], []
    stream = lambda _: SimpleNamespace(cuda_stream=now["stream"], wait_event=waits.append)
    event = SimpleNamespace(record=lambda _: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captures"])
    raw = {"_cuda_getCurrentRawStream": "stream", "_cuda_isCurrentStreamCapturing": "captures"}
    for name, of in raw.items():
        monkeypatch.setattr(torch._C, name, lambda *_, of=of: now[of], raising=False)
    table = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(device_plans, "tensors_in", lambda _: [table])
    monkeypatch.setattr(device_plans, "keep_for_stream", kept.append)
    monkeypatch.setattr(plan_cache, "PLANS", PlanCache())
    plan = device_plans.device_plan(lambda number: torch.zeros(number))
    for _ in range(2):
        plan(3, "cpu")
    assert not waits
    assert not kept
    now["stream"] = 8
    plan(3, "cpu")
    assert waits == [event]
    assert kept == [table]
    now |= {"stream": 7, "captures": True}
    plan(3, "cpu")
    assert kept == [table, table]


# --- on GPUs


DOCUMENTS = Mask.documents([0, 1, 300, 700, 1024], window=(200, 0))
tensors = lambda: inputs(DOCUMENTS, h=8, g=2)[:4]


def both_passes(q, k, v, dout, mask, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = fast.attention(*leaves, mask, **options)
    return out, *torch.autograd.grad(out, leaves, dout)


def fill_memory():
    """Write over every free block of the allocator."""
    blocks = [
        torch.full((1 << size,), -1, dtype=torch.int32, device="cuda")
        for size in range(6, 18)
        for _ in range(40)
    ]
    torch.cuda.synchronize()
    return blocks


@pytest.mark.gpus(1)
@pytest.mark.parametrize("method", ["split", "fused", "head_parallel", "auto"])
def test_a_captured_graph_replays_both_passes_and_keeps_its_plans(method, deterministic):
    both = functools.partial(both_passes, *tensors(), DOCUMENTS, backward=method)
    expected = both()
    graph, replayed = captured(both)
    plan_cache.PLANS.clear()
    gc.collect()
    blocks = fill_memory()
    for x in replayed:
        x.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all_equal(replayed, expected)
    del blocks, replayed, graph
    gc.collect()
    # older versions keep plans for ever
    if hasattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph"):
        assert not plan_cache._captured


@pytest.mark.gpus(1)
def test_another_stream_may_read_a_plan_that_the_cache_has_dropped():
    given = tensors()
    expected = both_passes(*given, DOCUMENTS)  # the tables belong to this stream
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        got = both_passes(*given, DOCUMENTS)
    plan_cache.PLANS.clear()
    gc.collect()
    blocks = fill_memory()
    assert all_equal(got, expected)
    del blocks


@pytest.mark.gpus(1)
def test_a_new_mask_during_a_capture_raises():
    given = tensors()
    both_passes(*given, Mask.causal(1024))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        given[0].add_(1)
        with pytest.raises(RuntimeError, match="before the capture"):
            both_passes(*given, Mask.window(1024, 77, 0))
    torch.cuda.synchronize()
    both_passes(*given, Mask.causal(1024))
