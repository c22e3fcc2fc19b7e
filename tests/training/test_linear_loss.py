"""`linear_sequence_loss` equals the loss of all logits, with its gradients, its memory and its
errors. Its faults are seen.
"""

import itertools
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile

from canon.testing import process_groups
from canon.training import linear_loss, linear_sequence_loss, sequence_loss

WIDTH, VOCABULARY, SLICES = 6, 50, [20, 30]
OPTIONS = [
    {},
    {"softcap": 3.0},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"num_items_in_batch": torch.tensor(5)},
    {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.3, "weights": True},
]
SHARDS = [(5, 2), (7, 0), (0, 0)]  # tokens of each rank
DEVICE = "cuda" if process_groups.kernel_gpus() else "cpu"
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def inputs(tokens=7, dtype=torch.float64, seed=0):
    """Return hidden, the output head, labels and weights. Two tokens have no label."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    leaves = [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]
    labels = torch.randint(VOCABULARY, (2, tokens), generator=draw)
    labels[0, 2:4] = -100
    return leaves, labels, torch.rand(2, tokens, generator=draw)


def all_logits(
    hidden,
    weight,
    labels,
    *,
    bias,
    weights=None,
    num_items_in_batch=None,
    softcap=None,
    z_loss=0.0,
    label_smoothing=0.0,
):
    """Return the loss by its definition, with all logits."""
    logits, labels = linear(hidden, weight, bias).flatten(0, -2), labels.flatten()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    factors = (labels >= 0).double() * (1 if weights is None else weights.flatten())
    losses = cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * torch.logsumexp(logits, 1).square()
    return (factors * losses).sum() / (
        factors.sum() if num_items_in_batch is None else num_items_in_batch
    )


def with_weights(options, weights):
    return options | {"weights": weights} if "weights" in options else options


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_equals_the_loss_of_all_logits(options, chunk):
    leaves, labels, weights = inputs()
    hidden, weight, bias = leaves
    options = with_weights(options, weights)
    expected = all_logits(hidden, weight, labels, bias=bias, **options)
    found = linear_sequence_loss(hidden, weight, labels, linear_bias=bias, chunk=chunk, **options)
    close(found, expected)
    close(*(torch.autograd.grad(3 * x, leaves) for x in (found, expected)))


def mesh_of_four():
    """Return this rank's place among the token ranks and among the vocabulary ranks, and both
    groups.
    """
    tokens, vocabulary = (
        [dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 2], [1, 3]), ([0, 1], [2, 3]))
    )
    cp, tp = divmod(dist.get_rank(), 2)
    return cp, tp, {"group": tokens[tp], "vocab_group": vocabulary[cp]}


def compare_on_a_mesh(loss, options, shards):
    """Two token ranks with their own shards, and two vocabulary ranks with slices of 20 and 30
    rows.
    """
    cp, tp, groups = mesh_of_four()
    leaves, labels, weights = inputs(sum(shards))
    options = with_weights(options, weights)
    hidden, weight, bias = leaves
    expected = (
        all_logits(hidden, weight, labels, bias=bias, **options)
        if sum(shards)
        else 0 * sum(x.sum() for x in leaves)
    )
    grads = torch.autograd.grad(expected, leaves)
    tokens = slice(sum(shards[:cp]), sum(shards[: cp + 1]))
    rows = slice(sum(SLICES[:tp]), sum(SLICES[: tp + 1]))
    mine = [
        x.detach()[part].requires_grad_()
        for x, part in ((hidden, (slice(None), tokens)), (weight, rows), (bias, rows))
    ]
    options = with_weights(options, weights[:, tokens])
    found = loss(*mine[:2], labels[:, tokens], linear_bias=mine[2], chunk=3, **options, **groups)
    close(found.detach(), expected.detach())
    dhidden, *of_head = torch.autograd.grad(found, mine)
    close(dhidden / 2, grads[0][:, tokens])  # the averaging of DDP divides by the two token ranks
    for grad, right in zip(of_head, grads[1:], strict=True):
        dist.all_reduce(grad, group=groups["group"])
        close(grad / 2, right[rows])


@pytest.mark.parametrize("shards", SHARDS)
def test_tokens_and_vocabulary_may_be_divided_unevenly(shards):
    for options in OPTIONS:
        process_groups.threads(partial(compare_on_a_mesh, linear_sequence_loss, options, shards), 4)


FAULTS = [  # a text of the file, its replacement, and the options that show the fault
    ("maximum + summed.log()", "summed.log()", {}),
    ("labels - block.start", "labels", {}),
    ("terms.labels[part] - terms.first", "terms.labels[part]", {}),
    ("(maxima - maximum).exp()", "maxima.exp()", {}),
    ("if terms.slices > 1:", "if False:", {}),
    ("dx += _product", "dx = _product", {}),
    ("dweight[block] += _product", "dweight[block] = _product", {}),
    ("part.mul_(factor)", "part.mul_(1)", {}),
    ("(1 - terms.smoothing) * target", "target", OPTIONS[3]),
    ("(terms.smoothing - 1) * factor", "-factor", OPTIONS[3]),
    ("total / self.vocabulary", "total / logits.shape[1]", OPTIONS[3]),
    (
        "factor * terms.smoothing / terms.vocabulary",
        "(factor != 0) * terms.smoothing / terms.vocabulary",
        OPTIONS[-1],
    ),
    ("(1 + 2 * terms.z_loss * lse)", "(1 + terms.z_loss * lse)", OPTIONS[2]),
    (".square_().neg_()", ".neg_()", OPTIONS[1]),
    ("self.weights[part]", "self.weights.flip(0)[part]", OPTIONS[-1]),
]


@pytest.mark.parametrize(("text", "fault", "options"), FAULTS, ids=[text for text, *_ in FAULTS])
def test_a_planted_fault_is_seen(text, fault, options, monkeypatch):
    source = Path(linear_loss.__file__).read_text()
    assert source.count(text) == 1
    planted = types.ModuleType("planted")
    monkeypatch.setitem(sys.modules, "planted", planted)  # dataclasses look there
    exec(compile(source.replace(text, fault), "planted", "exec"), vars(planted))
    with pytest.raises(RuntimeError) as raised:
        process_groups.threads(
            partial(compare_on_a_mesh, planted.linear_sequence_loss, options, SHARDS[0]), 4
        )
    assert isinstance(raised.value.__cause__, AssertionError)


def bytes_at_peak(program):
    """Return the most bytes that tensors from inside the program hold at a time, also temporaries
    of operators.
    """
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        program()
    events = sorted(measured.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(
        itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.1}], ids=["plain", "all"]
)
def test_peak_memory_is_that_of_the_formula(dtype, options):
    """1.2 chunks of float32 logits; in 16 bits also the float32 sum for the weight, and in the end
    only that and its result.
    """
    tokens, width, vocabulary, chunk = (
        (256, 64, 2048, 64) if DEVICE == "cpu" else (4096, 2048, 65536, 1024)
    )
    of_sum = 0 if dtype == torch.float32 else 4 * width * vocabulary / (chunk * vocabulary * 4)
    shapes = (tokens, width), (vocabulary, width), (vocabulary,)
    leaves = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)

    def excess(chunk_of_call):
        for x in leaves:
            x.grad = None
        loss = partial(
            linear_sequence_loss,
            *leaves[:2],
            labels,
            linear_bias=leaves[2],
            chunk=chunk_of_call,
            **options,
        )
        peak = bytes_at_peak(lambda: loss().backward())
        return (peak - sum(x.nbytes for x in leaves)) / (chunk * vocabulary * 4)

    excess(chunk)  # allocates the workspaces of libraries
    assert max(1 + of_sum / 2, of_sum) <= excess(chunk) <= max(1.2 + of_sum / 2, of_sum + 0.2)
    assert excess(tokens) > 2  # all logits at one time


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_have_float32_logits_and_round_gradients_once(dtype):
    """A rounding errs by at most eps / 2: of dlogits, of the result, and for hidden of its product
    with 1 / 12.
    """
    leaves, labels, _ = inputs(dtype=dtype)
    hidden, weight, bias = leaves = [x.detach().to(DEVICE).requires_grad_() for x in leaves]
    labels, exact = labels.to(DEVICE), [x.detach().double().requires_grad_() for x in leaves]
    expected = all_logits(*exact[:2], labels, bias=exact[2])
    found = linear_sequence_loss(hidden, weight, labels, linear_bias=bias, chunk=7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    for grad, right in zip(
        *(torch.autograd.grad(*x) for x in ((found, leaves), (expected, exact))), strict=True
    ):
        assert grad.dtype == dtype
        assert (grad - right).norm() <= 1.5 * torch.finfo(dtype).eps * right.norm()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = linear_sequence_loss(
            *(x.float() for x in (hidden, weight)), labels, linear_bias=bias.float()
        )
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2.0**-40, 2.0**20])
def test_small_and_large_weights_fit_in_float16(size):
    """Gradients of a chunk's logits are float16, and have their digits whatever the size of the
    weights.
    """
    leaves, labels, weights = inputs(dtype=torch.float16)
    leaves = [x.detach().to(DEVICE) for x in leaves]
    labels = labels.to(DEVICE)
    weights = weights.to(DEVICE)

    def gradients(weights, items):
        mine = [x.clone().requires_grad_() for x in leaves]
        loss = partial(linear_sequence_loss, *mine[:2], labels, linear_bias=mine[2], chunk=7)
        return torch.autograd.grad(loss(weights=weights, num_items_in_batch=items), mine)

    expected = gradients(weights, 5.0)
    close(gradients(size * weights, 5 * size), expected, rtol=0, atol=0)


def test_its_gradients_serve_one_backward_pass():
    (hidden, weight, bias), labels, _ = inputs()
    loss = linear_sequence_loss(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="to one backward pass: call it again instead of retain_graph=True"
    ):
        loss.backward()
    loss = linear_sequence_loss(hidden, weight, labels, linear_bias=bias)
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(
        RuntimeError, match="does not support second derivatives of linear_sequence_loss"
    ):
        grad.sum().backward()
    with torch.no_grad():
        close(linear_sequence_loss(hidden, weight, labels, linear_bias=bias), loss.detach())


def test_weights_sums_and_item_counts_of_both_losses_agree():
    (hidden, weight, _), labels, weights = inputs()
    for options in (
        {},
        {"weights": weights},
        {"num_items_in_batch": 1},
        {"weights": weights, "num_items_in_batch": 7.5},
    ):
        logits = linear(hidden, weight)
        found = sequence_loss(logits, labels, **options)
        expected = linear_sequence_loss(hidden, weight, labels, **options)
        close(found, expected)
        close(*(torch.autograd.grad(x, (hidden, weight)) for x in (found, expected)))


def wrong_groups_and_arguments():
    """Ranks 0 and 3 share no group."""
    (hidden, weight, _), labels, _ = inputs()
    with pytest.raises(
        ValueError,
        match=r"share the ranks \[0, 1, 2, 3\], expected this rank only: pass two "
        r"dimensions",
    ):
        linear_sequence_loss(hidden, weight, labels, vocab_group=dist.group.WORLD)
    groups = mesh_of_four()[2]
    with pytest.raises(
        ValueError,
        match="label_smoothing must be a finite number >= 0 and <= 1, got 2|the ranks disagree",
    ):
        linear_sequence_loss(
            hidden, weight, labels, **groups, label_smoothing=2 if dist.get_rank() == 3 else 0
        )


def test_wrong_groups_and_arguments_raise_on_every_rank():
    process_groups.threads(wrong_groups_and_arguments, 4)
