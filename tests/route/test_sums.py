"""1,024 equal parts go through every sum of the guide's table, in bfloat16. A sum in bfloat16 would
stop at 256 parts.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from folders import GUIDE
from sharded import DEVICE

from canon import Mask, fast, reference, trees
from canon.fast.active_queries import row_indices
from canon.fast.kernels.torch import rows as plain_rows
from canon.fast.kernels.triton.rows import add_rows, add_to_rows
from canon.fast.kernels.triton.sum_ranks import sum_ranks
from canon.fast.latent import _Projection
from canon.ranks.movement import _sum_in_order
from canon.reference.group_collectives import GroupReduce
from canon.reference.latent import Projection
from canon.reference.ring import _plus_received
from canon.reference.strided import ReduceScatter
from canon.route.call import Call
from canon.route.sink_weights import weighted
from canon.training import linear_loss, linear_sequence_loss, sequence_loss

# parts, and one of them: neither it nor 129 times it is a round number in bfloat16
N, ONE = 1024, 1 + 2**-7
HALVES = {"reference": reference, "fast": fast}


def ones(*shape, dtype=torch.bfloat16):
    return torch.full(shape, ONE, dtype=dtype, device=DEVICE)


class Arrived(SimpleNamespace):
    """A message that has arrived."""

    def wait(self):
        return self.tensors


def losses(half):
    """The loss of a token is log 2 + log(1 + small): all are equal."""
    logits = torch.zeros(N, 2, dtype=torch.bfloat16)
    labels = torch.zeros(N, dtype=torch.int64)
    yield sequence_loss(logits, labels, num_items_in_batch=1), N * torch.tensor(2.0).log()
    hidden = torch.zeros(N, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    yield (
        linear_sequence_loss(hidden, weight, labels, chunk=1, num_items_in_batch=1),
        N * torch.tensor(2.0).log(),
    )


def counts(half):
    labels, weights = torch.zeros(N, dtype=torch.int64), torch.full((N,), ONE, dtype=torch.bfloat16)
    yield linear_loss.count_of(labels, weights, -100), N * ONE
    yield linear_loss.count_of(labels, None, -100), N


def head_gradients(half):
    """Each token is a chunk. The gradient of its logits is -+ 1/2."""
    head = (torch.zeros(2, 1), torch.zeros(2))
    weight, bias = (x.bfloat16().requires_grad_() for x in head)
    hidden, labels = torch.full((N, 1), ONE).bfloat16(), torch.zeros(N, dtype=torch.int64)
    loss = linear_sequence_loss(
        hidden, weight, labels, linear_bias=bias, chunk=1, num_items_in_batch=1
    )
    loss.backward()
    yield weight.grad[1], N * ONE / 2
    yield bias.grad[1], N / 2


def hidden_gradient(half):
    """Each column of the vocabulary is a block: all but one add 1 / N."""
    weight = torch.ones(N + 1, 1).bfloat16()
    weight[0] = 0
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_sequence_loss(hidden, weight, torch.zeros(1, dtype=torch.int64)).backward()
    yield hidden.grad, N / (N + 1)


def normalisers(half):
    """The sum of exponentials over blocks of one column, and over ranks that each have a column."""
    labels, none = torch.zeros(1, dtype=torch.int64), (None, None, 0.0, 0.1, -100, 1, 0)
    terms = linear_loss._Terms(labels, *none, N, None, 1)
    blocks = [slice(i, i + 1) for i in range(N)]
    yield terms.statistics(torch.zeros(1, N), blocks, labels)[0].exp(), N
    terms = linear_loss._Terms(labels, *none, N, None, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_gather", lambda parts, mine, group: [part.copy_(mine) for part in parts]
        )
        lse, target, mean = terms.statistics(torch.full((1, 1), ONE), blocks[:1], labels)
    yield (lse - ONE).exp(), N
    yield target, N * ONE
    yield mean, ONE


def of_tiles(half):
    """All scores are 0. A query sees N keys, then N queries see a key, with out = 0 and lse = 0: so
    p = 1, and ds = dout v.
    """
    new = lambda tokens, value: torch.full(
        (1, tokens, 1, 16), value, dtype=torch.bfloat16, device=DEVICE
    )
    lse = torch.zeros(1, 1, N, device=DEVICE)
    few, many = (Mask.full(1, N), new(1, 0), lse[..., :1]), (Mask.full(N, 1), new(N, 0), lse)
    out, total = half.attention_forward(
        new(1, 0), new(N, 1), new(N, ONE), few[0], out_dtype=torch.float32
    )
    yield out, ONE
    yield total.exp(), N
    for backward in ("split", "fused", "head_parallel"):
        differentiate = lambda dout, q, k, v, case: half.attention_backward(
            dout,
            q,
            k,
            v,
            case[1],
            case[2],
            case[0],
            scale=1.0,
            method=backward,
            grad_dtype=torch.float32,
        )
        yield differentiate(new(1, ONE), new(1, 0), new(N, 1), new(N, 1), few)[0], 16 * N * ONE
        _, dk, dv = differentiate(new(N, ONE), new(N, 1), new(1, 0), new(1, 1), many)
        yield dk, 16 * N * ONE
        yield dv, N * ONE


def of_steps(half):
    """The parts of a query's result are merged one after another: out stays, and lse grows."""
    out, lse = ones(1, 1, 1, 16, dtype=torch.float32), torch.zeros(1, 1, 1, device=DEVICE)
    found, total = out, lse
    for _ in range(63):
        found, total = half.merge(found, total, out, lse)
    yield found, ONE
    yield total.exp(), 64


