"""Claims about rows of `canon check` with a NaN or an infinity: which values they compare."""

from canon.check.cases import all_cases
from canon.check.documents import Documents
from canon.check.inputs import inputs

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

def attention(q, k, v, mask, *, sink, return_lse):
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    bias = torch.zeros(len(mask.dense()), mask.keys).masked_fill(~mask.dense(), -torch.inf)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    out, lse = (torch.softmax(scores, -1) @ v).transpose(0, 1), torch.logsumexp(scores, -1)
    return out * torch.sigmoid(lse.T - sink)[..., None]{fault}, lse
"""


def test_a_module_that_returns_nan_alone_disagrees_in_every_row(run, write_module):
    write_module("all_nan", ALL_NAN)
    status, _, record = run("all_nan --tokens 150 --only '* in [qkvd]*' --runs 1")
    assert status == 1
    assert {result["case"].split("/")[0] for result in record["results"]} == {"attention", "merge"}
    assert {result["verdict"] for result in record["results"]} == {"disagrees"}


def test_a_planted_nan_may_reach_its_key_head_and_is_never_the_worst_place(run, write_module):
    line = "adding --tokens 100 --dtype float32 --only 'attention/documents/*/nan in k'"
    one = " + torch.nn.functional.one_hot(torch.tensor(5), out.shape[-1])"
    for fault, expected in (("", 0), (one, 1)):
        write_module("adding", ADDING.format(fault=fault))
        status, printed, record = run(line)
        assert status == expected, printed.out
    (place,) = [x for x in record["results"][0]["faults"] if x.startswith("out is worst")]
    assert "off by 1.00e+00" in place


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


def test_unseen_tokens_hold_nan():
    documents = Documents(("a", "b"), (b"0123456789" * 8, b"abcdef" * 9))
    cases = all_cases(["float32"], False, documents)
    x = inputs(next(case for case in cases if case.mask == "block_causal"), "cpu")
    assert x.q.isnan().any()
    assert x.k.isnan().any()
    assert not x.q.isnan().all()
