"""Claims about the judge: honest attention agrees, and planted faults of real implementations
disagree.
"""

import json
import sys
from functools import partial

import pytest
import torch
from band_strategies import masks
from hypothesis import given
from planted_faults import FAULTS, FULL, LOCAL, with_fault

from canon.check.case_runner import CaseRunner
from canon.check.cases import all_cases
from canon.check.documents import Documents
from canon.reference import Band, Mask
from canon.route.checks import CappedScale
from canon.testing import agreement, dense, oracle, orders, process_groups
from canon.testing.judge import seen_tokens
from canon.testing.roundings import roundings

# LONG has many keys, so that sums in bfloat16 are far off
SHORT, LONG = (
    Documents(tuple("abc"), tuple(bytes(range(n)) * 4 for n in (30, 1, last)))
    for last in (100, 250)
)


@pytest.fixture
def result_of(tmp_path, monkeypatch):
    """Return ``result_of(case, dtype, change)``: the result of `canon check` for one case of the
    reference with a fault.
    """

    def result_of(name, dtype, change):
        monkeypatch.setitem(sys.modules, "faulty", with_fault(*change))
        found = all_cases([dtype], False, LONG if name == FULL else SHORT)
        cases = tuple(case for case in found if case.name.replace(f"/{dtype}", "") == name)
        assert cases, name
        runner = CaseRunner("faulty", cases, "cpu", sink := tmp_path / "results")
        process_groups.threads(runner, 4)
        return json.loads(sink.read_text())

    return result_of


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, dtype, result_of):
    case, *change = FAULTS[fault]
    result = result_of(case, dtype, change)
    assert result["verdict"] == "disagrees", fault
    assert not any(found.startswith("the reference itself") for found in result["faults"])


def test_a_softmax_without_its_maximum_is_caught(result_of):
    change = "local", "torch.maximum(highest, scores.amax(-1))", "torch.zeros_like(highest)"
    assert result_of("attention/cancelling", "bfloat16", change)["verdict"] == "disagrees"


PART = "attention_forward/window/part"


@pytest.mark.parametrize(
    ("case", "replacement", "message"),
    [
        (LOCAL, ".float()", "out is torch.float32, expected torch.bfloat16"),
        (PART, ".bfloat16()", "out is torch.bfloat16, expected torch.float32"),
        (PART, ".bfloat16().to(out_dtype)", "but was rounded to"),
    ],
)
def test_results_in_another_dtype_are_caught(case, replacement, message, result_of):
    result = result_of(case, "bfloat16", ("local", ".to(out_dtype)", replacement))
    assert any(message in fault for fault in result["faults"]), result["faults"]


# ---------------------------------------------------------------------- the judge itself
def tensors(dtype=torch.float64, tokens=40, batch=()):
    torch.manual_seed(0)
    shapes = (4, 16), (2, 16), (2, 24), (4, 24)
    tensors = [torch.randn(*batch, tokens, *shape).to(dtype) for shape in shapes]
    return *tensors, torch.randn(*batch, 4, tokens).to(torch.promote_types(dtype, torch.float32))


def judged_by(q, k, v, dout, dlse):
    """Return the oracle's results and honest ones under a causal mask."""
    return [answer(q, k, v, dout, dlse=dlse) for answer in (oracle, orders)]


