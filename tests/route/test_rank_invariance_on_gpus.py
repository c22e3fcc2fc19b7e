"""Claims about `rank_invariant=True` on GPUs: bits of one rank on long sequences, in every run, for
both backends.
"""

from functools import partial

import pytest
import torch
from invariant_worlds import different
from sharded import on_this_rank

from canon import Layout, Mask, fast
from canon.testing import process_groups

RUNS = {4096: 20, 131072: 5}  # the runs of each call; the longer sequence takes most of the time
DISPATCH = partial(fast.dispatch, rank_invariant=True)
PLACED = {
    "strided_attention": lambda mask, ranks: Layout.zigzag(mask.queries, ranks, multiple_of=128),
    "magi_attention": lambda mask, ranks: DISPATCH(mask, ranks),
}


def tensors(tokens):
    """Return q, k, v, dout and dlse: 4 query heads, 2 key heads, D 128, bfloat16."""
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(tokens, 4, 128), (tokens, 2, 128), (tokens, 2, 128), (tokens, 4, 128)]
    made = [torch.randn(1, *x, generator=draw, device="cuda", dtype=torch.bfloat16) for x in sizes]
    return *made, torch.randn(1, 4, tokens, generator=draw, device="cuda")


def masks(tokens):
    ends = [0, tokens // 3, tokens // 3 + 100, tokens // 2 + 1, tokens]
    return [Mask.causal(tokens), Mask.documents(ends)]


def program(function, mask, layout, inputs, backend):
    """Return the results of both passes for the whole sequence, on every rank."""
    options = dict(mask=mask, return_lse=True, rank_invariant=True)
    options |= {} if function == "attention" else dict(layout=layout)
    with fast.backend(backend):
        return on_this_rank(partial(getattr(fast, function), **options), layout, inputs)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("tokens", RUNS)
def test_ranks_as_threads_return_the_bits_of_one_rank(tokens, backend):
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gluon needs a Hopper GPU")
    inputs = tensors(tokens)
    for mask in masks(tokens):
        expected = process_groups.threads(
            partial(program, "attention", mask, Layout.contiguous(tokens, 1), inputs, backend),
            1,
        )[0]
        for function, placed in PLACED.items():
            for ranks in (2, 3, 8) if tokens == 4096 else (8,):
                layout = placed(mask, ranks)
                for run in range(RUNS[tokens] if ranks == 8 else 2):
                    some = partial(program, function, mask, layout, inputs, backend)
                    found = process_groups.threads(some, ranks)[0]
                    assert different(expected, found) == [], (function, mask.bands[:2], ranks, run)
