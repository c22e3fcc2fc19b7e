"""`make test` runs a sample of each marked sweep, in which every test and every value of a
parameter comes.
"""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import sampling
from sampling import chosen, covering


@dataclass(frozen=True, eq=False)
class Item:
    """The parts of an item of pytest that decide the sample."""

    name: str
    originalname: str
    callspec: SimpleNamespace
    mark: object
    path: str = "test_x.py"

    def get_closest_marker(self, name):
        return self.mark if name == "sweep" else None


def items_of(test, mark=None, **axes):
    """Return the items of a test with parameters of these lengths."""
    places = product(*map(range, axes.values()))
    specs = [SimpleNamespace(params=dict(zip(axes, place, strict=True))) for place in places]
    return [Item(f"{test}[{spec.params}]", test, spec, mark) for spec in specs]


@pytest.fixture
def without_setting(monkeypatch):
    monkeypatch.setattr(sampling, "ALL", False)


PAIRS = items_of("pairs", pytest.mark.sweep.mark, fault=30, dtype=3)
SEEDS = items_of("seeds", pytest.mark.sweep(10).mark, seed=80)


def test_every_value_of_a_parameter_comes_in_the_sample(without_setting):
    kept = [x.callspec.params for x in chosen(PAIRS)]
    assert {x["fault"] for x in kept} == set(range(30))
    assert {x["dtype"] for x in kept} == {0, 1, 2}
    assert len(kept) < 40


def test_a_test_may_sample_cases_by_their_values(without_setting, monkeypatch):
    cases = [(letter, number) for letter in "abc" for number in range(9)]
    kept = covering(cases, set)
    assert set().union(*kept) == set().union(*cases)
    assert len(kept) < 12
    assert kept == [case for case in cases if case in kept]
    monkeypatch.setattr(sampling, "ALL", True)
    assert covering(cases, set) == cases


def test_a_sample_may_have_a_number(without_setting):
    kept = chosen(SEEDS)
    assert len(kept) == 10
    assert kept == [x for x in SEEDS if x in chosen(SEEDS[::-1])], (
        "the digest of the name decides, not the order"
    )
    assert chosen(SEEDS[:4]) == SEEDS[:4]


def test_every_test_stays_and_only_marked_ones_are_sampled(without_setting, monkeypatch):
    others = items_of("unmarked", n=20)
    kept = chosen(PAIRS + others + SEEDS)
    assert [x for x in kept if x in others] == others
    assert {x.originalname for x in kept} == {"pairs", "unmarked", "seeds"}
    monkeypatch.setattr(sampling, "ALL", True)
    assert chosen(PAIRS + others + SEEDS) == PAIRS + others + SEEDS


def test_a_case_that_is_named_alone_runs(without_setting):
    assert all(chosen([x]) == [x] for x in PAIRS + SEEDS)


@pytest.mark.sweep
@pytest.mark.parametrize("word", ["a", ["b"], object()], ids=["a", "b", "c"])
@pytest.mark.parametrize("number", range(8))
def test_pytest_runs_a_sample_of_this_sweep(word, number, request):
    ran = [x for x in request.session.items if x.originalname == request.node.originalname]
    assert len(ran) == 24 if sampling.ALL else len(ran) <= 10
