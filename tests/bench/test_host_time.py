"""`canon bench host` times eager calls."""

from benching import on_cpu

from canon.bench import host_time
from canon.bench.shapes import shape_of


def test_the_bench_times_eager_calls():
    settings = on_cpu("canon auto|SDPA flash", 3)
    rows = host_time.measure(shape_of("1,16,2,1,16,causal"), settings)
    assert host_time.tables(rows)[0].row_count == len(rows)
    assert rows[-1]["contender"] == host_time.NO_KERNELS.name
    assert all(rows[-1][f"{name}_wall_ms"] for name in host_time.MEASURES)
    timed = {row["contender"]: row for row in rows if "failed" not in row}
    assert {"canon auto", "SDPA flash"} <= set(timed)
    assert all(len(row["chain_wall_ms"]) == 3 for row in timed.values())
