"""Calls with ``rank_invariant=True`` on ranks that are threads, and their bits, for tests."""

import functools

import torch
import torch.distributed as dist
from sharded import DEVICE, on_this_rank, whole

from canon import Layout, Mask, fast
from canon.testing import process_groups
from canon.testing.judge import Attended

N = 390  # three whole tiles of 128 tokens and a short one
MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "documents": Mask.documents([0, 60, 200, 201, 330, N]),
    "window": Mask.window(N, 140, 20),
    "both": Mask.documents([0, 60, 200, 201, 330, N], window=(90, 0)),
}
LAYOUTS = {
    "contiguous": lambda mask, ranks: Layout.contiguous(mask.queries, ranks, 128),
    "zigzag": lambda mask, ranks: Layout.zigzag(mask.queries, ranks, 128),
    "dispatch": lambda mask, ranks: fast.dispatch(mask, ranks, chunk=128, rank_invariant=True),
}
HEADS = {
    "multi-head": dict(h=2, g=2),
    "grouped": dict(h=4, g=2, dv=20),
    "one key head": dict(h=3, g=1, d=20),
}
FIELDS = Attended._fields


def attended(half, function, mask, held, tensors, **options):
    """Return the results of both passes on the ranks of the layout ``held``, for the whole
    sequence.
    """
    placed = {} if function == "attention" else dict(layout=held)
    options = dict(mask=mask, return_lse=True, rank_invariant=True) | placed | options
    attend = functools.partial(getattr(half, function), **options)

    def program():
        # several threads may divide the sums of a matrix product by its shape
        torch.set_num_threads(1)
        return on_this_rank(attend, held, tensors)

    return process_groups.threads(program, held.ranks)[0]


@functools.cache
def inputs(mask, heads, dtype, batch=1):
    """Return q, k, v, dout and dlse of the whole sequence."""
    tensors = whole(mask, b=batch, dtype=dtype, **(dict(d=16, dv=16) | HEADS[heads]))
    return tuple(x.to(DEVICE) for x in tensors)


@functools.cache
def on_one_rank(half, mask, heads, dtype, method="auto", batch=1):
    """Return the results of `attention`."""
    layout = Layout.contiguous(mask.queries, 1)
    return attended(
        half, "attention", mask, layout, inputs(mask, heads, dtype, batch), backward=method
    )


def decoded(half, ends, q, k, v, mask=None, **options):
    """Return out and lse of each rank. ``mask`` is over the keys of all ranks, which end at
    ``ends``.
    """

    def program():
        torch.set_num_threads(1)
        held = range(*[0, *ends][dist.get_rank() :][:2])
        own = [x.narrow(-3, held.start, len(held)) for x in (k, v)]
        crop = lambda x: list(map(crop, x)) if isinstance(x, list) else x and x.crop(keys=held)
        return half.decode_attention(q, *own, crop(mask), return_lse=True, **options)

    return process_groups.threads(program, len(ends))


def different(one, other):
    """Return the names of the results with different bits."""
    return [
        name
        for name, x, y in zip(FIELDS, one, other, strict=True)
        if not torch.equal(bits(x), bits(y))
    ]


def same_bits(one, other):
    """Return whether all tensors of two results have the same bits."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(one, other, strict=True))


def bits(x):
    """Return the bits of a tensor as whole numbers. NaN equals NaN, and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
