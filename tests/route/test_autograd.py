"""Attention under autograd: recomputation, autocast, inference mode, frozen inputs, second
derivatives.
"""

import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from meshes import mesh
from sharded import all_equal, whole
from torch.autograd.functional import hessian, jvp
from torch.utils.checkpoint import checkpoint

from canon import Layout, Mask, fast, reference
from canon.fast import backward as fast_backward
from canon.fast import device
from canon.testing import process_groups

DISTRIBUTED = ("ring_attention", "strided_attention", "magi_attention")
every_function = pytest.mark.parametrize("function", ["attention", *DISTRIBUTED])


def inputs(tokens=24, dtype=torch.float32):
    return whole(Mask.full(tokens), d=16, dv=16, dtype=dtype)[:3]


# --- recomputation


@pytest.fixture
def used(monkeypatch):
    """Record the backends of all kernel look-ups, in order."""
    names = []
    kernels_for = device.kernels_for

    def noted(*args):
        names.append(device.chosen_backend())
        return kernels_for(*args)

    monkeypatch.setattr(fast.local, "kernels_for", noted)
    monkeypatch.setattr(fast_backward, "kernels_for", noted)
    return names


@pytest.mark.interpreted
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_uses_the_backend_inside_the_checkpointed_function(used, reentrant):
    q, k, v = (x.requires_grad_() for x in inputs())

    def layers(q, k, v):
        with fast.backend("triton"):
            q = fast.attention(q, k, v)
        return torch.sin(fast.attention(q, k, v))

    for _ in range(2):
        used.clear()
        checkpoint(layers, q, k, v, use_reentrant=reentrant).sum().backward()
        assert used[:4] == ["triton", None, "triton", None]


@pytest.mark.interpreted
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_recomputation_after_the_end_of_its_backend_raises(used, reentrant, nested):
    q, k, v = (x.requires_grad_() for x in inputs())
    layer = lambda *x: torch.sin(fast.attention(*x))
    again = partial(checkpoint, layer, use_reentrant=reentrant) if nested else layer
    with fast.backend("triton"):
        out = checkpoint(again, q, k, v, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="inside the function that is checkpointed"):
        out.sum().backward()
    device._first_runs.clear()


@pytest.mark.interpreted
def test_an_evaluation_with_a_backend_does_not_stop_a_training_without_one(used):
    q, k, v = (x.requires_grad_() for x in inputs())
    with fast.backend("triton"), torch.no_grad():
        fast.attention(q, k, v)
    checkpoint(
        lambda *x: torch.sin(fast.attention(*x)), q, k, v, use_reentrant=False
    ).sum().backward()
    device._first_runs.clear()


# --- autocast


