"""The section of `paper/in_your_program.md` about a million tokens follows from its records and
from the formula.
"""

import importlib
import re
from dataclasses import replace

import pytest
from folders import GUIDE

PAGE = GUIDE.read_text()
SECTION = re.search(r"^## A million tokens\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def formula(monkeypatch):
    """Return the formula of the default run on one GPU."""
    script = importlib.import_module("long_formula")
    monkeypatch.setattr(script, "GPU", True)  # a size of an element
    return script.Formula(script.Run(), 1)


def test_the_tables_follow_from_their_records(scripts):
    assert scripts("long_tables").filled(PAGE) == PAGE, "run `python paper/long_tables.py`"


def test_the_records_have_the_formula_of_the_page(scripts, formula):
    for run in scripts("long_tables").runs():
        options = {name: run[name] for name in formula.run.__dataclass_fields__}
        ours = replace(formula, run=type(formula.run)(**options), ranks=run["ranks"])
        found = run["predicted"]
        assert (found["seconds"], found["tensors"]) == (ours.seconds, ours.tensors())


def test_the_numbers_of_the_text_follow_from_the_formula(formula):
    long = replace(formula, run=replace(formula.run, tokens=1048576, full_every=1))
    assert f"a model of {formula.parameters / 1e9:.2f} billion parameters" in SECTION
    assert f"{long.seconds:.0f} s on one GPU" in SECTION
    longest = [replace(formula, ranks=ranks).longest(140e9) for ranks in (1, 2, 4)]
    assert "140 GB hold {:,} tokens on one GPU, {:,} on two and {:,} on four".format(
        *longest
    ) in re.sub(r"\s+", " ", SECTION)


def test_the_formula_of_the_page_has_the_bytes_of_the_code(formula):
    assert "(2 (L + 1) D + 14 h d + 40 g d) n / W + 12 (all parameters) / W + 3.8 GB" in SECTION
    run, ours = formula.run, replace(formula, ranks=4)
    each = 2 * (run.layers + 1) * run.width + (14 * run.heads + 40 * run.key_heads) * run.head_width
    more = ours.peak_bytes - (each * run.tokens + 12 * ours.parameters) / 4
    assert 3.2e9 < more <= 3.8e9
