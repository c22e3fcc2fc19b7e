"""`canon check` finds faults of sinks, meshes, a mask for each sequence, decoding and prepared
plans.
"""

import pytest

SINKS = """
import torch.distributed as dist
from canon import reference

def attention(q, k, v, mask=None, *, sink=None, **options):
    if sink is not None:
        {attention}
    return reference.attention(q, k, v, mask, sink=sink, **options)

def ring_attention(q, k, v, mask=None, layout=None, *, sink=None, **options):
    if sink is not None:
        {ring_attention}
    return reference.ring_attention(q, k, v, mask, layout, sink=sink, **options)

def zigzag_attention(q, k, v, mask=None, *, return_lse=False):
    return reference.zigzag_attention(q, k, v, mask, return_lse=return_lse)
"""
WRONG_SINKS = {  # fault: (function, message, its wrong line)
    "a sink is ignored": (
        "attention",
        "dsink is zero everywhere",
        "sink = 0 * sink - 1e9",
    ),
    "a sink is off": ("attention", "out is off by", "sink = sink + 0.05"),
    "the gradient of one head is off": (
        "attention",
        "dsink is worst at head ",
        "sink.register_hook(lambda x: x * x.new_tensor([1, 1.1] * (len(x) // 2)))",
    ),
    "one rank gives no gradient": (
        "ring_attention",
        "dsink is off by",
        "sink = sink.detach() + 0 * sink if dist.get_rank() == 1 else sink",
    ),
}


@pytest.mark.parametrize("fault", WRONG_SINKS)
def test_wrong_sinks_disagree(fault, verdicts_of):
    function, message, line = WRONG_SINKS[fault]
    found, printed = verdicts_of(
        SINKS, {function: line}, "--tokens 200 --only 'attention*documents*sink'"
    )
    names = ("attention", "ring_attention")
    assert found == {name: "disagrees" if name == function else "agrees" for name in names}, (
        "zigzag_attention has no parameter sink, so no case"
    )
    assert message in printed


MESHES = """
from canon import reference
from canon.reference import Layout

def ring_attention(q, k, v, mask=None, layout=None, *, sink=None, group=None, **options):
    if group is not None:
        {line}
    return reference.ring_attention(q, k, v, mask, layout, sink=sink, group=group, **options)

def zigzag_attention(q, k, v, mask=None, *, scale=None, return_lse=False):
    return reference.zigzag_attention(q, k, v, mask, scale=scale, return_lse=return_lse)
"""
WRONG_MESHES = {
    "pass": "agrees",
    "*x, a, b = layout.ranges_per_rank; layout = Layout([*x, b, a], layout.tokens)": "disagrees",
    "v = v.flip(-2)": "disagrees",
    "sink = sink.flip(-1)": "disagrees",
}


@pytest.mark.filterwarnings("ignore:ring_attention. tensors of .* tokens on .* were divided here")
@pytest.mark.parametrize("line", WRONG_MESHES)
def test_a_fault_over_a_mesh_disagrees_and_functions_without_a_group_get_none(line, verdicts_of):
    found, _ = verdicts_of(MESHES, {"line": line}, "--tokens 200 --only '*columns'")
    assert found == {"ring_attention": WRONG_MESHES[line]}


GENERATION = """
import torch.distributed as dist
from canon import reference

def decode_attention(q, k, v, mask=None, **options):
    {before}
    out = reference.decode_attention(q, k, v, mask, **options)
    {after}
    return out

def prepare(function, mask, layout, **options):
    {plans}
    return reference.prepare(function, mask, layout, **options)

def attention(q, k, v, mask=None, **options):
    {masks}
    return reference.attention(q, k, v, mask, **options)

def zigzag_attention(q, k, v, mask=None, **options):
    {shared}
    return reference.zigzag_attention(q, k, v, mask, **options)

def dispatch(mask, ranks, **options):
    {planned}
    return reference.dispatch(mask, ranks, **options)

from canon.reference import magi_attention, ring_attention, strided_attention, striped_attention
"""
WRONG_GENERATION = {  # fault: (case, message, wrong line)
    "None is taken for causal": (
        "decode_attention*plain",
        "out is off by",
        {
            "before": "n = k.shape[-3]; m = q.shape[-3]; mask = mask or "
            "reference.Mask.causal(n).crop(queries=range(n - m, n))"
        },
    ),
    "one rank rounds otherwise": (
        "decode_attention*last/float32",
        "rank 2 has other bits than rank 0, in",
        {"after": "out = (out[0] * (1 + 2**-23 * (dist.get_rank() == 2)), out[1])"},
    ),
    "all sequences have the mask of the first": (
        "attention/sequences/float32",
        "out is off by",
        {"masks": "mask = mask[0]"},
    ),
    "sequences on ranks have the masks in another order": (
        "zigzag_attention/zigzag/sequences/*",
        "out is off by",
        {"shared": "mask = mask[::-1]"},
    ),
    "the plan is that of the first mask": (
        "dispatch/sequences",
        "rows are wrong",
        {"planned": "mask = mask[0]"},
    ),
    "plans cannot be made": (
        "prepare*ring_attention",
        "KeyError: 'ring_attention'",
        {"plans": "{}[function]"},
    ),
}


@pytest.mark.parametrize("fault", WRONG_GENERATION)
def test_wrong_decoding_masks_and_plans_disagree(fault, verdicts_of):
    only, message, change = WRONG_GENERATION[fault]
    for lines in ({}, change):
        found, printed = verdicts_of(GENERATION, lines, f"--tokens 200 --only '{only}'")
        assert ({*found.values()} == {"agrees"}) == (lines == {})
    assert message in printed
