"""`make test` runs a sample of each marked sweep, in which every test and every value of a
parameter comes.
"""

import pytest
import sampling
from sampling import covering


def test_a_test_may_sample_cases_by_their_values(monkeypatch):
    monkeypatch.setattr(sampling, "ALL", False)
    cases = [(letter, number) for letter in "abc" for number in range(9)]
    kept = covering(cases, set)
    assert set().union(*kept) == set().union(*cases)
    assert len(kept) == 9


@pytest.mark.sweep
@pytest.mark.parametrize("word", ["a", ["b"], object()], ids=["a", "b", "c"])
@pytest.mark.parametrize("number", range(8))
def test_pytest_runs_a_sample_of_this_sweep(word, number, request):
    ran = [x for x in request.session.items if x.originalname == request.node.originalname]
    assert len(ran) == 24 if sampling.ALL else len(ran) == 8
