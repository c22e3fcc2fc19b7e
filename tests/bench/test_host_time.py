"""`canon bench host` times eager calls."""

import torch
from benching import on_cpu

from canon import fast
from canon.bench import host_time
from canon.bench.measuring import Contender
from canon.bench.shapes import shape_of


def test_the_bench_times_the_training_loop():
    settings = on_cpu("canon auto|SDPA flash", 3)
    rows = host_time.measure(shape_of("1,16,2,1,16,causal"), settings)
    assert host_time.tables(rows)[0].row_count == len(rows)
    assert rows[-1]["contender"] == host_time.NO_KERNELS.name
    assert all(rows[-1][f"{name}_wall_ms"] for name in host_time.MEASURES)
    timed = {row["contender"]: row for row in rows if "failed" not in row}
    assert {"canon auto", "SDPA flash"} <= set(timed)
    assert all(len(row["loop_wall_ms"]) == 3 for row in timed.values())


def test_an_iteration_of_the_loop_replaces_the_gradients():
    q, k, v = (torch.randn(1, 8, 1, 16, requires_grad=True) for _ in range(3))
    contender = Contender("canon auto", lambda: fast.attention)
    loop = host_time._made([q, k, v], torch.ones_like(q), contender).eager["loop"]
    loop()
    first = q.grad.clone()
    loop()
    assert torch.equal(q.grad, first)