def by_autograd(q, k, v, sink, dout, dlse, masks, scale, softcap=None):
    """Return the results of torch's softmax over the keys and one more column, the sink, and
    autograd in float64.
    """
    q, k, v, sink = (x.double().requires_grad_() for x in (q, k, v, sink))
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.stack([~one.dense() for one in masks])
    scores = scores.masked_fill(hidden[:, None], -1e300)
    weights = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], -1).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., :-1], v.repeat_interleave(2, 2))
    lse = scores.logsumexp(-1)
    gradients = (dout.double(), dlse.double())
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v, sink), gradients)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_oracle_equals_autograd(softcap):
    """With a sink and a mask for each sequence, also in honest orders."""
    q, k, v, dout, dlse = tensors(batch=(2,))
    sink = torch.tensor([0.5, -2, 30, -40]).double()
    masks = (Mask.causal(40), Mask.documents([0, 1, 17, 40]))
    scale = 0.3 if softcap is None else CappedScale(0.3, softcap)
    exact = oracle(q, k, v, dout, masks, scale, dlse, sink)
    expected = by_autograd(q, k, v, sink, dout, dlse, masks, 0.3, softcap)
    for mine, theirs in zip(exact, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    packed = oracle(q[0], k[0], v[0], dout[0], masks[0], scale, dlse[0], sink)
    torch.testing.assert_close(packed.out, exact.out[0], rtol=0, atol=1e-13)
    narrow = [x.bfloat16() for x in (q, k, v, dout)]
    exact, honest = (f(*narrow, masks, scale, dlse, sink) for f in (oracle, orders))
    reach = roundings(*narrow, masks, scale, dlse, sink)
    assert all(agreement(one, exact, honest, reach).agrees for one in honest)
    assert (reach[-1] < 0.05 * exact[-1].abs()).all(), "a small part of dsink"


@pytest.mark.parametrize("answer", [oracle, dense, partial(dense, order=2)])
def test_unseen_tokens_may_hold_nan(answer):
    q, k, v, dout, dlse = tensors(torch.float32)
    mask = Mask([Band(0, 30, 0, 20)], 40, 40)
    clean = answer(q, k, v, dout, mask, dlse=dlse)
    q[30:], dout[30:], k[20:], v[20:] = (torch.nan for _ in range(4))
    for with_nan, without in zip(answer(q, k, v, dout, mask, dlse=dlse), clean, strict=True):
        assert torch.equal(with_nan, without)
    assert (clean.lse[:, 30:] == -torch.inf).all()
    assert not clean.out[30:].any()
    assert not clean.dq[30:].any()
    assert not clean.dk[20:].any()


def test_honest_orders_differ_only_in_rounding():
    exact, honest = judged_by(*tensors(torch.bfloat16))
    assert all(agreement(one, exact, honest).agrees for one in honest)
    assert not torch.equal(honest[0].lse, honest[3].lse)


def test_equal_numbers_may_be_added_one_after_another():
    """Under scale 0, dv of a plain sum adds 1 / 250 750 times: its roundings have one direction."""
    q, dout = torch.zeros(1, 250, 3, 4), torch.ones(1, 250, 3, 4)
    k, v = torch.zeros(2, 1, 250, 1, 4)
    given = q, k, v, dout, Mask.full(250), 0.0
    got, judged = dense(*given), (oracle(*given), orders(*given), roundings(*given))
    assert got.dv is not None
    one_by_one = torch.zeros(())
    for _ in range(750):
        one_by_one += 1 / 250
    assert (one_by_one - 3).abs() > 2e-5
    assert agreement(got._replace(dv=torch.full_like(v, one_by_one)), *judged).agrees
    assert not agreement(got._replace(dv=got.dv * (1 - 1e-4)), *judged).agrees


def third(fill, dim):
    return lambda x: x.index_fill(dim, torch.tensor([3]), fill)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("out", third(torch.nan, 0), "out has 96 values that are not finite"),
        ("dq", third(torch.inf, 0), "dq has 64 values that are not finite"),
        ("dk", torch.zeros_like, "dk is zero everywhere"),
        ("lse", third(-torch.inf, 1), "lse is -inf at 4 places, the oracle at 0"),
        ("lse", lambda x: x.bfloat16().float(), "lse is off by"),
        ("lse", lambda x: x + 1e-5, "lse is off by"),
        ("dv", lambda x: 1.02 * x, "dv is off by"),
    ],
)
def test_verdicts_name_the_tensor_and_the_fault(name, change, message):
    exact, honest = judged_by(*tensors(torch.bfloat16))
    got = honest[1]._replace(**{name: change(getattr(honest[1], name))})
    verdict = agreement(got, exact, honest)
    assert message in str(verdict)
    assert all(name in fault for fault in verdict.faults)


@given(masks())
def test_seen_tokens_are_the_rows_and_columns_with_a_cell(mask):
    queries, keys = seen_tokens(mask, "cpu")
    assert torch.equal(queries, mask.dense().any(1))
    assert torch.equal(keys, mask.dense().any(0))
