"""A NaN or an infinity at one token reaches only tokens that see it, and tokens that share a tile
with it.

An MMA multiplies the hidden cells of a tile by 0, and 0 times NaN is NaN. The table in
paper/in_your_program.md#where-a-nan-goes states where that happens. In these tests, ``must``
follows from the mask alone, and ``may`` adds the tokens of shared tiles, from the work tables of
the kernels.
"""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from cuda_backend import cuda
from hopper import HOPPER_ONLY, hopper, inputs

from canon import Band, Mask
from canon.fast import backend, backward, local
from canon.fast.kernels.gluon import config as hopper_config
from canon.fast.kernels.triton.config import Config, forced
from canon.fast.tables.cells import Cells
from canon.fast.tables.tile_costs import BOX
from canon.fast.tables.work_tables import host_table
from canon.testing.judge import Attended

pytestmark = [
    pytest.mark.gpu,
    # from NumPy, if the interpreter takes a maximum
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
]
PLANTED, RESULTS = ("q", "k", "v", "dout"), Attended._fields
hopper_only = HOPPER_ONLY[1]
GLUON = pytest.param("gluon", marks=hopper_only)
both_backends = pytest.mark.parametrize("name", ["triton", GLUON])
TRITON_TILES = Config(32, 16, 4, 1)
MASKS = {
    "triton": {
        "a document ends inside a tile": (Mask.documents([0, 21, 48]), (4, 21)),
        "a document ends at the edge of a tile": (Mask.documents([0, 32, 48]), (31, 32)),
    },
    "gluon": {
        "a document ends inside a tile": (Mask.documents([0, 70, 200]), (20, 70)),
        "a document ends at the edge of a tile": (Mask.documents([0, 128, 200]), (127, 128)),
    },
}


class Shared(NamedTuple):
    """The (query, key) pairs that share a tile, in each kernel."""

    forward: torch.Tensor
    dq: torch.Tensor
    dkdv: torch.Tensor


def shared_tiles(mask, rows, columns, transposed, boxes=0):
    """Return the pairs (queries, keys), bool. Kernels with ``boxes`` load all columns of a tile,
    others those of its band.
    """
    table = host_table(Cells(mask), rows, columns, columns, transposed, boxes if transposed else 0)
    pairs = torch.zeros(
        *((mask.keys, mask.queries) if transposed else (mask.queries, mask.keys)), dtype=torch.bool
    )
    for first, stop, begin, _, end in table.tiles.tolist():
        for column, tiles, _, row_stop, start, column_stop, *_ in table.spans[begin:end].tolist():
            last = column + tiles * columns
            if not boxes and row_stop:
                column, last = max(column, start), min(last, column_stop)
            pairs[first : first + rows if boxes else stop, column:last] = True
    return pairs.T if transposed else pairs


def on_triton(mask):
    rows, columns = TRITON_TILES.rows, TRITON_TILES.columns
    tables = [shared_tiles(mask, rows, columns, transposed) for transposed in (False, False, True)]
    return Shared(*tables)


def on_hopper(mask, d, method):
    dkdv = "dkdv_hdim256" if d > 128 else "fused" if method == "fused" else "dkdv"
    kernels = ("forward", "dq", dkdv)
    tiles = [hopper_config.choose(kernel, d, d)[0] for kernel in kernels]
    sizes = [(x.rows, x.columns, kernel == dkdv) for x, kernel in zip(tiles, kernels, strict=True)]
    return Shared(*(shared_tiles(mask, *size, BOX) for size in sizes))


def reached(planted, token, seen, shared, fused):
    """Return the tokens of each result that a NaN at ``token`` reaches, by the table in
    paper/in_your_program.md#where-a-nan-goes.
    """
    queries, keys = seen.shape
    at = torch.arange(queries if planted in ("q", "dout") else keys) == token
    no_query, no_key = torch.zeros(queries, dtype=torch.bool), torch.zeros(keys, dtype=torch.bool)
    if planted in ("q", "dout"):
        of_keys, sharing = seen[token], shared.dkdv[token]  # the keys that the query sees
        out, dk, dv = (at, sharing, of_keys) if planted == "q" else (no_query, of_keys, sharing)
        return dict(zip(RESULTS, (out, out, at, dk, dv), strict=True))
    some = shared.forward[:, token] if planted == "v" else seen[:, token]
    of_keys = seen[some].any(0)  # the keys that these queries see
    if planted == "v":
        return dict(zip(RESULTS, (some, no_query, some, of_keys, no_key), strict=True))
    sharing = (shared.dkdv if fused else shared.dq)[:, token]
    return dict(zip(RESULTS, (some, some, some | sharing, of_keys, of_keys), strict=True))


def computing(name):
    """Return a context with a backend, simulated or emulated if this GPU does not run it."""
    if name == "triton":
        return backend(name)
    return cuda() if name == "cuda" else hopper(order="late")


def attend(tensors, mask, method, name, spoil=None):
    """Return the results of both passes, the backward one after ``spoil(tensors)``."""
    q, k, v, dout = tensors.values()
    with computing(name):
        out, lse = local.attention_forward(q, k, v, mask)
        if spoil is not None:
            spoil(tensors)
        return Attended(
            out, lse, *backward.attention_backward(dout, q, k, v, out, lse, mask, method=method)
        )


def normal(mask, d=64, h=1, g=1, dtype=torch.bfloat16):
    """Return q, k, v and dout of a sequence, by name."""
    return dict(zip(PLANTED, inputs(mask, 1, h, g, d, d, dtype), strict=False))


