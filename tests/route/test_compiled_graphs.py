"""Claims about torch.compile: one graph without breaks serves all masks and options, and computes
what eager calls compute.

The programs run in processes of their own, because the type checker of the tests cannot be
compiled.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from compiled import assert_same, compare, compiled_once, inputs
from sampling import ALL, covering
from sharded import OWN_LAYOUTS
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from canon import Layout, Mask, fast, reference
from canon.reference.local import LOCAL
from canon.route import operators
from canon.testing import process_groups

TOKENS = 24
TILED = 160  # tokens with rank_invariant: one rank holds 128, and the other one 32
MASKS, LONG = (
    [Mask.documents([0, *ends, n]) for ends in ([], [5], [7, 9], [1, 2, 20])]
    for n in (TOKENS, TILED)
)
CALLS = [
    ("ring_attention", {}),
    ("zigzag_attention", {"reduce_dtype": torch.bfloat16}),
    ("striped_attention", {"backward": "head_parallel", "scale": 0.3, "softcap": 2.0}),
    ("strided_attention", {"head_stride": 2, "backward_first_stride": 1}),
    ("strided_attention", {"backward_schedule": "ring"}),
    ("magi_attention", {"casts": 2}),
    ("magi_attention", {"own_keys_first": False, "keep_kv": True}),
    ("magi_attention", {"casts": 2, "keep_kv": True}),
]
OPTIONS = [
    ("ring_attention", {"sink": True}),
    ("zigzag_attention", {"sink": True, "mesh": True}),
    ("striped_attention", {"mesh": True}),
    ("strided_attention", {"rank_invariant": True, "sink": True}),
    ("magi_attention", {"rank_invariant": True, "mesh": True}),
]
EVERY = [*CALLS, *OPTIONS]
# each function and each option
SOME = [EVERY[i] for i in covering(range(len(EVERY)), lambda i: {EVERY[i][0], *EVERY[i][1]})]


# --- several ranks


def with_sink(tokens):
    """Return q, k, v and a sink."""
    return [*inputs(tokens), torch.linspace(-1, 1, 4, requires_grad=True)]


def distributed(half, backend, calls):
    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # for keep_kv
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    for name, options in calls:
        tiled, options = "rank_invariant" in options, options | {"return_lse": True}
        sink = options.pop("sink", False)
        options["group"] = mesh if options.pop("mesh", False) else None

        def model(q, k, v, z, mask, *layout):
            under = {"sink": z} if sink else {}
            out, lse = getattr(half, name)(torch.sin(q), k, v, mask, *layout, **options, **under)
            return torch.cos(out) + 0 * z[:, None], lse

        compiled = compiled_once(model, backend)

        def check(mask, layout):
            tokens = (
                Layout.contiguous(TILED, 2, 128).size(dist.get_rank()) if tiled else TOKENS // 2
            )
            given = [mask] if name in OWN_LAYOUTS else [mask, layout]
            exact = backend != "inductor" and not sink
            compare(compiled, model, exact, with_sink(tokens), *given)

        for mask in (
            LONG[1:3] if tiled else MASKS if half is reference else MASKS[1:3]
        ):  # Triton's interpreter is slow
            check(
                mask,
                Layout.contiguous(TILED, 2, 128) if tiled else reference.dispatch(mask, 2, chunk=4),
            )
        assert counters["stats"]["unique_graphs"] == 1, "a new mask or a new layout compiles again"
        if not tiled and (ALL or (half is reference and backend == "aot_eager")):
            check(None, None)


@pytest.mark.parametrize(
    ("half", "backend", "calls"),
    [
        (reference, "aot_eager", SOME),
        (reference, "inductor", CALLS[::3]),
        (fast, "aot_eager", [*CALLS[1::3], OPTIONS[1], OPTIONS[3]]),
    ],
)
def test_one_graph_serves_all_masks_and_layouts_on_two_ranks(half, backend, calls):
    process_groups.processes(partial(distributed, half, backend, calls), 2, timeout=300)


def two_groups():
    """Call two groups in one graph: all ranks, and a part of them."""
    rank, pairs = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]

    def model(q, k, v):
        half = reference.ring_attention(q, k, v, group=pair)
        whole = reference.magi_attention(q, k, v)
        return half + torch.sin(whole), torch.zeros(1)

    compare(compiled_once(model, "aot_eager"), model, True, inputs(6, seed=rank))


def disagreeing():
    layout = Layout.contiguous(TOKENS, 2)
    mask = MASKS[dist.get_rank()]
    model = compiled_once(
        lambda q, k, v: reference.ring_attention(q, k, v, mask, layout), "aot_eager"
    )
    with pytest.raises(ValueError, match="the ranks disagree"):
        model(*inputs(TOKENS // 2))
    frozen = inputs(TOKENS // 2)
    frozen[1].requires_grad_(dist.get_rank() == 1)
    with pytest.raises(ValueError, match="requires_grad"):
        compiled_once(lambda q, k, v: reference.ring_attention(q, k, v, None, layout), "aot_eager")(
            *frozen
        )


@pytest.mark.parametrize(("program", "ranks"), [(two_groups, 4), (disagreeing, 2)])
def test_two_groups_in_one_graph_and_ranks_that_disagree(program, ranks):
    process_groups.processes(program, ranks, timeout=200)


# --- one rank


def local():
    for half in (reference, fast):
        for backend in ("eager", "aot_eager"):

            def model(q, k, v, mask, half=half):
                out, lse = half.attention(torch.sin(q), k=k, v=v, mask=mask, return_lse=True)
                return torch.cos(out), lse

            compiled, exact = compiled_once(model, backend), half is reference
            for mask in MASKS:
                compare(compiled, model, exact, inputs(TOKENS), mask)
            assert counters["stats"]["unique_graphs"] == 1
            packed = [x.detach()[0].requires_grad_() for x in inputs(TOKENS)]
            compare(compiled, model, exact, packed, None)
            with torch.autocast("cpu", torch.bfloat16):
                assert compiled(*inputs(TOKENS), MASKS[1])[0].dtype == torch.bfloat16
                compare(compiled, model, exact, inputs(TOKENS), MASKS[1])
            for without_gradients in (torch.no_grad, torch.inference_mode):
                with without_gradients():
                    assert_same(
                        compiled(*inputs(TOKENS), MASKS[2]),
                        model(*inputs(TOKENS), MASKS[2]),
                        exact=True,
                    )


def lengths():
    """Compute with many lengths: the second one compiles for all."""
    model = lambda q, k, v, mask: reference.attention(q * 2, k, v, mask, return_lse=True)
    compiled = compiled_once(model, "aot_eager")
    for tokens in (24, 32, 17, 40, 5, 51, 9, 11, 13, 15):
        mask = Mask.documents([0, 3, tokens])
        compare(compiled, model, True, inputs(tokens), mask)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    "program",
    [local, lengths],
)
def test_a_compiled_call_of_one_rank_computes_what_an_eager_call_does(program):
    process_groups.processes(program, 1, timeout=200)


def refusals():
    q, k, v = inputs(TOKENS)
    attend = lambda **options: compiled_once(partial(reference.attention, **options), "aot_eager")
    with pytest.raises(ValueError, match="backward='x': expected one of"):
        attend(backward="x")(q, k, v)
    with pytest.raises(ValueError, match="mask is 5 queries x 5 keys, q holds 24 tokens"):
        attend(mask=Mask.causal(5))(q, k, v)
    with pytest.raises(Exception, match="mask must be a canon.Mask or None, got str"):
        attend(mask="causal")(q, k, v)
    with pytest.raises(Exception, match=r"all packed .*, got q \(24, 4, 16\)"):
        attend()(q[0], k, v)
    (dq,) = torch.autograd.grad(
        compiled_once(reference.attention, "eager")(q, k, v).sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="second derivatives"):
        (dq.sum() + q.sum()).backward()
    compiled = compiled_once(lambda q, k, v: fast.attention(q, k, v), "aot_eager")
    with fast.backend("triton"):
        out = compiled(q, k, v)
    with fast.backend("gluon"):
        out.sum().backward()  # with the backend of the forward pass
        with pytest.raises(RuntimeError, match=r"compiled inside backend\('triton'\)"):
            compiled(q, k, v)
    with pytest.raises(Exception, match="Member 'queries' is not registered"):
        compiled_once(lambda q, mask: q * mask.queries, "eager")(q, MASKS[0])


@pytest.mark.interpreted
def test_wrong_arguments_of_a_compiled_call_are_named():
    process_groups.processes(refusals, 1, timeout=200)


# --- checkpoints and export


def checkpoints():
    def saves(_, operator, *args, **kwargs):
        mine = operator is torch.ops.canon.attention.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    layer = lambda q, k, v, mask: torch.sin(reference.attention(torch.sin(q), k, v, mask))
    made, (forward, backward) = [], (LOCAL.forward, LOCAL.backward)
    object.__setattr__(LOCAL, "forward", lambda *args: made.append(0) or forward(*args))
    object.__setattr__(LOCAL, "backward", lambda *args: made.append(0) or backward(*args))
    leaves = inputs(TOKENS)
    expected = torch.autograd.grad(layer(*leaves, MASKS[1]).sum(), leaves)
    for options, passes in (
        ({}, 3),
        ({"context_fn": partial(create_selective_checkpoint_contexts, saves)}, 2),
    ):

        def model(*tensors, options=options):
            return checkpoint(layer, *tensors, MASKS[1], use_reentrant=False, **options)

        made.clear()
        leaves = inputs(TOKENS)
        found = torch.autograd.grad(compiled_once(model, "aot_eager")(*leaves).sum(), leaves)
        assert_same(found, expected, exact=True)
        assert len(made) == passes, "forward, recomputed unless saved, backward"


def test_a_checkpoint_inside_a_graph_recomputes_attention_unless_it_is_saved():
    process_groups.processes(checkpoints, 1, timeout=200)


class Model(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.queries, self.mask = torch.nn.Linear(16, 16), mask

    def forward(self, q, k, v, *mask):
        return reference.attention(self.queries(q), k, v, *(mask or (self.mask,)))


def exported(folder):
    tensors = [x.detach() for x in inputs(TOKENS)]
    for strict in (True, False):
        for mask in (None, MASKS[1]):
            model = Model(mask)
            program = torch.export.export(model, tuple(tensors), strict=strict)
            torch.export.save(program, f"{folder}/model.pt2")
            for found in (program, torch.export.load(f"{folder}/model.pt2")):
                assert torch.equal(found.module()(*tensors), model(*tensors))
        program = torch.export.export(model, (*tensors, MASKS[2]), strict=strict).module()
        assert torch.equal(program(*tensors, MASKS[3]), model(*tensors, MASKS[3])), (
            "the mask is an input"
        )


@pytest.mark.skipif(not operators.EXPORTS, reason="needs torch >= 2.13")
def test_a_model_of_one_rank_is_exported_saved_and_loaded(tmp_path):
    process_groups.processes(partial(exported, str(tmp_path)), 1, timeout=200)


def refused_export():
    operators.EXPORTS = False
    for strict in (True, False):
        with pytest.raises(Exception, match=r"torch\.export of canon needs torch >= 2\.13"):
            torch.export.export(
                Model(None), tuple(x.detach() for x in inputs(TOKENS)), strict=strict
            )


def test_an_export_with_an_older_torch_says_so():
    process_groups.processes(refused_export, 1, timeout=200)
