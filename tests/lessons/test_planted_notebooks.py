"""The notebooks find a wrong result of each fast function, of the reference and of a kernel."""

from collections import Counter
from functools import partial

import nbformat
import pytest
import real_ranks
import torch
import torch.distributed as dist
from folders import NOTEBOOKS
from hopper import plant
from real_ranks import FunctionCall, Place, Span

from canon import Layout, Mask, fast
from canon.fast.kernels.gluon import masking
from canon.reference import local
from canon.testing import process_groups

SMALL = Place("cpu", 2, 64, h=2, g=2, d=16)
FUNCTIONS = {
    "02_ring_and_zigzag": ("ring_attention", "zigzag_attention", "striped_attention"),
    "03_strided": ("strided_attention",),
    "04_magi": ("magi_attention", "group_cast", "group_reduce"),
}
CASES = [(name, function) for name, functions in FUNCTIONS.items() for function in functions]


def cells_of(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


def section(name):
    """Run the imports and the section "On real ranks" of a notebook. Return its names."""
    cells = cells_of(name)
    start, stop = (
        next(place for place, cell in enumerate(cells) if f"## {title}" in cell.source.splitlines())
        for title in ("On real ranks", "Exercises")
    )
    imports = next(cell for cell in cells if cell.cell_type == "code")
    names = {}
    for cell in [imports, *cells[start:stop]]:
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{name}, On real ranks", "exec"), names)
    return names


def started(name):
    """Run the first code cell of a notebook. Return its names and the other cells of code."""
    imports, *others = (cell.source for cell in cells_of(name) if cell.cell_type == "code")
    names = {}
    exec(imports, names)
    return names, others


def slightly_wrong(function, *given, **options):
    """Return the results of a function with an error of some percent in one row."""

    def changed(x):
        factor = torch.ones_like(x)
        factor[(0,) * (x.dim() - 2)] = 1.1
        return x * factor

    found = function(*given, **options)
    return tuple(map(changed, found)) if isinstance(found, tuple) else changed(found)


@pytest.fixture
def short_threads(monkeypatch):
    """Run sections with short inputs, on two threads instead of processes."""
    monkeypatch.setattr(real_ranks, "here", lambda: SMALL)
    monkeypatch.setattr(process_groups, "processes", process_groups.threads)
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "function"), CASES)
@pytest.mark.usefixtures("short_threads")
def test_a_wrong_result_fails_an_assertion_of_the_section(name, function, monkeypatch):
    monkeypatch.setattr(fast, function, partial(slightly_wrong, getattr(fast, function)))
    differs = r"rank 0, fast: \w+ is \d+\.\d times the bound"
    with pytest.raises(AssertionError, match=None if function.startswith("group") else differs):
        section(name)


def test_a_fault_in_the_reference_fails_the_notebook(monkeypatch):
    names, others = started("00_softmax_in_pieces")
    compared = next(cell for cell in others if "k_all, v_all" in cell)
    exec(compared, names)
    monkeypatch.setattr(local, "tiled_forward", partial(slightly_wrong, local.tiled_forward))
    with pytest.raises(AssertionError):
        exec(compared, names)


@pytest.mark.sweep(1)
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["08_backward", "09_grouped_heads", "10_overlap_on_hopper"])
def test_an_off_by_one_in_the_causal_mask_of_gluon_fails_the_notebook(name, monkeypatch):
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    names, others = started(name)
    compared = [
        cell for cell in others if "agree_with_reference(" in cell or "forward_runs.run(" in cell
    ]
    compared = [cell for cell in compared if "Mask.causal(" in cell]
    assert compared
    for cell in compared:
        exec(cell, names)
    plant(monkeypatch, masking, "visible_columns", "rows + hi + 1", "rows + hi + 2")
    for cell in compared:
        with pytest.raises(AssertionError, match=r"^gluon, \w+: out is \d+\.\d times the bound"):
            exec(cell, names)


def test_every_distributed_function_of_fast_is_in_a_section():
    on_one_rank = {"attention", "attention_forward", "attention_backward", "merge"}
    sends_nothing = {"dispatch", "cast_plan", "plan_report", "prepare", "backend", "warm_up"}
    not_taught = {"latent_attention", "decode_attention"}
    functions = {name for name in fast.__all__ if name[0].islower()}
    assert functions - on_one_rank - not_taught - sends_nothing == {name for _, name in CASES}


def test_exposed_time_is_that_of_messages_without_a_kernel():
    spans = [
        Span("message", "hop 0", 0, 4),
        Span("message", "hop 1", 3, 10),
        Span("forward", "a", 1, 2),
        Span("other", "b", 6, 12),
    ]
    result = real_ranks.RankResult(0, "", 0, {}, {}, {}, spans)
    assert result.exposed == 10 - 1 - 4


def test_spans_of_a_profile_begin_after_the_ranks_have_met():
    """The pause comes before the message of `meet`. Copies to and from the host are no part of the
    timeline.
    """
    before = [(0, 5, "forward_kernel"), (5, 35, "spin_kernel"), (36, 40, "ncclDevKernel_AllReduce")]
    after = [
        (50, 60, "ncclDevKernel_SendRecv"),
        (41, 42, "Memcpy HtoD"),
        (52, 80, "dkdv_kernel"),
        (80, 90, "delta_kernel"),
    ]
    expected = [
        Span("message", after[0][2], 0.0, 0.01),
        Span("backward", "dkdv_kernel", 0.002, 0.03),
    ]
    expected += [Span("other", "delta_kernel", 0.03, 0.04)]
    assert real_ranks.spans_of(before + after) == expected
    assert real_ranks.spans_of(after) == expected  # threads on one GPU do not meet
    assert real_ranks.spans_of([]) == []


@pytest.mark.usefixtures("short_threads")
def test_unequal_bits_are_found(monkeypatch):
    attend, calls = fast.zigzag_attention, Counter()

    def other_bits(*given, **options):
        out, lse = attend(*given, **options)
        calls[dist.get_rank()] += 1
        change = torch.zeros_like(lse)
        change[0, 0, 0] = calls[dist.get_rank()] * 2.0**-21 * lse[0, 0, 0].abs().detach()
        return out, lse + change

    monkeypatch.setattr(fast, "zigzag_attention", other_bits)
    call = FunctionCall("zigzag_attention", Mask.causal(32), Layout.zigzag(32, 2))
    for result in SMALL.compare({"ring": call})["ring"]:
        assert result.equal_runs == {"reference": True, "fast": False}
        assert not result.same_bits
        assert result.agrees
