"""The sections "On real ranks" of the notebooks find a fault in each fast function: a wrong result,
and an exception.
"""

import copy
from functools import partial
from pathlib import Path

import nbformat
import pytest
import real_ranks
import torch
from real_ranks import FunctionCall, Place, Span

from canon import Layout, Mask
from canon.fast.kernels.gluon import masking
from canon.reference import local
from canon.testing import process_groups

FOLDER = Path(__file__).parents[2] / "notebooks"
SMALL = Place("cpu", 2, 64, h=2, g=2, d=16)
FUNCTIONS = {
    "02_ring_and_zigzag": ("ring_attention", "zigzag_attention", "striped_attention"),
    "03_strided": ("strided_attention",),
    "04_magi": ("magi_attention", "group_cast", "group_reduce"),
}
CASES = [(name, function) for name, functions in FUNCTIONS.items() for function in functions]
FIRST = "02_ring_and_zigzag"  # its calls have the names of their functions
PLANTED = "this fault was planted"
run_processes = process_groups.processes


def section(name):
    """Run the imports and the section "On real ranks" of a notebook. Return its names."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
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


def fail(*_, **__):
    raise RuntimeError(PLANTED)


def slightly_wrong(function, *given, **options):
    """Return the results of a function with an error of some percent in one row."""

    def changed(x):
        factor = torch.ones_like(x)
        factor[(0,) * (x.dim() - 2)] = 1.1
        return x * factor

    found = function(*given, **options)
    return tuple(map(changed, found)) if isinstance(found, tuple) else changed(found)


def one_more(function, *given):
    left, right = function(*given)
    return left, right + 1


def with_a_fault(name, fault, program):
    """Run ``program`` on a rank where ``canon.fast``, or its Triton kernels, have the fault in the
    function ``name``.
    """
    from canon import fast
    from canon.fast.kernels.triton import dkdv, key_loop

    if name == "visible_columns":
        for kernel in (key_loop, dkdv):
            kernel.visible_columns = partial(one_more, kernel.visible_columns)
        return program()
    setattr(fast, name, fail if fault == "raises" else partial(slightly_wrong, getattr(fast, name)))
    return program()


@pytest.fixture
def plant(monkeypatch):
    """Return ``plant(function, fault)``. Ranks are two processes, with short inputs."""
    monkeypatch.setattr(real_ranks, "here", lambda: SMALL)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("MPLBACKEND", "Agg")

    def plant(*fault):
        run = lambda program, ranks: run_processes(partial(with_a_fault, *fault, program), ranks)
        monkeypatch.setattr(process_groups, "processes", run)

    return plant


@pytest.mark.sweep(1)  # `make test` runs the notebooks, too
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_a_fault_the_section_passes(name, plant, capsys):
    names = section(name)
    assert {call.function for call in names["calls"].values()} <= set(FUNCTIONS[name])
    printed = capsys.readouterr().out
    assert str(SMALL) in printed
    assert "ms" not in printed.split(), "times of the interpreter look like results"
    for ranks in names["results"].values():
        assert [one.rank for one in ranks] == [0, 1]


def test_the_table_of_gpus_has_times():
    times = {"reference": 12.5, "fast": 2.5}
    right = {half: real_ranks.Agreement((), ()) for half in times}
    equal = dict.fromkeys(times, True)
    on = lambda device: real_ranks.RankResult(0, device, 64, right, equal, times, [])
    assert "12.50       2.50" in real_ranks.table({"ring": [on("NVIDIA H200")]})
    assert "2.50" not in real_ranks.table({"ring": [on("CPU")]})


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "function"), CASES)
def test_a_wrong_result_fails_an_assertion_of_the_section(name, function, plant):
    plant(function, "wrong")
    differs = (
        f"{function}, rank 0, fast: "
        if name == FIRST
        else ""
        if function.startswith("group")
        else "rank 0, fast: "
    )
    with pytest.raises(
        AssertionError,
        match=differs
        + (
            r"\w+ is \d+\.\d times the "
            r"bound"
        )
        if differs
        else None,
    ):
        section(name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_exception_of_a_rank_ends_the_section_with_its_traceback(name, plant):
    plant(FUNCTIONS[name][-1], "raises")
    with pytest.raises(
        RuntimeError,
        match=rf"(?s)rank \d: RuntimeError: {PLANTED}.*Traceback.*in "
        r"fail",
    ):
        section(name)


@pytest.mark.interpreted
def test_an_off_by_one_in_the_mask_of_triton_fails_the_section(plant):
    plant("visible_columns", "sees one more key")
    with pytest.raises(
        AssertionError,
        match=r"^ring_attention, rank 0, fast: out is \d+\.\d "
        r"times the bound",
    ):
        section(FIRST)


def test_a_fault_in_the_reference_fails_the_notebook(monkeypatch):
    cells = nbformat.read(FOLDER / "00_softmax_in_pieces.ipynb", as_version=4).cells
    imports, *others = (cell.source for cell in cells if cell.cell_type == "code")
    names = {}
    exec(imports, names)
    compared = next(cell for cell in others if "k_all, v_all" in cell)
    exec(compared, names)
    monkeypatch.setattr(local, "tiled_forward", partial(slightly_wrong, local.tiled_forward))
    with pytest.raises(AssertionError):
        exec(compared, names)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["08_backward", "09_grouped_heads", "10_overlap_on_hopper"])
def test_an_off_by_one_in_the_causal_mask_of_gluon_fails_the_notebook(name, monkeypatch):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    imports, *others = (cell.source for cell in cells if cell.cell_type == "code")
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {}
    exec(imports, names)
    compared = [
        cell for cell in others if "agree_with_reference(" in cell or "forward_runs.run(" in cell
    ]
    compared = [cell for cell in compared if "Mask.causal(" in cell]
    assert compared
    for cell in compared:
        exec(cell, names)
    right, wrong = masking.visible_columns, copy.copy(masking.visible_columns)
    wrong.raw_src = ["".join(right.raw_src).replace("rows + hi + 1", "rows + hi + 2")]
    assert wrong.raw_src != ["".join(right.raw_src)]
    monkeypatch.setattr(masking, "visible_columns", wrong)
    for cell in compared:
        with pytest.raises(AssertionError, match=r"^gluon, \w+: out is \d+\.\d times the bound"):
            exec(cell, names)


def test_every_distributed_function_of_fast_is_in_a_section():
    from canon import fast

    not_distributed = {
        "attention",
        "attention_forward",
        "attention_backward",
        "merge",
        "decode_attention",
    }
    not_taught = {"latent_attention"}
    sends_nothing = {"dispatch", "cast_plan", "plan_report", "prepare", "backend", "warm_up"}
    others = (
        {name for name in fast.__all__ if name[0].islower()}
        - not_distributed
        - not_taught
        - sends_nothing
    )
    assert others == {function for _, function in CASES}


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


def test_unequal_bits_are_found(plant, monkeypatch):
    mask, layout = Mask.causal(32), Layout.zigzag(32, 2)
    call = FunctionCall("zigzag_attention", mask, layout)
    monkeypatch.setattr(
        process_groups,
        "processes",
        lambda program, ranks: run_processes(partial(drifting, program), ranks),
    )
    for result in SMALL.compare({"ring": call})["ring"]:
        assert result.equal_runs == {"reference": True, "fast": False}
        assert not result.same_bits
        assert result.agrees


def drifting(program):
    """Run ``program`` where each call of the fast function changes the last bit of one number of
    lse.
    """
    from canon import fast

    attend, calls = fast.zigzag_attention, []

    def other_bits(*given, **options):
        out, lse = attend(*given, **options)
        calls.append(None)
        change = torch.zeros_like(lse)
        change[0, 0, 0] = len(calls) * 2.0**-21 * lse[0, 0, 0].abs().detach()
        return out, lse + change

    fast.zigzag_attention = other_bits
    return program()
