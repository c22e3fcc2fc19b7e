"""`canon bench` reads its shapes and measures nothing that disagrees."""

import pytest
from benching import no_clock, on_cpu, options_of  # noqa: F401 (a fixture)

from canon import Mask
from canon.bench import kernels, mask_time, shapes, timing
from canon.bench.packs import sampled_packs

pytestmark = pytest.mark.interpreted


# ---------------------------------------------------------------------- shapes
MASKS = {
    "window:8": Mask.window(64, 8, 0),
    "full:24": Mask.full(64, 24),
    "prefix:9": Mask.prefix(64, 9),
    "tree:60+2x2": Mask.tree([-1, 0, 0], [60, 2, 2]),
}


@pytest.mark.parametrize("name", MASKS)
def test_shapes_and_masks_are_read(name):
    shape = shapes.shape_of(f"2,64,4,2,16,{name}")
    assert (shape.b, shape.n, shape.h, shape.g, shape.d) == (2, 64, 4, 2, 16)
    assert shape.mask == MASKS[name]
    assert shape.operations == 4 * 2 * 4 * 16 * shape.mask.area


def test_other_shapes_are_refused():
    assert shapes.shape_of("2,64,4,2,16").mask_name == "causal"
    assert shapes.shape_of("1,4096,4,2,16,pack:2").mask == Mask.documents(sampled_packs(4096, 3)[2])
    sizes = ("1,2,3,causal", "1,64,4,3,16,full", "1,0,1,1,16,full")
    masks = ("triangle", "window", "prefix:65", "tree:60+2x3", "tree:60+4x", "full,causal")
    for text in (*sizes, *(f"1,64,4,2,16,{mask}" for mask in masks)):
        with pytest.raises(ValueError, match="expected"):
            shapes.shape_of(text)


# ---------------------------------------------------------------------- measuring
def test_every_method_agrees_before_it_is_timed():
    shape = shapes.shape_of("1,24,2,1,16,documents:9")
    rows = kernels.measure(shape, on_cpu("canon triton"))
    names = ["split", "fused", "head_parallel"]
    assert [row["contender"] for row in rows] == [f"canon triton {name}" for name in names]
    assert all(row["agrees"] and row["backward_ms"] == [1.0] * 6 for row in rows)
    # they share one forward pass
    assert [("forward_ms" in row) for row in rows] == [True, False, False]
    assert rows[0]["forward_tflops"] == shape.operations / 1e9
    assert rows[0]["backward_tflops"] == 2.5 * shape.operations / 1e9


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_method_that_disagrees_gets_no_figure(factor, monkeypatch):
    from canon import fast

    attention = fast.attention
    monkeypatch.setattr(
        fast, "attention", lambda q, k, v, mask, **kw: attention(q, k, v, mask, **kw) * factor
    )
    shape = shapes.shape_of("1,40,2,2,16,causal")
    rows = kernels.measure(shape, on_cpu("canon triton split"))
    assert "disagrees" in rows[0]["failed"]
    assert "backward_ms" not in rows[0]


def test_the_time_of_a_new_mask_has_no_repeated_call(monkeypatch):
    monkeypatch.setattr(mask_time, "peak_mb", lambda *_: 1.0)
    (row,) = mask_time.measure(shapes.shape_of("1,96,4,2,16,documents:30"), on_cpu())
    assert mask_time.tables([row])[0].row_count == 1
    names = "new_mask_ms", "made_ms", "first_ms", "repeated_ms"
    for new, made, first, repeated in zip(*(row[name] for name in names), strict=True):
        assert new == made + first - repeated


def test_a_cold_run_follows_a_read_of_another_buffer(monkeypatch):
    flushed = []
    monkeypatch.setattr(timing, "flush_of", lambda device: lambda: flushed.append(device))
    monkeypatch.setattr("canon.bench.measuring.flush_of", timing.flush_of)
    shape = shapes.shape_of("1,2,2,1,16,full:300")
    kernels.measure(shape, on_cpu("canon auto", 1))
    assert flushed == []
    rows = kernels.measure(shape, on_cpu("canon auto", 1, cold=True))
    assert len(flushed) == sum(
        name in row for row in rows for name in ("forward_ms", "backward_ms")
    )
