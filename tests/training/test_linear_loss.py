"""`linear_sequence_loss` equals the loss of all logits, with its gradients, its memory and its
errors.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd.functional import hessian
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile

from canon.testing import process_groups
from canon.training import linear_sequence_loss

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
    leaves, labels, weights=None, num_items_in_batch=None, softcap=None, z_loss=0.0, **options
):
    """Return the loss by its definition, with all logits."""
    logits, labels = linear(*leaves).flatten(0, -2), labels.flatten()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    factors = (labels >= 0).double() * (1 if weights is None else weights.flatten())
    losses = cross_entropy(logits, labels, reduction="none", **options)  # label_smoothing
    losses = losses + z_loss * torch.logsumexp(logits, 1).square()
    return (factors * losses).sum() / (num_items_in_batch or factors.sum() or 1)


def of_chunks(leaves, labels, **options):
    return linear_sequence_loss(*leaves[:2], labels, linear_bias=leaves[2], **options)


def with_weights(options, weights):
    return options | {"weights": weights} if "weights" in options else options


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_equals_the_loss_of_all_logits(options, chunk):
    leaves, labels, weights = inputs()
    options = with_weights(options, weights)
    expected = all_logits(leaves, labels, **options)
    found = of_chunks(leaves, labels, chunk=chunk, **options)
    close(found, expected)
    close(*(torch.autograd.grad(3 * x, leaves) for x in (found, expected)))


def compare_on_a_mesh(options, shards):
    """Two token ranks with their own shards, and two vocabulary ranks with slices of 20 and 30
    rows.
    """
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = (mesh.get_local_rank(name) for name in ("cp", "tp"))
    leaves, labels, weights = inputs(sum(shards))
    expected = all_logits(leaves, labels, **with_weights(options, weights))
    grads = torch.autograd.grad(expected, leaves)
    tokens = slice(sum(shards[:cp]), sum(shards[: cp + 1]))
    rows = slice(sum(SLICES[:tp]), sum(SLICES[: tp + 1]))
    parts = zip(leaves, ((slice(None), tokens), rows, rows), strict=True)
    mine = [x.detach()[part].requires_grad_() for x, part in parts]
    options = with_weights(options, weights[:, tokens])
    groups = {"group": mesh["cp"], "vocab_group": mesh["tp"]}
    found = of_chunks(mine, labels[:, tokens], chunk=3, **options, **groups)
    close(found.detach(), expected.detach())
    dhidden, *of_head = torch.autograd.grad(found, mine)
    close(dhidden / 2, grads[0][:, tokens])  # the averaging of DDP divides by the two token ranks
    for grad, right in zip(of_head, grads[1:], strict=True):
        dist.all_reduce(grad, group=mesh.get_group("cp"))
        close(grad / 2, right[rows])


@pytest.mark.parametrize("shards", SHARDS)
def test_tokens_and_vocabulary_may_be_divided_unevenly(shards):
    for options in OPTIONS:
        process_groups.threads(partial(compare_on_a_mesh, options, shards), 4)


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
        step = lambda: of_chunks(leaves, labels, chunk=chunk_of_call, **options).backward()
        peak = bytes_at_peak(step)
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
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in leaves]
    labels, exact = labels.to(DEVICE), [x.detach().double().requires_grad_() for x in leaves]
    expected, found = all_logits(exact, labels), of_chunks(leaves, labels, chunk=7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    both = torch.autograd.grad(found, leaves), torch.autograd.grad(expected, exact)
    for grad, right in zip(*both, strict=True):
        assert grad.dtype == dtype
        assert (grad - right).norm() <= 1.5 * torch.finfo(dtype).eps * right.norm()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = of_chunks([x.float() for x in leaves], labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2.0**-40, 2.0**20])
def test_small_and_large_weights_fit_in_float16(size):
    """Gradients of a chunk's logits are float16, and have their digits whatever the size of the
    weights.
    """
    leaves, labels, weights = inputs(dtype=torch.float16)
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in leaves]
    labels, weights = labels.to(DEVICE), weights.to(DEVICE)

    def gradients(weights, items):
        found = of_chunks(leaves, labels, weights=weights, num_items_in_batch=items, chunk=7)
        return torch.autograd.grad(found, leaves)

    expected = gradients(weights, 5.0)
    close(gradients(size * weights, 5 * size), expected, rtol=0, atol=0)


def test_its_gradients_serve_one_backward_pass():
    leaves, labels, _ = inputs()
    loss = of_chunks(leaves, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="to one backward pass: call it again instead of retain_graph=True"
    ):
        loss.backward()
    loss = of_chunks(leaves, labels)
    (grad,) = torch.autograd.grad(loss, leaves[1], create_graph=True)
    with pytest.raises(
        RuntimeError, match="does not support second derivatives of linear_sequence_loss"
    ):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="second derivatives of linear_sequence_loss"):
        hessian(lambda hidden: of_chunks([hidden, *leaves[1:]], labels), leaves[0])
    with torch.no_grad():
        close(of_chunks(leaves, labels), loss.detach())


def wrong_groups_and_arguments():
    """Ranks 0 and 3 share no group."""
    leaves, labels, _ = inputs()
    with pytest.raises(
        ValueError, match=r"share the ranks \[0, 1, 2, 3\], expected this rank only: pass two dim"
    ):
        of_chunks(leaves, labels, vocab_group=dist.group.WORLD)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    smoothing = 2 if dist.get_rank() == 3 else 0
    with pytest.raises(
        ValueError,
        match="label_smoothing must be a finite number >= 0 and <= 1, got 2|the ranks disagree",
    ):
        of_chunks(
            leaves, labels, group=mesh["cp"], vocab_group=mesh["tp"], label_smoothing=smoothing
        )
    labels[0, 0] = 100 if smoothing else 0
    with pytest.raises(ValueError, match="shift_labels must be in 0..99|the ranks disagree"):
        of_chunks(leaves, labels, group=mesh["cp"], vocab_group=mesh["tp"])


def test_wrong_groups_and_arguments_raise_on_every_rank():
    process_groups.threads(wrong_groups_and_arguments, 4)
