"""Claims about `canon.fast.ahead.first_call`: the first call of a model compiles all that later
calls can need.
"""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from canon import Mask, fast
from canon.fast.ahead import first_call
from canon.fast.ahead.compilation import Outcome
from canon.fast.ahead.kernel_variants import identities
from canon.fast.ahead.warm import _checked_model
from canon.fast.local import LOCAL
from canon.fast.magi import MAGI
from canon.fast.ring import RING, ZIGZAG
from canon.route.call import checked_call
from canon.testing.deterministic import deterministic

pytestmark = pytest.mark.interpreted


@pytest.fixture
def teams(monkeypatch):
    """Return a list of the identities of the teams that would compile, and an outcome that the
    test may change.
    """
    found, outcome = [], [Outcome(3, 0, 3)]

    def compile_ahead(collect, identities, **options):
        found.append(identities)
        return outcome[0]

    monkeypatch.setattr(first_call, "INTERPRETED", False)
    monkeypatch.setattr(first_call, "compile_ahead", compile_ahead)
    monkeypatch.setattr(first_call, "are_stamped", lambda _: False)
    monkeypatch.setattr(first_call, "_compiled", set())
    monkeypatch.delenv("CANON_COMPILE_AHEAD", raising=False)
    return found, outcome


def call(algorithm=LOCAL, mask=None, dtype=torch.bfloat16, heads=(4, 2), width=32, **options):
    """Return a call whose tensors would be on a GPU."""
    q, k = (torch.zeros(1, 16, n, width, dtype=dtype) for n in heads)
    return replace(
        checked_call(algorithm, q, k, k, mask=mask, **options), device=torch.device("cuda")
    )


def test_a_model_starts_one_team_whatever_its_masks_and_scales(teams, capsys, monkeypatch):
    found, _ = teams
    first_call.compile_for(call())
    with monkeypatch.context() as patch:
        patch.setattr(first_call, "identities", lambda _: pytest.fail("the model is known"))
        for mask, scale in ((Mask.documents([0, 3, 16]), -1.0), (Mask.window(16, left=2), 0.0)):
            first_call.compile_for(call(mask=mask, scale=scale))
    assert len(found) == 1
    assert "attention (torch.bfloat16, widths 32/32, heads 4/2)" in capsys.readouterr().err
    first_call.compile_for(call(dtype=torch.float16))
    assert len(found) == 2, "another dtype is another model"
    first_call.compile_for(call(RING))
    first_call.compile_for(call(ZIGZAG))
    assert len(found) == 3, "ring and zigzag have the same kernels"
    first_call.compile_for(call(MAGI, reduce_dtype=torch.float16))
    assert len(found) == 4
    first_call.compile_for(call(rank_invariant=True))
    assert len(found) == 5, "kernels that visit keys in order are others"


def test_a_ratio_of_heads_whose_kernels_exist_starts_no_team(teams, monkeypatch):
    """Stamps name what the kernels depend on, not the heads."""
    stamps = set()
    monkeypatch.setattr(first_call, "are_stamped", lambda needed: stamps.issuperset(needed))
    found, counts = teams[0], []
    for heads in ((32, 8), (24, 6), (40, 8), (16, 8), (16, 16), (64, 8), (20, 4), (16, 1)):
        first_call.compile_for(call(heads=heads))
        stamps.update(*found)
        counts.append(len(found))
    assert counts == [1, 1, 1, 1, 1, 2, 2, 3], "8, then 16 heads may share a tile"


def test_no_team_starts_on_a_cpu_or_after_the_variable_or_the_stamps_forbid_it(teams, monkeypatch):
    found, _ = teams
    first_call.compile_for(replace(call(), device=torch.device("cpu")))
    monkeypatch.setattr(first_call, "are_stamped", lambda _: True)
    first_call.compile_for(call())
    monkeypatch.setattr(first_call, "are_stamped", lambda _: False)
    monkeypatch.setenv("CANON_COMPILE_AHEAD", "0")
    first_call.compile_for(call(dtype=torch.float16))
    assert not found


def test_a_team_that_fails_warns_once(teams, monkeypatch):
    found, outcome = teams
    outcome[0] = Outcome(2, 1, 3, "no such instruction")
    with pytest.warns(
        UserWarning, match="compiled 2 of 3 kernels of attention .*: no such instruction"
    ):
        first_call.compile_for(call())
    first_call.compile_for(call())
    assert len(found) == 1
    monkeypatch.setattr(
        first_call, "compile_ahead", Mock(side_effect=OSError("no locks available"))
    )
    with pytest.warns(UserWarning, match="unknown many kernels .*: OSError: no locks available"):
        first_call.compile_for(call(dtype=torch.float16))


def test_warm_up_leaves_the_stamps_of_first_calls():
    warmed = _checked_model(torch.bfloat16, 32, 32, (4, 2), ("attention", "ring_attention"))
    for algorithm in (LOCAL, RING):
        assert set(identities(first_call.model_of(call(algorithm)))) <= set(identities(warmed))
    other = first_call.model_of(call(RING, reduce_dtype=torch.float16))
    assert not set(identities(other)) & set(identities(warmed))


def test_each_new_kind_of_call_asks_once_for_its_kernels(monkeypatch):
    asked = []
    note = lambda call: asked.append((call.mask, torch.are_deterministic_algorithms_enabled()))
    monkeypatch.setitem(vars(LOCAL.side), "compile_for", note)
    q, k, v = (torch.zeros(1, 16, heads, 8) for heads in (4, 2, 2))
    causal, window = Mask.causal(16), Mask.window(16, left=2)
    new = [(causal, False), (causal, True), (window, False)]
    for mask, state in (new[0], *new, new[1], new[0]):
        with deterministic() if state else nullcontext():
            fast.attention(q, k, v, mask, scale=0.123)
    assert asked == new
