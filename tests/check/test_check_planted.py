"""Claims about rows of `canon check` with a NaN or an infinity: which values they compare, and what
they say of the others.
"""

import pytest

from canon.check import fixed_check
from canon.check.cases import Case, Shape

ALL_NAN = """
from canon import reference

def merge(*parts):
    return tuple(x * float("nan") for x in reference.merge(*parts))

def attention(q, k, v, mask=None, **options):
    return tuple(x * float("nan") for x in reference.attention(q, k, v, mask, **options))
"""
# It hides keys by adding -inf to their scores, so a NaN in k reaches every query.
ADDING = """
import torch

def attention(q, k, v, mask, *, return_lse=False):
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    bias = torch.zeros(len(mask.dense()), mask.keys).masked_fill(~mask.dense(), -torch.inf)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    out, lse = (torch.softmax(scores, -1) @ v).transpose(0, 1), torch.logsumexp(scores, -1)
    return (out, lse) if return_lse else out
"""


@pytest.fixture
def of_heads(run, write_module, monkeypatch):
    """Check a module that adds -inf on one case with a NaN in k, with (query heads, key heads)."""

    def check(*heads, fault="pass"):
        write_module("adding", ADDING.replace("return (", f"{fault}\n    return ("))
        case = Case("attention", "causal", "float32", Shape(heads, (16, 16)), planted="nan in k")
        monkeypatch.setattr(fixed_check, "all_cases", lambda *_: [case])
        status, printed, record = run("adding --tokens 100")
        return status, printed.out, record["results"][0], sum(record["documents"].values())

    return check


def test_a_module_that_returns_nan_alone_disagrees_in_every_row(run, write_module):
    write_module("all_nan", ALL_NAN)
    status, _, record = run("all_nan --tokens 150 --only '* in [qkvd]*' --runs 1")
    assert status == 1
    assert {result["case"].split("/")[0] for result in record["results"]} == {"attention", "merge"}
    assert {result["verdict"] for result in record["results"]} == {"disagrees"}


def test_a_row_counts_the_values_that_a_planted_nan_may_reach(of_heads):
    status, printed, result, tokens = of_heads(4, 2)
    assert (status, result["verdict"]) == (0, "agrees")
    seen = tokens - tokens // 2  # queries that see the token with the NaN
    assert result["exempt"]["out"] == 2 * 16 * (tokens - seen)
    assert result["exempt"]["lse"] == 2 * (tokens - seen)
    assert f"agrees, {sum(result['exempt'].values())} exempt" in printed


def test_the_worst_place_is_not_one_that_a_planted_nan_may_reach(of_heads):
    _, _, result, _ = of_heads(
        4, 2, fault="out = out + torch.nn.functional.one_hot(torch.tensor(5), 16)"
    )
    assert result["exempt"]["out"]
    (place,) = [text for text in result["faults"] if text.startswith("out is worst")]
    assert "off by 1.00e+00" in place


def test_a_row_in_which_all_values_of_a_tensor_are_exempt_is_not_judged(of_heads):
    status, printed, result, _ = of_heads(4, 1)
    assert (status, result["verdict"]) == (1, "not judged")
    assert "every value of out, lse, dq is NaN or infinite, as the planted value allows" in printed
    assert "0 of 1 cases agree, 1 not judged" in printed


def test_a_nan_that_reaches_another_key_head_disagrees(run, write_module):
    for name, added, expected in (("leaking", "0 * out.flip(-2)", 1), ("tight", "0", 0)):
        text = (
            "from canon import reference\n\n"
            "def attention(q, k, v, mask=None, sink=None, **options):\n"
            "    out, lse = reference.attention(q, k, v, mask, sink=sink, **options)\n"
            f"    return out + {added}, lse\n"
        )
        write_module(name, text)
        line = f"{name} --tokens 150 --runs 1 --only"
        assert run(line, "attention/documents/*/nan in k")[0] == expected