def check(name, mask, tokens, value, method, d, shared, dtype=torch.bfloat16):
    """Plant ``value`` in one tensor at one token, in a group of heads for each pair. The first
    group holds no such value.
    """
    plants = [(planted, token) for planted in PLANTED for token in tokens]
    # query heads of a key head; one is enough for wide heads, because the simulator is slow
    groups, share = 1 + len(plants), 1 if d > 64 else 2
    heads = {"q": share, "k": 1, "v": 1, "dout": share}
    tensors = normal(mask, d, groups * share, groups, dtype)
    for group, (planted, token) in enumerate(plants, 2):
        tensors[planted][0, token, group * heads[planted] - 1, 5] = value
    seen, fused = mask.dense(), method == "fused"
    for result, x in attend(tensors, mask, method, name)._asdict().items():
        clean, *others = (
            (x.transpose(1, 2)[..., None] if result == "lse" else x).cpu().chunk(groups, 2)
        )
        assert clean.isfinite().all(), f"{result} of another group of heads"
        for (planted, token), part in zip(plants, others, strict=True):
            some = ~part.isfinite().all(-1).all(2)[0]
            may = reached(planted, token, seen, shared, fused)[result]
            where = (
                f"{value} in {planted}[{token}], {method}, {result}: "
                f"{some.nonzero().flatten().tolist()}"
            )
            assert not (some & ~may).any(), where
            if value != value:
                must = reached(planted, token, seen, Shared(seen, seen, seen), fused)[result]
                assert some[must].all(), where


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("split", torch.nan),
        ("split", torch.inf),
        ("fused", torch.nan),
        ("fused", -torch.inf),
        ("head_parallel", torch.nan),
    ],
)
@pytest.mark.parametrize("mask", MASKS["triton"])
def test_triton_contains_nan_in_shared_tiles(mask, method, value):
    mask, tokens = MASKS["triton"][mask]
    with forced(**dict.fromkeys(("forward", "dq", "dkdv", "fused"), TRITON_TILES)):
        check("triton", mask, tokens, value, method, 16, on_triton(mask), torch.float32)


@pytest.mark.sweep
@hopper_only
@pytest.mark.parametrize(
    ("method", "d", "value"),
    [
        ("split", 64, torch.nan),
        ("split", 64, torch.inf),
        ("fused", 64, torch.nan),
        ("head_parallel", 64, torch.nan),
        ("split", 128, torch.nan),
        ("fused", 128, torch.nan),
        ("split", 256, torch.nan),
        ("split", 256, -torch.inf),
    ],
)
@pytest.mark.parametrize("mask", MASKS["gluon"])
def test_hopper_contains_nan_in_shared_tiles(mask, method, d, value, monkeypatch):
    mask, tokens = MASKS["gluon"][mask]
    # query heads of a group share no tile
    monkeypatch.setattr("canon.fast.kernels.gluon.launch.packing", lambda *_: 1)
    check("gluon", mask, tokens, value, method, d, on_hopper(mask, d, method))


@both_backends
def test_a_fully_masked_query_gets_0_if_its_tile_holds_nan(name):
    mask = Mask([Band(0, 100, 0, 40)], 130, 40)  # queries 100 to 129 see nothing
    tensors = normal(mask)
    tensors["v"][:, 7] = torch.nan
    got = attend(tensors, mask, "split", name)
    assert got.out[:, :100].isnan().any(-1).all()
    assert not got.out[:, 100:].any()
    assert (got.lse[..., 100:] == -torch.inf).all()
    assert not got.dq[:, 100:].any()


@pytest.mark.parametrize("method", ["split", "fused"])
def test_a_key_with_scores_of_minus_infinity_has_no_weight(method):
    mask = Mask.causal(48)
    tensors = normal(mask, 16, 2, 2, torch.float32)
    tensors["q"][..., 5], tensors["k"][:, 9, :, 5] = 1, -torch.inf
    with forced(**dict.fromkeys(("forward", "dq", "dkdv", "fused"), TRITON_TILES)):
        got = attend(tensors, mask, method, "triton")
    assert not got.dv[:, 9].any()
    assert got.out[:, 10:].isfinite().all()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *product(["triton"], ["split", "fused"]),
        *(pytest.param("gluon", method, marks=hopper_only) for method in ("split", "fused")),
        ("cuda", "split"),
    ],
)
def test_a_query_with_scores_of_minus_infinity_alone_has_no_gradients(name, method):
    """It counts as a query that sees no key: its gradients are 0,
    and those of the keys are finite.
    """
    mask = Mask.causal(140)
    tensors = normal(mask)
    tensors["q"][:, 70], tensors["q"][..., 5], tensors["k"][..., 5] = 0, 0, 1e30
    tensors["q"][:, 70, :, 5] = -1e30
    got = attend(tensors, mask, method, name)
    assert (got.lse[..., 70] == -torch.inf).all()
    assert not got.out[:, 70].any()
    assert not got.dq[:, 70].any()
    assert all(x.isfinite().all() for x in (got.dq, got.dk, got.dv))


@pytest.mark.parametrize(
    ("name", "d", "method"),
    [
        ("triton", 64, "split"),
        ("triton", 64, "fused"),
        *(
            pytest.param("gluon", *x, marks=hopper_only)
            for x in ((64, "split"), (64, "fused"), (256, "split"))
        ),
    ],
)
def test_a_nan_in_v_of_the_backward_alone_reaches_its_queries_and_its_key(name, d, method):
    """As in a ring, where other ranks contribute to out and lse: dP is NaN in hidden cells too."""
    mask, token = Mask.documents([0, 70, 290]), 20
    got = attend(normal(mask, d), mask, method, name, lambda x: x["v"][:, token].fill_(torch.nan))
    assert torch.equal(got.dq.isnan().any(-1)[0, :, 0].cpu(), mask.dense()[:, token])
    assert got.dk.isnan().any(-1)[0, :, 0].nonzero().flatten().tolist() == [token]
    assert got.dv.isfinite().all()
