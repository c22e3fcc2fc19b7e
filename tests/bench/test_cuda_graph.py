"""`canon bench` times a replayed CUDA graph of both passes if it agrees, and else records the
reason.
"""

from types import SimpleNamespace

import pytest
import torch
from benching import no_clock, on_cpu  # noqa: F401 (a fixture)

from canon.bench import kernels, shapes
from canon.bench.cuda_graph import CapturedPasses, captured

pytestmark = pytest.mark.interpreted

SHAPE = shapes.shape_of("1,40,2,2,16,causal")


def eager_graph(attend, q, k, v, dout, *, factor=1.0):
    """Return a stand-in for a CUDA graph: a replay calls the function again, and multiplies dk by
    ``factor``.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both():
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    results = both()

    def replay():
        for x, again, f in zip(results, both(), (1.0, 1.0, factor, 1.0), strict=True):
            x.copy_(f * again)

    return CapturedPasses(SimpleNamespace(replay=replay), (q, k, v, dout), results, both())


def bench_kernels():
    rows = kernels.measure(SHAPE, on_cpu("canon triton split"))
    (table,) = kernels.tables(rows)
    return rows[0], list(table.columns[4].cells)


def test_a_graph_has_a_cell_in_the_table_of_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "captured", eager_graph)
    row, cells = bench_kernels()
    assert len(row["graph_wall_ms"]) == len(row["graph_host_ms"]) == 2
    assert cells == [kernels.clocks(row, "graph")] != ["-"]
    assert "graph_failed" not in row


@pytest.mark.parametrize("factor", [1.02, torch.nan])
def test_a_graph_with_other_results_has_no_figure(factor, monkeypatch):
    monkeypatch.setattr(kernels, "captured", lambda *inputs: eager_graph(*inputs, factor=factor))
    row, cells = bench_kernels()
    assert "dk of a replayed graph differs" in row["graph_failed"]
    assert cells == ["-"]
    assert "graph_wall_ms" not in row
    assert row["agrees"]
    assert row["both_wall_ms"]


@pytest.mark.gpus(1)
def test_a_failed_capture_leaves_the_stream_and_the_allocator_usable():
    def synchronizes(q, k, v):
        out = q * k * v
        torch.cuda.current_stream().synchronize()  # forbidden during a capture, and invalidates it
        return out

    inputs = [torch.ones(8, 8, device="cuda") for _ in range(4)]
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        captured(synchronizes, *inputs)
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    captured(lambda q, k, v: q * k * v, *inputs).check()
