"""Claims about `canon check --random`: seed and number determine a case, and faults are found."""

import json
import re
import subprocess
import sys
from itertools import islice

import pytest
import sampling
import torch

from canon.check import draws
from canon.check.inputs import judging
from canon.check.planted_values import TENSORS, VALUES
from canon.check.random_source import RandomSource
from canon.reference import Layout, Mask
from canon.route.algorithm import DECLARATIONS
from canon.testing.judge import Attended, agreement, dense, oracle, orders
from canon.testing.roundings import roundings

FAULTY = """
from functools import partial
from canon import reference
import torch

globals().update(
    (name, partial(f))
    for name, f in vars(reference).items()
    if callable(f) and not isinstance(f, type)
)


def ring_attention(q, k, v, mask=None, layout=None, **options):
    {line}
    return reference.ring_attention(q, k, v, mask, layout, **options)
"""


def kept_cases(record):
    return {row[0]: row[1:] for one_run in record["runs"] for row in one_run["cases"]}


def test_random_cases_agree(run):
    number = 50 if sampling.ALL else 25
    status, printed, record = run(f"--random {number} --seed 20")
    assert status == 0, printed.out
    assert len(kept_cases(record)) == number
    verdicts = {index: verdict for index, (_, verdict, _) in kept_cases(record).items()}
    assert set(verdicts.values()) <= {"agrees", "declined", "not judged"}
    assert all(
        draws.drawn(20, index).planted
        for index, verdict in verdicts.items()
        if verdict == "not judged"
    )


def test_a_case_is_a_pure_function_of_seed_and_number():
    program = "from canon.check.draws import drawn; print([drawn(3, i) for i in range(40)])"
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert other.strip() == str([draws.drawn(3, i) for i in range(40)])
    assert draws.drawn(3, 0) != draws.drawn(4, 0)


def test_all_kinds_are_drawn():
    """Draw 800 cases and find every function, constructor, layout, number of ranks, dtype, option
    and small size.
    """
    cases = [draws.drawn(0, i) for i in range(800)]
    values = lambda name: {getattr(case, name) for case in cases}
    assert values("function") == set(draws.WEIGHTS)
    constructors = [
        "full",
        "causal",
        "window",
        "documents",
        "prefix",
        "block_causal",
        "ranges",
        "tree",
        "concat",
    ]
    methods = [".crop(", ".shift(", "window=(", "causal=False", "q_valid", "k_valid", "left=-1"]
    text = "".join(case.mask for case in cases)
    for word in (*(f"Mask.{name}(" for name in constructors), *methods):
        assert word in text, word
    assert re.search(r"documents\(\[[^]]*\b(\d+), \1\b", text), "an empty document"
    assert values("ranks") == set(range(1, 9))
    assert values("dtype") == {"", "float64", "float32", "float16", "bfloat16"}
    used = "both", "out", "lse", "no lse", "sum", "forward", "forward, no lse"
    assert values("used") == set(used)
    assert values("method") == {"auto", "split", "fused", "head_parallel"}
    declared = set().union(*(DECLARATIONS[name].defaults for name in draws.ATTEND))
    untried = {"scale", "backward", "return_max_logits"}  # the first two are fields of a case
    options = {name for case in cases for name, _ in case.options}
    assert options == declared - untried | {"sink", "columns"}
    planted = [case.planted.split(" in ") for case in cases if case.planted]
    assert [set(some) for some in zip(*planted, strict=True)] == [set(VALUES), set(TENSORS)]
    attended = [case.shape for case in cases if case.dtype]
    scales = [shape.scale or 0 for shape in attended]
    assert 0 in {shape.scale for shape in attended}
    assert min(scales) < 0
    assert max(scales) > 1e5, "scores near the limit of canon.fast"
    assert any(shape.widths[0] % 2 and len({*shape.widths}) == 2 for shape in attended)
    latents = [case for case in cases if case.has_latents]
    assert {case.function for case in latents} == {"latent_attention", "prepare"}
    assert all(0 < case.shape.latent[1] < case.shape.widths[0] for case in latents)
    masks = {case: draws.evaluated(case.mask) for case in cases}
    several = {case.function for case, mask in masks.items() if isinstance(mask, tuple)}
    assert several == draws.FOR_EACH_SEQUENCE, "a mask for each sequence"
    masks = {case: mask for case, mask in masks.items() if not isinstance(mask, tuple)}
    assert {0, 1} <= {mask.queries for mask in masks.values()}
    assert any(mask.queries != mask.keys for mask in masks.values())
    shared = [case.layout_of(mask, case.ranks) for case, mask in masks.items() if case.ranks > 1]
    assert any(0 < layout.tokens < layout.ranks for layout in shared), "more ranks than tokens"
    steps = [
        (piece.step, layout.ranks)
        for layout in shared
        for held in layout.ranges_per_rank
        for piece in held
        if len(piece) > 1
    ]
    assert any(step not in (1, ranks) for step, ranks in steps), "neither contiguous nor striped"


