"""The Hopper kernels agree with the oracle on random masks, shapes, strides, methods and
interleavings.

All memory between and around the tensors is NaN, and so is every token that the mask does not
touch. A wrong read or a missing write therefore shows in the result. Cases grow with their number,
so the first failing case is small. Hypothesis is not used: it runs each example about five times
with small changes, which takes too long here."""

from dataclasses import replace
from math import prod
from random import Random

import pytest
import torch
from hopper import HOPPER_ONLY, hopper
from sharded import DEVICE

from canon import Band, Mask
from canon.fast import backward, local
from canon.fast.kernels.gluon import config
from canon.testing.judge import Attended, agreement, dense, oracle, orders

pytestmark = HOPPER_ONLY
CASES = 80
LARGEST = 320  # tokens
WIDTHS = (16, 24, 50, 64, 96, 128, 131, 192, 256)
HEADS = ((1, 1), (2, 1), (4, 2), (4, 1), (3, 3), (8, 1))


def random_mask(draw: Random, most: int) -> Mask:
    """Return documents, windows, slices or blocks of up to ``most`` tokens, shifted and cropped."""
    n = draw.randint(8, most)
    left, right = (draw.choice([None, draw.randint(0, n // 2)]) for _ in range(2))
    kind = draw.choice(["documents", "packed", "window", "blocks", "prefix", "bands", "bands"])
    if kind == "documents":
        ends = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 3))), n]
        mask = Mask.documents(
            ends, causal=draw.random() < 0.5, window=draw.choice([None, (left, right)])
        )
    elif kind == "packed":  # heads of a group share tiles
        mask = Mask.documents([*range(0, n, draw.randint(5, 40)), n])
    elif kind == "window":
        mask = Mask.window(n, left, right)
    elif kind == "blocks":
        runs = [(draw.randint(0, 3), draw.randint(1, n // 2)) for _ in range(draw.randint(1, 4))]
        mask = Mask.block_causal([block for block, length in runs for _ in range(length)])
    elif kind == "prefix":
        mask = Mask.prefix(n, draw.randint(0, n))
    else:
        keys, lo = draw.randint(8, most), draw.randint(-n // 2, most // 2)
        band = Band(0, n, 0, keys, lo, lo + draw.randint(0, most))
        mask = Mask([band], n + draw.choice([0, 9]), keys + draw.choice([0, 33]))
    if draw.random() < 0.3:
        mask = mask.shift(draw.randint(0, 30), draw.randint(0, 30))
    if draw.random() < 0.3:
        mask = mask.crop(
            *(range(draw.randint(0, size // 3), size) for size in (mask.queries, mask.keys))
        )
    active_queries = mask.dense().any(1).sum()
    # with fewer, the honest error is too noisy
    return mask if active_queries >= 8 else random_mask(draw, most)


def somewhere(draw: Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of NaN within memory of NaN: contiguous, or with permuted axes, padding after
    each, and an offset.
    """
    axes = list(range(len(shape)))
    offset, room = 0, [0] * len(shape)
    if draw.random() < 0.6:
        draw.shuffle(axes)
        offset, room = draw.choice([0, 1, 8]), [draw.choice([0, 0, 1, 8]) for _ in axes]
    sizes = [shape[axis] + room[axis] for axis in axes]
    memory = torch.full((offset + prod(sizes),), torch.nan, dtype=dtype, device=DEVICE)
    whole = memory[offset:].view(sizes).permute([axes.index(axis) for axis in range(len(axes))])
    return whole[tuple(slice(n) for n in shape)]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("case", range(CASES))
def test_random_cases_agree_with_the_oracle(case):
    draw, generator = Random(case), torch.Generator().manual_seed(case)
    mask = random_mask(draw, 20 + (LARGEST - 20) * case // CASES)
    b, (h, g), d, dv = (
        draw.choice([1, 1, 2]),
        draw.choice(HEADS),
        draw.choice(WIDTHS),
        draw.choice(WIDTHS),
    )
    method = draw.choice(
        ["split", "fused", "head_parallel"] if max(d, dv) <= 128 else ["split", "head_parallel"]
    )
    scale = draw.choice([1, 1, -0.5, 2]) * d**-0.5
    order = draw.choice(["late", "early", "random"])
    dtype = draw.choice([torch.bfloat16, torch.float16])
    written = draw.choice([dtype, torch.float32])
    print(f"{mask}, {b=} {h=} {g=} {d=} {dv=}, {method}, {scale=}, {order}, {dtype} to {written}")

    shapes = [
        (b, mask.queries, h, d),
        (b, mask.keys, g, d),
        (b, mask.keys, g, dv),
        (b, mask.queries, h, dv),
    ]
    q, k, v, dout = (
        somewhere(draw, shape, dtype).copy_(torch.randn(shape, generator=generator))
        for shape in shapes
    )
    visible = mask.dense()
    for x, axis in ((q, 1), (k, 0), (v, 0), (dout, 1)):
        x[:, ~visible.any(axis)] = torch.nan
    dlse = torch.randn(b, h, mask.queries, generator=generator).to(DEVICE)
    dq, dk, dv_, out = (somewhere(draw, shape, written) for shape in shapes)
    lse = somewhere(draw, (b, h, mask.queries), torch.float32)

    tiles = config.choose("forward", d, dv)[0]  # the configuration for short rows
    tiles = replace(tiles, stale_maximum=case % 2 == 1)
    with config.forced(forward=tiles), hopper(order, case):
        local.forward_into(q, k, v, mask, scale, out, lse)
        delta = backward.make_delta(dout, out, lse, dlse)
        queries = backward.QueryInputs(dout, q, lse, delta)
        backward.backward_into(queries, k, v, mask, scale, method, dq, dk, dv_)
    exact, honest = (attended(q, k, v, dout, mask, scale, dlse) for attended in (oracle, orders))
    # The simulator sums q k as the CPU does, with a rounding for each term, so lse may have the
    # error of float32.
    honest.append(dense(*(x.float() for x in (q, k, v, dout)), mask, scale, dlse))
    verdict = agreement(Attended(out, lse, dq, dk, dv_), exact, honest)
    assert verdict.agrees, str(verdict)
