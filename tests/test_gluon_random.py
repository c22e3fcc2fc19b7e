"""The Hopper kernels on whatever a caller may bring: random masks, shapes, strides, methods and interleavings.

All memory between and around the tensors is NaN, and so is every token that the mask does not touch: what a kernel reads
though it should not, or forgets to write, is found in the result.
"""

from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canon import Band, Mask
from canon.fast import backend, backward, local
from canon.testing import simulator
from canon.testing.judge import Attended, agreement, oracle, orders

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
WIDTHS = st.sampled_from([16, 24, 50, 64, 96, 128, 131, 192, 256])


@st.composite
def masks(draw) -> Mask:
    """Documents, windows, slices and blocks of up to 400 tokens, shifted and cropped."""
    kind = draw(st.sampled_from(["documents", "window", "blocks", "prefix", "bands", "packed"]))
    n = draw(st.integers(1, 400))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 150))) for _ in range(2))
    if kind == "documents":
        lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
        mask = Mask.documents([0, *np.cumsum(lengths).tolist()], causal=draw(st.booleans()), window=(left, right))
    elif kind == "packed":  # heads of a group share tiles
        mask = Mask.documents([*range(0, n, draw(st.integers(5, 40))), n])
    elif kind == "window":
        mask = Mask.window(n, left, right)
    elif kind == "blocks":
        runs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=5))
        mask = Mask.block_causal([block for block, length in runs for _ in range(length)])
    elif kind == "prefix":
        mask = Mask.prefix(n, draw(st.integers(0, n)))
    else:
        keys, lo = draw(st.integers(1, 400)), draw(st.integers(-300, 300))
        band = Band(0, n, 0, keys, lo, lo + draw(st.integers(0, 300)))
        mask = Mask([band], n + draw(st.integers(0, 40)), keys + draw(st.integers(0, 40)))
    if draw(st.booleans()):
        mask = mask.shift(draw(st.integers(0, 30)), draw(st.integers(0, 30)))
    rows, columns = (range(draw(st.integers(0, size // 3)), size) for size in (mask.queries, mask.keys))
    return mask.crop(rows, columns) if draw(st.booleans()) else mask


def enough(mask: Mask) -> bool:
    """Whether the judge can tell: the honest error of one or two rows may be luck, and float32 then seems wrong."""
    return int(mask.dense().any(1).sum()) >= 8


class Place(NamedTuple):
    """How a tensor lies in memory: its axes from the slowest on, elements in front, and room behind each axis."""

    order: tuple[int, ...]
    offset: int
    room: tuple[int, ...]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of NaN that lies so, in memory of NaN."""
        sizes = [shape[axis] + self.room[axis] for axis in self.order[: len(shape)]]
        memory = torch.full((self.offset + int(np.prod(sizes)),), torch.nan, dtype=dtype, device=DEVICE)
        whole = memory[self.offset :].view(sizes).permute(np.argsort(self.order).tolist())
        return whole[tuple(slice(n) for n in shape)]


def places(axes: int) -> st.SearchStrategy[Place]:
    """As allocated, mostly; else anywhere."""
    usual = st.just(Place(tuple(range(axes)), 0, (0,) * axes))
    room = st.tuples(*[st.sampled_from([0, 1, 8])] * axes)
    anywhere = st.builds(Place, st.permutations(range(axes)).map(tuple), st.sampled_from([0, 1, 8]), room)
    return st.one_of(usual, anywhere)


class Call(NamedTuple):
    """Everything that a caller chooses."""

    mask: Mask
    heads: tuple[int, int]
    widths: tuple[int, int]
    batch: int
    dtype: torch.dtype
    wide_results: bool
    scale: float
    method: str
    places: tuple[Place, ...]  # of q, k, v, dout, out, dq, dk, dv, and of lse


@st.composite
def calls(draw) -> Call:
    g, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4), (3, 1), (1, 8)]))
    d, dv = draw(WIDTHS), draw(WIDTHS)
    return Call(
        draw(masks().filter(enough)),
        (g * group, g),
        (d, dv),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([torch.bfloat16, torch.float16])),
        draw(st.booleans()),
        draw(st.sampled_from([d**-0.5, -0.5 * d**-0.5, 2 * d**-0.5])),
        draw(st.sampled_from(["split", "fused", "head_parallel"] if max(d, dv) <= 128 else ["split", "head_parallel"])),
        (*(draw(places(4)) for _ in range(8)), draw(places(3))),
    )


right = set()  # Hypothesis varies each example several times: what has been right is not computed again


@given(calls(), st.sampled_from(["late", "early", "random"]), st.integers(0, 99))
@settings(max_examples=80)
def test_whatever_is_asked_for_equals_the_oracle(call, order, seed):
    mask, (h, g), (d, dv), b = call.mask, call.heads, call.widths, call.batch
    if (mask, h, g, d, dv, call.method) in right:
        return
    shapes = [(b, mask.queries, h, d), (b, mask.keys, g, d), (b, mask.keys, g, dv), (b, mask.queries, h, dv)]
    generator = torch.Generator().manual_seed(seed)
    seen = mask.dense()
    q, k, v, dout = (
        place.empty(shape, call.dtype).copy_(torch.randn(shape, generator=generator))
        for place, shape in zip(call.places[:4], shapes, strict=True)
    )
    for x, axis in ((q, 1), (k, 0), (v, 0), (dout, 1)):
        x[:, ~seen.any(axis)] = torch.nan
    dlse = torch.randn(b, h, mask.queries, generator=generator).to(DEVICE)
    results = [shapes[i] for i in (3, 0, 1, 2)]
    dtype = torch.float32 if call.wide_results else call.dtype
    out, dq, dk, dv_ = (place.empty(s, dtype) for place, s in zip(call.places[4:8], results, strict=True))
    lse = call.places[8].empty((b, h, mask.queries), torch.float32)

    with backend("gluon"), nullcontext() if ON_HOPPER else simulator.simulated(order, seed):
        local.forward_into(q, k, v, mask, call.scale, out, lse)
        delta = backward.make_delta(dout, out, lse, dlse)
        backward.backward_into(dout, q, k, v, lse, delta, mask, call.scale, call.method, dq, dk, dv_)
    exact, honest = (attended(q, k, v, dout, mask, call.scale, dlse) for attended in (oracle, orders))
    verdict = agreement(Attended(out, lse, dq, dk, dv_), exact, honest)
    assert verdict.agrees, f"{verdict}\n{call}"
    right.add((mask, h, g, d, dv, call.method))
