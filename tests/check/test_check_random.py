"""Claims about `canon check --random`: seed and number determine a case, and faults are found."""

import json
import re

import programs
import pytest
import sampling
import torch

from canon.check import draws
from canon.check.planted_values import TENSORS, VALUES
from canon.reference import Mask
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
    number = 50 if sampling.ALL else 12
    status, printed, record = run(f"--random {number} --seed 20")
    assert status == 0, printed.out
    assert len(kept_cases(record)) == number
    assert {verdict for _, verdict, _ in kept_cases(record).values()} <= {"agrees", "declined"}


def test_a_case_is_a_pure_function_of_seed_and_number():
    program = "from canon.check.draws import drawn; print([drawn(3, i) for i in range(40)])"
    assert programs.printed(program).strip() == str([draws.drawn(3, i) for i in range(40)])
    assert draws.drawn(3, 0) != draws.drawn(4, 0)


def test_all_kinds_are_drawn():
    """Draw 800 cases and find every function, mask, layout, number of ranks, dtype and option."""
    cases = [draws.drawn(0, i) for i in range(800)]
    values = lambda name: {getattr(case, name) for case in cases}
    assert values("function") == set(draws.WEIGHTS)
    assert values("ranks") == set(range(1, 9))
    assert values("dtype") == {"", "float64", "float32", "float16", "bfloat16"}
    used = "both", "out", "lse", "no lse", "sum", "forward", "forward, no lse"
    assert values("used") == set(used)
    assert values("method") == {"auto", "split", "fused", "head_parallel"}
    assert values("planted") == {"", *(f"{x} in {y}" for x in VALUES for y in TENSORS)}
    declared = set().union(*(DECLARATIONS[name].defaults for name in draws.ATTEND))
    untried = {"scale", "backward", "return_max_logits"}  # the first two are fields of a case
    options = {name for case in cases for name, _ in case.options}
    assert options == declared - untried | {"sink", "columns"}
    text = "".join(f"{case.mask} {case.layout}" for case in cases)
    words = ["full", "causal", "window", "documents", "prefix", "block_causal", "ranges", "tree"]
    words = [f"Mask.{word}(" for word in [*words, "concat", "union"]]
    words += [".crop(", ".shift(", ".with_blocks("]
    words += ["window=(", "causal=False", "q_valid", "k_valid", "left=-1", "zigzag", "dispatch("]
    assert not [word for word in words if word not in text]
    assert re.search(r"documents\(\[[^]]*\b(\d+), \1\b", text), "an empty document"
    scales = [case.shape.scale for case in cases if case.shape.scale is not None]
    assert 0 in scales
    assert min(scales) < 0
    assert max(scales) > 1e5, "scores near the limit of canon.fast"
    assert {case.function for case in cases if case.has_latents} == {"latent_attention", "prepare"}
    several = {case.function for case in cases if isinstance(case.masks, tuple)}
    assert several == draws.FOR_EACH_SEQUENCE, "a mask for each sequence"
    sizes = {(x.masks.queries, x.masks.keys) for x in cases if x.function not in several}
    assert {0, 1} <= {queries for queries, _ in sizes}
    shared = [case.layout_of(case.ranks) for case in cases if case.ranks > 1]
    assert any(0 < layout.tokens < layout.ranks for layout in shared), "more ranks than tokens"


def test_a_failure_names_its_draws_and_the_command_that_repeats_it(
    run, write_module, tmp_path, monkeypatch
):
    write_module("off_ring", FAULTY.format(line="v = v * 1.02"))
    monkeypatch.setattr(draws, "WEIGHTS", {"attention": 1, "ring_attention": 1, "prepare": 1})
    monkeypatch.setattr(draws, "PREPARED", ("ring_attention",))
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
    assert "Mask." in failure["draws"]["mask"]
    names = "ranks layout dtype heads widths scale method differentiated"
    assert {*names.split()} <= {*failure["draws"]}
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


def test_an_exception_fails_its_case_and_the_other_cases_run(run, write_module):
    line = "assert q.dtype == torch.bfloat16, 'bfloat16 alone'"
    write_module("raising_ring", FAULTY.format(line=line))
    status, printed, record = run("raising_ring --random 30 --seed 2")
    assert status == 1
    found = kept_cases(record)
    failed = [number for number, (_, verdict, _) in found.items() if verdict == "failed"]
    cases = [draws.drawn(2, number) for number in range(30)]
    wrong = [c for c in cases if c.function == "ring_attention" and c.dtype != "bfloat16"]
    assert failed == [case.index for case in wrong] != []
    assert sorted(found) == list(range(30))
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