def of_hops(half):
    """In float32, the default of reduce_dtype."""
    part, total = ones(1, 1, 1, 16), torch.zeros(1, 1, 1, 16, device=DEVICE)
    rows = row_indices(0, 1, total.device)
    for _ in range(N):
        if half is fast:
            add_to_rows(total, rows, part.float())
        else:
            (total,) = _plus_received([part.float()], Arrived(tensors=[total]))
    yield total, N * ONE


def of_ranks(half):
    """Each part travels in bfloat16."""
    received = ones(N, 1, 1, 1, 16)
    if half is fast:
        for operation in (sum_ranks, plain_rows.sum_ranks):
            total = torch.empty(1, 1, 1, 16, device=DEVICE)
            operation(received.transpose(0, 1), total)
            yield total, N * ONE
    else:
        message = ReduceScatter.__new__(ReduceScatter)
        message.received, message.request, message.widths = received[..., 0, :], None, [8, 8]
        yield torch.cat(message.wait(), -1), N * ONE


def of_rows(half):
    """N ranks return a row of one token."""
    for dtype in (torch.float32, torch.bfloat16):
        into, received = torch.zeros(1, 16, dtype=dtype, device=DEVICE), ones(N, 16)
        if half is fast:
            first, places = torch.tensor([0, N], device=DEVICE), torch.arange(N, device=DEVICE)
            add_rows(
                into[None, :, None], received[None, :, None], first, places, into[None, :, None]
            )
        else:
            reduction = GroupReduce.__new__(GroupReduce)
            reduction.sizes, reduction.work = SimpleNamespace(sent=[1] * N), Arrived(tensors=None)
            reduction.into, reduction.received = into, received
            reduction.rows = torch.zeros(N, dtype=torch.int64, device=DEVICE)
            reduction.wait()
        yield into, N * ONE


def up_weight(half):
    """N steps of one token, and one step of N tokens. One head; all widths are 16."""
    weight, shapes = ones(32, 16), ((1, 1, 1, 32), (1, 1, 1, 16), (1, 1, 1, 16), (32, 16))
    call = Call.__new__(Call)
    object.__setattr__(call, "shapes", tuple(map(torch.Size, shapes)))
    for steps, tokens in ((N, 1), (1, N)):
        latent = ones(1, tokens, 1, 16)
        dk = ones(1, tokens, 1, 32).float()
        dv = ones(1, tokens, 1, 16).float()
        projection = _Projection(call, weight, True) if half is fast else Projection(call, weight)
        projection.latent = latent.flatten(0, 2) if half is fast else latent
        for _ in range(steps):
            projection.gradients(dk, dv)
        yield projection.dup_weight, N * ONE**2


def dsink(half):
    """A sink of weight 1/2 in N queries."""
    out, lse = ones(1, N, 1, 16), torch.zeros(1, 1, N, device=DEVICE)
    of_half = {reference: reference.local.under_sink, fast: fast.sinks.under_sink}[half]
    for under_sink in (of_half, weighted):
        sink = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        (grad,) = torch.autograd.grad(under_sink(out, lse, sink), sink, out)
        yield -grad, N * 16 * ONE**2 / 4


def of_shards(half):
    yield _sum_in_order(ones(N, 16)), N * ONE


def of_sequences(half):
    tree = trees.pack([[0, 1, 2 + i] for i in range(N)])
    x = torch.zeros(len(tree.token_ids), dtype=torch.bfloat16, requires_grad=True)
    torch.stack([part[0] for part in tree.unpack(x)]).backward(torch.full((N,), ONE).bfloat16())
    yield x.grad[0], N * ONE


SUMS = {  # the table's first column
    "losses": losses,
    "label counts and `weights`": counts,
    "gradients of head and bias": head_gradients,
    "gradient of hidden states": hidden_gradient,
    "exponentials of a divided vocabulary": normalisers,
    "`out`, `lse`; dq, dk, dv on a rank": of_tiles,
    "`merge`": of_steps,
    "dk, dv in a ring": of_hops,
    "dk, dv in `strided_attention`": of_ranks,
    "dk, dv in `magi_attention`; `group_reduce`": of_rows,
    "gradient of `up_weight`": up_weight,
    "gradient of `sink`": dsink,
    "`unshard(partial_grad=True)`": of_shards,
    "gradient of `Tree.unpack`": of_sequences,
}
ONE_FOR_BOTH = [
    losses,
    counts,
    head_gradients,
    hidden_gradient,
    normalisers,
    of_shards,
    of_sequences,
]
CASES = [
    (name, half)
    for name, add in SUMS.items()
    for half in (["reference"] if add in ONE_FOR_BOTH else HALVES)
]


@pytest.mark.parametrize(("name", "half"), CASES)
def test_equal_parts_add_up(name, half):
    """The result has at most the rounding of its dtype, 2^-9 in bfloat16, and in float32 that of N
    additions in a row.
    """
    for found, expected in SUMS[name](HALVES[half]):
        error = (found.detach().double() / expected - 1).abs().max()
        assert error <= (2**-8 if found.dtype == torch.bfloat16 else N * 2**-25), (
            found.flatten()[0],
            expected,
        )


def test_the_table_of_the_guide_has_every_sum():
    table = GUIDE.read_text().split("## In which dtype sums are added")[1].split("\n## ")[0]
    assert [row.strip() for row in re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]] == list(
        SUMS
    )