@every_function
def test_autocast_casts_the_inputs_and_nothing_else(half, function):
    def program():
        leaves = [x.requires_grad_() for x in inputs()]
        cast = [x.detach().bfloat16().requires_grad_() for x in leaves]
        attend = partial(getattr(half, function), return_lse=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = attend(*leaves)
            grads = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
        expected_out, expected_lse = attend(*cast)
        expected = torch.autograd.grad(expected_out.float().sum() + expected_lse.sum(), cast)
        assert out.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
        for mine, theirs in zip(grads, expected, strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, theirs.float())

    program() if function == "attention" else process_groups.threads(program, 2)


def test_autocast_leaves_float64_alone_and_covers_the_parts(half):
    q, k, v = inputs(dtype=torch.float64)
    mask = Mask.causal(24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = half.attention_forward(q, k, v, mask)
        grads = half.attention_backward(torch.ones_like(out), q, k, v, out, lse, mask)
        merged, _ = half.merge(out, lse, out, lse)
    assert {x.dtype for x in (out, lse, *grads, merged)} == {torch.float64}
    exact, exact_lse = half.attention_forward(q, k, v, mask)
    assert torch.equal(out, exact)
    assert torch.equal(lse, exact_lse)


# --- inference first


@pytest.mark.parametrize("function", DISTRIBUTED)
def test_training_works_after_a_first_call_in_inference_mode(half, function):
    mask = Mask.documents([0, 5, 17, 48])

    def program():
        layout = reference.dispatch(mask, 2, chunk=4)
        with torch.inference_mode():
            getattr(half, function)(*inputs(layout.size(dist.get_rank())), mask, layout)
        leaves = [x.requires_grad_() for x in inputs(layout.size(dist.get_rank()))]
        getattr(half, function)(*leaves, mask, layout).sum().backward()
        return all(bool(x.grad.isfinite().all()) for x in leaves)

    assert process_groups.threads(program, 2) == [True] * 2


# --- frozen inputs


def messages(half, function, frozen, sent):
    """Return the gradients of rank 0, and the bytes that it sends in the backward pass."""

    def program():
        layout = Layout.zigzag(48, 2)
        leaves = [
            x.requires_grad_(name not in frozen) for name, x in zip("qkv", inputs(), strict=True)
        ]
        out = getattr(half, function)(*leaves, None, layout)
        dist.barrier()
        sent.clear()
        dist.barrier()
        out.square().sum().backward()
        return [x.grad for x in leaves]

    return process_groups.threads(program, 2)[0], sum(sent)


@pytest.mark.parametrize("function", DISTRIBUTED)
def test_gradients_that_are_not_needed_are_not_sent(half, function, sent):
    everything, all_bytes = messages(half, function, "", sent)
    queries, few_bytes = messages(half, function, "kv", sent)
    keys, more_bytes = messages(half, function, "q", sent)
    assert torch.equal(queries[0], everything[0])
    assert queries[1] is queries[2] is keys[0] is None
    assert all_equal(keys[1:], everything[1:])
    assert all_bytes - few_bytes >= 4 * 24 * 2 * (16 + 16), (
        "dk and dv of the other rank, in float32"
    )
    assert more_bytes == all_bytes


@pytest.mark.parametrize("method", ["split", "fused", "head_parallel", "auto"])
@pytest.mark.parametrize("frozen", ["q", "k", "v", "k v sink", "q k", "q k v"])
def test_attention_computes_the_gradients_that_are_needed(half, method, frozen):
    def grads(*frozen):
        leaves = dict(zip("qkv", inputs(), strict=True)) | {"sink": torch.linspace(-1, 1, 4)}
        for name, x in leaves.items():
            x.requires_grad_(name not in frozen)
        half.attention(**leaves, backward=method).square().sum().backward()
        return {name: x.grad for name, x in leaves.items()}

    every, some = grads(), grads(*frozen.split())
    for name, grad in some.items():
        assert grad is None if name in frozen.split() else torch.equal(grad, every[name])


# --- unsupported differentiation


def assert_refused(call, x):
    """Fail unless a transform and forward mode raise errors that name them."""
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(call)(x[None])
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode"),
    ):
        call(torch.autograd.forward_ad.make_dual(x, x))


# torch's forward mode causes it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@every_function
def test_unsupported_differentiation_is_named(half, function):
    attend = getattr(half, function)
    q, k, v = (x.requires_grad_() for x in inputs())
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: attend(q, k, v).sum())(q)
    assert_refused(lambda q: attend(q, k.detach(), v.detach()), q.detach())
    (dq,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        (dq.sum() + q.sum()).backward()


# as above
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_parts_and_decoding_refuse_differentiation(half):
    (q, k, v), mask = inputs(), Mask.causal(24)
    out, lse = half.attention_forward(q.requires_grad_(), k, v, mask)
    of_parts = *half.merge(q, lse, q, lse), *half.attention_backward(q, q, k, v, q, lse, mask)
    assert not any(x.requires_grad for x in (out, lse, *of_parts))
    q = q.detach()
    for call in (
        lambda q: half.attention_forward(q, k, v, mask),
        lambda q: half.attention_backward(q, q, k, v, out, lse, mask),
        lambda out: half.merge(out, lse, out, lse),
        lambda q: half.decode_attention(q, k, v),
    ):
        assert_refused(call, q)


@pytest.mark.interpreted
def test_views_of_negated_numbers_are_read_as_these():
    def results(change):
        leaves = [x.requires_grad_() for x in (*inputs(), torch.ones(4))]
        out = fast.attention(*map(change, leaves[:3]), sink=change(leaves[3]))
        return out, *torch.autograd.grad(out, leaves, change(leaves[0].detach()))

    view = lambda x: torch.complex(x, -x).conj().imag
    assert view(torch.ones(1)).is_neg()
    with fast.backend("triton"):
        assert all_equal(results(view), results(lambda x: x))


@pytest.mark.parametrize("over_mesh", [False, True])
def test_second_derivatives_are_not_silently_zero(half, over_mesh):
    """torch takes gradients that do not depend on an input for constants."""

    def program():
        over = functools.partial(half.ring_attention, group=mesh(2, 2)) if over_mesh else None
        function = over or half.attention
        attend = lambda q, k, v, sink: function(q, k, v, sink=sink)
        given = [*inputs(), torch.zeros(4)]
        for place, x in enumerate(given):
            of_one = lambda x, i=place: attend(*given[:i], x, *given[i + 1 :])
            with pytest.raises(RuntimeError, match="second derivatives"):
                hessian(lambda x, f=of_one: f(x).sum(), x)
            with pytest.raises(RuntimeError, match="second derivatives"):
                jvp(of_one, x, x)

    process_groups.threads(program, 4) if over_mesh else program()
