"""A cause that `canon check` states is the planted one. Without a cause it names the worst token,
head and rank.
"""

import pytest
import torch

from canon.check.causes import explained
from canon.testing.judge import Attended

DENSE = """
import math
import torch
import torch.distributed as dist
from canon import reference


def part(q, k, v, visible, scale, softcap):
    share = q.shape[2] // k.shape[2]
    heads = {heads}
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.nan_to_num()[:, :, heads].transpose(1, 2).to(wide) for x in (k, v))
    scores = {scale} * q.nan_to_num().transpose(1, 2).to(wide) @ k.mT
    {scores}
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return p @ v, lse


def attention(
    q, k, v, mask=None, *, scale=None, softcap=None, sink=None, backward="auto", return_lse=False
):
    packed = q.dim() == 3
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = reference.Mask.causal(q.shape[1]) if mask is None else mask
    visible, n = mask.dense(), mask.keys
    {visible}
    (one, a), (two, b) = (
        part(q, k[:, x], v[:, x], visible[:, x], scale, softcap)
        for x in (slice(n // 2), slice(n // 2, n))
    )
    lse = {lse}
    finite = lse.masked_fill(lse == -torch.inf, 0)[..., None]
    out = {exp}(a[..., None] - finite) * one + {exp}(b[..., None] - finite) * two
    if sink is not None:
        out = {sink}
    {results}
    out = out.transpose(1, 2).to(q.dtype)
    out, lse = (out[0], lse[0]) if packed else (out, lse)
    return (out, lse) if return_lse else out
"""
RIGHT = {
    "heads": "torch.arange(q.shape[2]) // share", "scale": "scale", "exp": "torch.exp",
    "scores": "scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)",
    "visible": "pass", "lse": "torch.logaddexp(a, b)", "results": "pass",
    "sink": "torch.sigmoid(lse - sink[:, None])[..., None] * out",
}  # fmt: skip
WORST = "is worst at token"
BASE_2 = "lse is as if its logarithm had base 2"
FAULTS = {  # fault: (case, a part of the first message, wrong lines)
    "lse in base 2": (
        "documents",
        "lse is 1.44 times",
        {"results": "lse = lse / math.log(2)"},
    ),
    "parts merged in base 2": (
        "documents",
        WORST,
        {"exp": "torch.exp2", "lse": "torch.logaddexp2(a, b)"},
    ),
    "weights of parts in base 2": ("documents", WORST, {"exp": "torch.exp2"}),
    "parts of lse in base 2": (
        "causal",
        WORST,
        {"lse": "torch.logaddexp(a / math.log(2), b / math.log(2))"},
    ),
    "the scale is ignored": (
        "block_causal",
        "had the default scale",
        {"scale": "q.shape[-1] ** -0.5"},
    ),
    "the scale is another": ("documents", WORST, {"scale": "1.3 * scale"}),
    "the mask is off by one": (
        "window",
        "saw the hidden key",
        {"visible": "visible |= visible.roll(1, 1)"},
    ),
    "a key too few": (
        "documents",
        "did not see the visible key",
        {"visible": "visible &= torch.arange(n) < torch.arange(n)[:, None]"},
    ),
    "the last key is dropped": (
        "causal",
        "did not see the visible key",
        {"visible": "visible[:, -1] = False"},
    ),
    "documents are ignored": (
        "documents",
        "saw the keys 0 to",
        {"visible": "visible = torch.ones(n, n, dtype=torch.bool).tril()"},
    ),
    "heads of k in another order": (
        "documents",
        " of k and v, not ",
        {"heads": "torch.arange(q.shape[2]) % k.shape[2]"},
    ),
    "the soft-cap is ignored": (
        "documents/float32/softcap",
        "had no soft-cap",
        {"scores": "pass"},
    ),
    "the soft-cap is another": (
        "documents/float32/softcap",
        WORST,
        {"scores": "softcap = 1.1 * softcap; scores = softcap * torch.tanh(scores / softcap)"},
    ),
    "the sink is ignored": ("documents/*/sink", "had no sink", {"sink": "out"}),
    "one element is wrong": ("documents", WORST, {"results": "out[0, 1, 33, 5] += 1"}),
    "lse alone is wrong": (
        "documents",
        WORST,
        {"results": "lse = lse.clone(); lse[0, 1, 33] += 1"},
    ),
    "the softmax of no key is NaN": (
        "block_causal",
        "more, which see no key: there out must be 0, and lse -inf",
        {"exp": "torch.exp", "results": "out = out / (lse != -torch.inf)[..., None]"},
    ),
    "out alone is of other keys": (
        "documents",
        WORST,
        {
            "visible": "visible = torch.ones(n, n, dtype=torch.bool).tril()",
            "results": "lse = part(q, k, v, mask.dense(), scale, softcap)[1]",
        },
    ),
}
# of faults whose first message is no cause: none; of the others: that of a query, or these
NAMED = {
    "lse in base 2": ("lse is 1.44 times", BASE_2),
    "the softmax of no key is NaN": ("out is not finite at query",),
}
CAUSES = ("as if", "times the expected", "sees no key", "see no key")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stated_cause_is_the_planted_one(fault, run, write_module):
    case, first, lines = FAULTS[fault]
    causes = () if first == WORST else NAMED.get(fault, ("as if query",))
    write_module("dense", DENSE.format_map(RIGHT | lines))
    line = f"dense --tokens 200 --only 'attention/{case}*' --features forward,finite --runs 1"
    status, _, record = run(line, "--dtype", "float32")
    assert status == 1
    for result in (r for r in record["results"] if r["verdict"] != "agrees"):
        stated = [text for text in result["faults"] if any(word in text for word in CAUSES)]
        assert all(text.startswith(causes) for text in stated), stated
    result = record["results"][0]
    assert first in result["faults"][0], result["faults"]
    assert any(WORST in text and ", head " in text for text in result["faults"])


def test_a_merge_of_a_part_without_a_key_is_explained(run, write_module):
    write_module(
        "naive",
        """
import torch

def merge(out, lse, other, other_lse):
    whole = torch.logaddexp(lse, other_lse)
    weight = lambda part: torch.exp(part - whole).transpose(-1, -2)[..., None]
    return weight(lse) * out + weight(other_lse) * other, whole
""",
    )
    status, printed, record = run("naive --tokens 200 --only merge --runs 1")
    assert status == 1
    for result in record["results"]:
        causes = [text for text in result["faults"] if "see no key" in text]
        assert any("see no key of part 1: its lse is -inf there" in text for text in causes), causes
    assert "which see no key of part" in printed.out


def test_the_planted_module_is_right_without_a_fault(run, write_module):
    write_module("dense", DENSE.format_map(RIGHT))
    status, printed, _ = run(
        "dense --tokens 200 --only attention --features forward,finite,one-mask"
    )
    assert status == 0, printed.out


def test_a_factor_is_only_named_if_it_explains_the_result():
    """A result much smaller than the expected one is near 0 times it, whatever it holds."""
    exact, other = torch.randn(2, 100, 4, 16, generator=torch.Generator().manual_seed(0)).double()
    for out, expected in (
        (exact / 40, ["out is 0.0250 times the expected"]),
        (exact / 40 + other / 30, []),
    ):
        assert (
            explained(["out is off"], Attended(out), Attended(exact), [Attended(exact)], None)
            == expected
        )
