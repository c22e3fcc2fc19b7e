"""Claims about the parts of a call's host time."""

import importlib
import time

import torch

from canon import Mask, fast
from canon.fast import local
from canon.testing import host_parts, process_groups

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
