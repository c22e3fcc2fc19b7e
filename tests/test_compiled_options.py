"""Claims about torch.compile with fullgraph=True: sinks, meshes, rank_invariant and backends compute as eager calls do.

The programs run in processes of their own, because the type checker of the tests cannot be compiled.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from compiled import assert_same, compiled_once, results
from torch._dynamo.utils import counters

from canon import Layout, Mask, fast, reference
from canon.testing import process_groups

TOKENS = 160  # with rank_invariant, one rank holds 128 tokens and the other one 32
HALVES = {"reference": reference, "fast": fast}
MASKS = [Mask.documents([0, 5, TOKENS]), Mask.documents([0, 140, 151, TOKENS])]
CALLS = {  # on two ranks: function, options
    "ring": ("ring_attention", {"sink": True}),
    "zigzag": ("zigzag_attention", {"sink": True, "mesh": True}),
    "striped": ("striped_attention", {"mesh": True}),
    "strided": ("strided_attention", {"rank_invariant": True, "sink": True}),
    "magi": ("magi_attention", {"rank_invariant": True, "mesh": True}),
}
LAYOUTS = {"zigzag_attention": Layout.zigzag, "striped_attention": Layout.striped}


def inputs(tokens):
    """Return q, k, v and a sink."""
    draw = torch.Generator().manual_seed(0)
    shapes = (1, tokens, 2, 16), (1, tokens, 1, 16), (1, tokens, 1, 12), (2,)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in shapes]


def compare(model, tokens, arguments, exact):
    """Compare a compiled call with an eager one for several masks, and find one graph."""
    compiled = compiled_once(model, "aot_eager")
    for some in arguments:
        found, expected = (results(f, inputs(tokens), *some) for f in (compiled, model))
        assert_same(found, expected, exact=exact)
    assert counters["stats"]["unique_graphs"] == 1, "another mask compiles again"


def local(half, option):
    attend = HALVES[half].attention

    def model(q, k, v, sink, mask):
        options = {"sink": sink} if option == "sink" else {"rank_invariant": True}
        out, lse = attend(torch.sin(q), k, v, mask, return_lse=True, **options)
        return torch.cos(out) + 0 * sink[:, None], lse

    compare(model, TOKENS, [(mask,) for mask in MASKS], exact=option != "sink")


def each_option(half):
    for option in ("sink", "rank_invariant"):
        local(half, option)


@pytest.mark.parametrize("half", HALVES)
def test_options_of_one_rank_are_compiled(half):
    process_groups.processes(partial(each_option, half), 1, timeout=200)


def on_two_ranks(half, function, sink, mesh, rank_invariant):
    group = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"] if mesh else None
    attend, options = getattr(HALVES[half], function), {"return_lse": True, "group": group}
    options |= {"rank_invariant": True} if rank_invariant else {}

    def model(q, k, v, z, mask, *layout):
        out, lse = attend(torch.sin(q), k, v, mask, *layout, **options, **({"sink": z} if sink else {}))
        return torch.cos(out) + 0 * z[:, None], lse

    layout = LAYOUTS.get(function, partial(Layout.contiguous, multiple_of=128))(TOKENS, 2)
    given = () if function in LAYOUTS else (layout,)
    compare(model, layout.size(dist.get_rank()), [(mask, *given) for mask in MASKS], exact=not sink)


def each_call(half, calls):
    for call in calls:
        function, options = CALLS[call]
        on_two_ranks(half, function, *(options.get(name, False) for name in ("sink", "mesh", "rank_invariant")))


@pytest.mark.parametrize(("half", "calls"), [("reference", tuple(CALLS)), ("fast", ("zigzag", "strided"))])
def test_options_of_two_ranks_are_compiled(half, calls):
    process_groups.processes(partial(each_call, half, calls), 2, timeout=300)


def backends():
    """`backend` surrounds compiled calls; Dynamo cannot trace it."""

    def plain(q, k, v, sink, mask):
        out, lse = fast.attention(q, k, v, mask, return_lse=True)
        return out + 0 * sink[:, None], lse

    with fast.backend("triton"):
        compare(plain, 24, [(Mask.documents([0, 5, 24]),), (Mask.causal(24),)], exact=True)
    with fast.backend("gluon"), pytest.raises(ValueError, match="the Hopper kernels support"):
        compiled_once(plain, "aot_eager")(*inputs(24), Mask.causal(24))  # these tensors are float32 and on the CPU


def test_a_choice_of_backend_is_compiled():
    process_groups.processes(backends, 1, timeout=200)