@pytest.mark.parametrize("table", ["cpu", "gluon", "cuda"])
def test_float16_cases_come_near_the_largest_dS(table):
    """P is uniform in them, so dS = P (dP - delta) needs no softmax. All results are float16
    numbers.
    """
    source, largest = RandomSource(), []
    cases = (draws.drawn(0, index, table) for index in range(600))
    near = (case for case in cases if case.ds and case.shape.batch < 2 and not case.has_sink)
    for case in islice(near, 25 if sampling.ALL else 12):
        x = source.inputs(case, "cpu")
        (exact, *_), arguments = judging(case, x)
        q, k, v, dout = (
            t.reshape(-1, *t.shape[-2:]).nan_to_num().double() for t in (x.q, x.k, x.v, x.dout)
        )
        assert all(
            t.nan_to_num(0, 0, 0).abs().max() <= 65504
            for t in exact(*arguments)
            if t is not None and t.numel()
        )
        p = x.mask.dense().double()
        p = p / p.sum(1, keepdim=True).clamp(min=1)
        dp = torch.einsum("ihd,jhd->hij", dout, v.repeat_interleave(q.shape[1] // k.shape[1], 1))
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        largest.append(float(ds.abs().max()) if ds.numel() else 0.0)
        assert largest[-1] <= 0.91 * 65504
    assert max(largest) > 0.85 * 65504
    assert sum(size > 1000 for size in largest) > len(largest) / 2


def test_near_the_range_of_dS_the_honest_evaluation_is_finite():
    """dP is 1.6e6 in this case, beyond float16, and all results are within it."""
    source, case = RandomSource(), draws.drawn(77, 483)
    assert case.ds
    expected = source.expected(case, case.layout_of(source.mask(case), 1), "cpu")
    for honest in expected.honest:
        for exact, found in zip(expected.exact, honest, strict=True):
            seen = exact.isfinite()
            torch.testing.assert_close(
                found.double()[seen],
                exact[seen],
                rtol=0.05,
                atol=0.02 * float(exact[seen].abs().max()),
            )


def test_a_failure_names_its_draws_and_the_command_that_repeats_it(
    run, write_module, tmp_path, monkeypatch
):
    write_module("off_ring", FAULTY.format(line="v = v * 1.02"))
    monkeypatch.setattr(draws, "WEIGHTS", {"attention": 1, "ring_attention": 1, "prepare": 1})
    monkeypatch.setattr(draws, "PREPARED", {"ring_attention": "zigzag"})
    status, printed, record = run("off_ring --random 12 --seed 2")
    assert status == 1
    wrong = {
        number for number, (_, verdict, _) in kept_cases(record).items() if verdict == "disagrees"
    }
    assert wrong
    names = {kept_cases(record)[number][0] for number in wrong}
    assert names == {"ring_attention", "prepare"}, "a case of prepare calls the function"
    (failures,) = [one_run["failures"] for one_run in record["runs"]]
    assert {failure["index"] for failure in failures} == wrong
    failure = failures[0]
    assert failure["draws"]["mask"].startswith("Mask.")
    for name in (
        "ranks",
        "layout",
        "dtype",
        "heads",
        "widths",
        "scale",
        "method",
        "differentiated",
    ):
        assert name in failure["draws"]
    index = failure["index"]
    first = f" --first {index}" if index else ""
    assert failure["repeat"] == f"canon check off_ring --random 1 --seed 2{first}"
    assert failure["repeat"] in printed.out
    status, printed, record = run(
        *failure["repeat"].split()[2:], "--record", tmp_path / "again.json"
    )
    again = json.loads((tmp_path / "again.json").read_text())
    assert status == 1
    assert kept_cases(again) == {index: kept_cases(record)[index]}


IGNORES_RANKS = """
from canon import reference
from canon.reference import attention

def strided_attention(q, k, v, mask=None, layout=None, *, rank_invariant=False, **options):
    return reference.strided_attention(q, k, v, mask, layout, **options)
"""


def test_a_module_that_ignores_rank_invariant_has_other_bits_than_one_rank(
    run, write_module, tmp_path, monkeypatch
):
    """The judge alone accepts these results. The command that repeats a failure finds it again."""
    write_module("forgetful", IGNORES_RANKS)
    monkeypatch.setattr(draws, "WEIGHTS", {"strided_attention": 1})
    status, _, record = run("forgetful --random 14 --seed 3")
    assert status == 1
    failures = [failure for one_run in record["runs"] for failure in one_run["failures"]]
    assert failures
    for failure in failures:
        assert failure["draws"]["rank_invariant"] == "True"
        (fault,) = failure["faults"]
        assert fault.startswith(
            "other bits than attention(..., rank_invariant=True) on one rank, in "
        )
    again = tmp_path / "again.json"
    status, _, _ = run(*failures[0]["repeat"].split()[2:], "--record", again)
    assert status == 1
    assert kept_cases(json.loads(again.read_text())) == {
        failures[0]["index"]: kept_cases(record)[failures[0]["index"]]
    }


def test_an_exception_fails_its_case_and_the_other_cases_run(run, write_module):
    line = "assert q.dtype == torch.bfloat16, 'bfloat16 alone'"
    write_module("raising_ring", FAULTY.format(line=line))
    status, printed, record = run("raising_ring --random 30 --seed 2")
    assert status == 1
    drawn = [draws.drawn(2, number) for number in range(30)]
    assert sorted(kept_cases(record)) == list(range(30)), (
        "it has no Layout: other functions take the place of its cases"
    )
    replaced = {case.index for case in drawn if case.function == "Layout"}
    drawn = [case for case in drawn if case.index not in replaced]
    failed = [
        number for number, (_, verdict, _) in kept_cases(record).items() if verdict == "failed"
    ]
    failed = [number for number in failed if number not in replaced]
    assert replaced
    assert failed
    assert failed == [
        c.index for c in drawn if c.function == "ring_attention" and c.dtype != "bfloat16"
    ]
    assert "AssertionError: bfloat16 alone" in printed.out


def test_only_selects_functions_and_masks_of_random_cases(run):
    status, _, record = run("canon.reference --random 40 --seed 5 --only tree")
    assert status == 0
    assert (
        sorted(kept_cases(record))
        == [index for index in range(40) if "tree" in draws.drawn(5, index).mask]
        != []
    )
    assert record["runs"][0]["command"] == (
        "canon check canon.reference --only tree --random 40 --seed 5"
    )


# ---------------------------------------------------------------------- the judge with few elements
def test_the_judge_accepts_only_rounding_of_few_elements():
    """With one key per query, dq is exactly 0. At width 1 no honest evaluation has the rounding
    noise of float32.
    """
    draw = torch.Generator().manual_seed(0)
    mask = Mask.window(3, 0, 0)
    q, k, v, dout = (torch.randn(1, 3, 1, 1, generator=draw) for _ in range(4))
    exact, honest = oracle(q, k, v, dout, mask), orders(q, k, v, dout, mask)
    assert exact.dq is not None
    noise = exact.dq + 2.0**-25 * (dout.abs() * v.abs()) * k.abs()
    got = Attended(dq=noise.float())
    assert not agreement(got, exact, honest).agrees
    reach = roundings(q, k, v, dout, mask)
    assert agreement(got, exact, honest, reach).agrees
    assert not agreement(Attended(dq=64 * noise.float()), exact, honest, reach).agrees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roundings_bound_the_errors_of_honest_attention(dtype):
    """Each error is below 8 times the distance of `roundings`. The largest error is above 1/300 of
    the largest one.
    """
    draw = torch.Generator().manual_seed(1)
    mask = Mask.documents([0, 1, 9, 40])
    q, k, v, dout = (torch.randn(2, 40, 4, 16, generator=draw).to(dtype) for _ in range(4))
    exact, reach = oracle(q, k, v, dout, mask), roundings(q, k, v, dout, mask)
    for name, got, true, size in zip(
        Attended._fields, dense(q, k, v, dout, mask), exact, reach, strict=True
    ):
        error = (got.double() - true).abs()
        once = torch.finfo(got.dtype).eps * true.abs().clamp(min=torch.finfo(got.dtype).tiny)
        assert (error <= 8 * size + once).all(), name
        assert error.max() >= size.max() / 300, name


@pytest.mark.parametrize(
    ("function", "names"),
    [("ring_attention", ("dk", "dv")), ("latent_attention", ("dlatent", "dk_rope"))],
)
def test_gradients_that_travel_in_16_bits_have_the_bound_of_16_bits(function, names):
    limits = draws.Limits((function,))
    case = next(
        c
        for c in (draws.drawn(1, i, limits=limits) for i in range(9000))
        if dict(c.options).get("reduce_dtype") == "bfloat16"
        and c.dtype == "float32"
        and c.ranks > 2
        and isinstance(mask := draws.evaluated(c.mask), Mask)
        and mask.area > 50
        and c.used == "both"
        and not c.planted
    )
    layout = draws.evaluated(case.layout)
    assert isinstance(layout, Layout)
    expected = RandomSource().expected(case, layout, "cpu")
    exact, reach = expected.exact, expected.roundings
    coarse = type(exact)(**{name: getattr(exact, name).bfloat16().float() for name in names})
    assert agreement(coarse, exact, expected.honest, reach).agrees
    in_float32 = expected.honest[:4]
    assert not agreement(coarse, exact, in_float32, reach).agrees
