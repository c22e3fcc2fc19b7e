"""Claims about `canon.integrations.transformers`: models compute as with eager attention, on one
process and on several.
"""

import copy
import functools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from canon import Layout, Mask
from canon.testing import process_groups

pytest.importorskip("transformers", reason="the extra transformers is not installed")
from tiny_models import LATENT, MODELS, SIZES, assert_close, sharded_step, tiny, tokens, whole_step

from canon.integrations.transformers import sharded

N = 49
ENDS = [0, 19, 30, N]
POSITIONS = torch.cat([torch.arange(b - a) for a, b in pairwise(ENDS)])[None]


def batch_of(n=N, sequences=1):
    ids = tokens(n, sequences)
    return {"input_ids": ids, "labels": ids}


@functools.cache
def eager(name):
    return whole_step(tiny(name), batch_of())


def padded(valid):
    """Return a batch in which only the valid tokens have a loss. The one before the first of them
    predicts nothing, too.
    """
    batch = batch_of(valid.shape[1], len(valid))
    predicted = valid & torch.nn.functional.pad(valid, (1, -1))
    return batch | {
        "labels": batch["labels"].masked_fill(~predicted, -100),
        "attention_mask": valid.long(),
    }


# --- one process


def test_latent_attention_takes_the_tensors_of_deepseek_v3(half, monkeypatch):
    """q with its rotary part last, the normalised latent, the rotary part of K, and
    ``kv_b_proj.weight``.
    """
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    sizes = SIZES | LATENT | dict(qk_rope_head_dim=4, qk_nope_head_dim=8, head_dim=4)
    config = deepseek.DeepseekV3Config(**sizes, attn_implementation="eager")
    layer, seen = deepseek.DeepseekV3Attention(config, 0).double(), {}

    def eager(module, *states, scaling, **options):
        out = attend(module, *states, scaling=scaling, **options)
        seen.update(states=states[:2], scaling=scaling, out=out)
        return out

    attend = deepseek.eager_attention_forward
    monkeypatch.setattr(deepseek, "eager_attention_forward", eager)
    layer.kv_b_proj.register_forward_pre_hook(
        lambda _, given: seen.update(latent=given[0].squeeze(1))
    )
    hidden = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(9)[None])
    layer(hidden, rotary, torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None])
    q, k = (x.transpose(1, 2) for x in seen["states"])
    given = q, seen["latent"], k[:, :, 0, 8:], layer.kv_b_proj.weight
    out = half.latent_attention(*given, scale=seen["scaling"])
    torch.testing.assert_close(out, seen["out"][0], rtol=0, atol=1e-6)  # eager's softmax is float32


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_any_side_is_honoured(name):
    valid = torch.ones(4, N, dtype=torch.bool)
    valid[0, 31:] = valid[1, :12] = valid[2, 20:25] = False
    batch = padded(valid)
    assert_close(whole_step(tiny(name, "canon"), batch), whole_step(tiny(name), batch), valid)


def test_positions_may_restart_in_padding():
    valid = (torch.arange(N) < 31).long()[None]
    positions = valid.cumsum(1) * valid
    tiny("Llama", "canon")(tokens(N), valid, positions, use_cache=False)


def test_packed_positions_that_a_model_does_not_give_to_its_mask_raise():
    """Llama does if it has no cache."""
    packed = dict(input_ids=tokens(N), position_ids=POSITIONS)
    for name, cached in (("GptOss", False), ("Llama", True)):
        with pytest.raises(
            ValueError, match="position_ids restart at a token that sees the one before it"
        ):
            tiny(name, "canon")(**packed, use_cache=cached)


def test_sharded_without_a_mask_names_sizes_that_do_not_fit_the_layout():
    for n in (N - 1, N + 1):
        with (
            sharded(None, Layout.zigzag(n, 1), half="reference"),
            pytest.raises(ValueError, match=f"rank 0 {n} tokens"),
        ):
            tiny("Llama", "canon")(input_ids=tokens(N), use_cache=False)


# --- several ranks


def compiled_steps(name):
    """Compile a whole model inside `sharded`. One set of graphs serves all masks."""
    model = tiny(name, "canon")
    compiled, graphs = torch.compile(copy.deepcopy(model), backend="aot_eager"), []
    for ends in ([5], [3, 9], [1, 2, 20]):
        ends = [0, *ends, N]
        step = functools.partial(
            sharded_step, batch=batch_of(), mask=Mask.documents(ends), layout=Layout.zigzag(N, 2)
        )
        found, expected = (
            step(x, cu_seqlens=ends, copied=False, half="reference") for x in (compiled, model)
        )
        assert_close(found, expected)
        graphs.append(counters["stats"]["unique_graphs"])
        model.zero_grad()
        compiled.zero_grad()
    assert len(set(graphs)) == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_a_whole_model_can_be_compiled_inside_sharded(name):
    process_groups.processes(functools.partial(compiled_steps, name), 2, timeout=300)


@pytest.mark.parametrize("name", ["Gemma3", "GptOss"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernels_of_fast_and_a_mesh_of_tokens_and_heads_compute_the_same(name, ranks):
    n = {2: 21, 4: N}[ranks]
    layout, model, batch = Layout.zigzag(n, 2), tiny(name, "canon"), batch_of(n)

    def step():
        options = {}
        if ranks == 4:
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads"))
            options = {"half": "reference", "group": mesh}
        parts = layout.divided(ranks // 2)
        return sharded_step(model, batch, None, parts, function="magi", **options)

    expected = whole_step(tiny(name), batch)
    for found in process_groups.threads(step, ranks):
        assert_close(found, expected)


def test_a_checkpointed_layer_is_recomputed_after_the_block():
    model = tiny("Gemma3", "canon")
    model.activation_checkpointing_enable()
    step = functools.partial(
        sharded_step, model, batch_of(), None, Layout.zigzag(N, 2), half="reference"
    )
    for inside in (True, False):
        for found in process_groups.threads(lambda inside=inside: step(backward_inside=inside), 2):
            assert_close(found, eager("Gemma3"))


# --- padding on several ranks


@pytest.mark.parametrize("hidden", [(slice(40, N), slice(25, N)), (slice(0, 12), slice(0, 12))])
@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_ranks_honour_padding(name, hidden):
    valid = torch.ones(2, N, dtype=torch.bool)
    for row, padding in zip(valid, hidden, strict=True):
        row[padding] = False
    batch = padded(valid)
    expected = whole_step(tiny(name), batch)
    step = functools.partial(
        sharded_step, tiny(name, "canon"), batch, None, Layout.zigzag(N, 2), half="reference"
    )
    for found in process_groups.threads(step, 2):
        assert_close(found, expected, valid)


def test_padding_that_one_mask_cannot_hold_raises_on_every_rank():
    valid = torch.ones(2, N, dtype=torch.bool)
    valid[1, :3] = False  # on the left, in one sequence only; all these tokens are on rank 0
    batch, model = padded(valid), tiny("Llama", "canon")

    def program():
        with pytest.raises(
            ValueError,
            match="in sequence 0 of 2, a token sees padding.*pad on the right|in sequence 1",
        ):
            sharded_step(model, batch, None, Layout.zigzag(N, 2), half="reference")
        return True

    assert process_groups.threads(program, 2) == [True, True]
