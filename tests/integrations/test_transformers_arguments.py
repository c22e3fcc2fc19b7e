"""Claims about `canon.integrations.transformers`: unsupported models, masks and arguments raise,
and nothing else changes.
"""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import canon
from canon import Layout, Mask

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
from tiny_models import tiny, tokens  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

from canon.integrations.transformers import UNSUPPORTED, attend_layer, build_mask, register, sharded  # noqa: E402
from canon.integrations.transformers_masks import LayerMask  # noqa: E402

LAYOUT = Layout.zigzag(16, 1)
LLAMA4 = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))


def attend(queries=16, keys=16, mask=None, module=None, **options):
    q, k, v = (torch.randn(1, heads, n, 8) for heads, n in ((4, queries), (2, keys), (2, keys)))
    return attend_layer(module or torch.nn.Module(), q, k, v, mask, **options)[0]


# --- masks


def cells(function, sizes=(16, 16, 0, 0), b=1, padding=None):
    return masking_utils.sdpa_mask(
        b, *sizes, mask_function=function, attention_mask=padding, allow_is_causal_skip=False
    )


def packed(function, documents):
    # transformers looks at differences only
    positions = torch.cat([torch.arange(n) for n in documents])[None] + 5
    indices = masking_utils.find_packed_sequence_indices(positions)
    return masking_utils.packed_sequence_compatibility_function(function, positions, indices)


PATTERNS = [
    masking_utils.causal_mask_function,
    masking_utils.bidirectional_mask_function,
    masking_utils.sliding_window_causal_mask_function(1),
    masking_utils.sliding_window_causal_mask_function(5),
    masking_utils.sliding_window_causal_mask_function(50),
    masking_utils.sliding_window_bidirectional_mask_function(3),
]


@pytest.mark.parametrize("function", PATTERNS)
def test_masks_and_those_of_packs_have_the_cells_of_transformers(function):
    for pattern in (function, packed(function, [9, 1, 6])):
        mask = build_mask(1, 16, 16, mask_function=pattern).masks
        assert torch.equal(mask.dense(), cells(pattern)[0, 0])
    padding = torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) < 0.7
    padding[2] = False  # every key is padding
    for sizes in ((16, 16, 0, 0), (1, 16, 15, 0), (3, 9, 13, 7), (5, 20, 4, 0), (5, 16, 0, 0)):
        masks: Any = build_mask(3, *sizes, mask_function=function, attention_mask=padding).masks
        dense = cells(function, sizes, b=3, padding=padding)[:, 0]
        assert torch.stack([mask.dense() for mask in masks]).equal(dense)


def test_a_model_may_keep_some_queries_of_a_mask():
    padding = torch.ones(2, 16, dtype=torch.bool)
    padding[1, :5] = False
    whole = build_mask(2, 16, 16, attention_mask=padding)
    last = lambda _: whole[:, :, slice(-2, None), :].masks
    for mask, kept in zip(whole.masks, last(None), strict=True):
        assert torch.equal(kept.dense(), mask.dense()[-2:])
    assert torch.compile(last, backend="aot_eager")(torch.ones(1)) == last(None)
    with pytest.raises(TypeError, match=r"has only \[:, :, rows, :\]"):
        whole[..., :8]
    with sharded(None, LAYOUT, half="reference"):
        whole = build_mask(1, 16, 16)
        assert whole[:, :, slice(0, None), :] is whole
        with pytest.raises(
            ValueError, match="sharded needs all queries of a rank: leave out logits_to_keep"
        ):
            whole[:, :, slice(-1, None), :]


def other_module(b, h, q, k):
    return k < q


other_module.__qualname__ = "causal_mask_function"


@pytest.mark.parametrize(
    "function",
    [
        LLAMA4,
        masking_utils.or_masks(masking_utils.causal_mask_function, LLAMA4),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
        lambda b, h, q, k: k < q,
        other_module,
        max,
    ],
)
def test_other_patterns_raise(function):
    with pytest.raises(ValueError, match=r"mask function .* is not supported.*flex_attention"):
        build_mask(1, 16, 16, mask_function=function)


def test_a_layer_without_a_mask_is_full_causal_or_windowed():
    module = torch.nn.Module()
    for causal, window, mask in [
        (True, None, Mask.causal(16)),
        (False, None, Mask.full(16)),
        (True, 4, Mask.window(16, 3, 0)),
        (False, 4, Mask.window(16, 3, 3)),
    ]:
        torch.manual_seed(0)
        expected = attend(mask=LayerMask([mask]))
        module.is_causal = not causal  # the keyword overrides the module
        torch.manual_seed(0)
        assert torch.equal(attend(module=module, is_causal=causal, sliding_window=window), expected)


# --- unsupported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: 0.1}, f"{name}=0.1 .*is not supported: {re.escape(UNSUPPORTED[name])}")
            for name in UNSUPPORTED
        ),
        ({"keys": 20}, "16 queries and 20 keys has no mask from transformers"),
    ],
)
def test_unsupported_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        attend(**options)
    attend(dropout=0.0, cache=None, output_attentions=False, position_ids=torch.arange(16)[None])


def test_a_4d_mask_raises():
    ids = tokens(8)
    with pytest.raises(TypeError, match="attention_mask must be a padding mask"):
        tiny("Llama", "canon")(
            input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)
        )


def test_cross_attention_computes_as_eager_attention_and_raises_inside_sharded():
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, init_std=0.5, attn_implementation="eager", **sizes
    )
    register()
    model, padding = transformers.BartModel(config).eval(), torch.ones(2, 16, dtype=torch.long)
    padding[1, 11:] = 0
    inputs = dict(input_ids=tokens(16, 2), attention_mask=padding, decoder_input_ids=tokens(5, 2))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        model.set_attn_implementation("canon")
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
        with sharded(None, LAYOUT, half="reference"):
            with pytest.raises(ValueError, match="encoders of encoder-decoder models"):
                model(input_ids=tokens(16), decoder_input_ids=tokens(16), use_cache=False)
            with pytest.raises(ValueError, match="no mask from transformers.masking_utils"):
                attend()


def refused_on_two_ranks(message, model):
    with (
        sharded(None, Layout.zigzag(16, 2), half="reference"),
        pytest.raises(ValueError, match=message),
    ):
        model(input_ids=tokens(8), position_ids=torch.arange(8)[None], use_cache=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "full_attention"]}, "'conv' would mix the tokens of one rank"),
        ({"layers_block_type": ["mamba", "attention"]}, "'mamba' would mix the tokens of one rank"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 15},
            "rope_type 'dynamic' scales .* at most 15 tokens",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 15,
                    }
                }
            },
            "rope_type 'longrope' scales .* at most 15 tokens",
        ),
    ],
)
def test_a_model_that_ranks_cannot_divide_raises_inside_sharded(changes, message):
    model = tiny("Llama", "canon")
    vars(model.config).update(changes)
    refused_on_two_ranks(message, model)


def test_a_decoder_that_ignores_positions_raises_inside_sharded():
    sizes = dict(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, d_model=32)
    register()
    config = transformers.BartConfig(attn_implementation="canon", is_encoder_decoder=False, **sizes)
    model = transformers.BartForCausalLM(config)
    refused_on_two_ranks("BartDecoder ignores position_ids", model)


def test_sliding_windows_over_a_tree_raise_inside_sharded():
    tree, documents = Mask.tree([-1, 0, 0], [8, 4, 4]), Mask.documents([0, 8, 16])
    for mask, expected in (
        (documents, nullcontext()),
        (tree, pytest.raises(ValueError, match="is a tree")),
    ):
        with sharded(mask, LAYOUT, half="reference"):
            tiny("Llama", "canon")(input_ids=tokens(16), use_cache=False)
            with expected:
                tiny("Mistral", "canon")(input_ids=tokens(16), use_cache=False)


def test_a_model_that_adds_its_mask_to_scores_raises():
    with sharded(None, LAYOUT, half="reference"):
        inside = build_mask(1, 16, 16)
    for mask in (inside, LayerMask([Mask.causal(16)])):
        with pytest.raises(ValueError, match="adds its mask to the scores itself"):
            _ = torch.zeros(1) + mask


def test_export_of_a_model_and_several_masks_in_a_compiled_one_raise():
    with pytest.raises(RuntimeError, match="torch.export cannot record build_mask"):
        torch.export.export(tiny("Llama", "canon"), (tokens(8),), strict=False)
    with pytest.raises(ValueError, match="compiled model takes one mask"):
        torch.compile(attend, backend="eager")(mask=LayerMask([Mask.causal(16), Mask.full(16)]))


# --- register and sharded


def test_registering_adds_one_name_and_changes_nothing_else():
    mappings = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [dict(mapping) for mapping in mappings]
    register("canon-again")
    assert (mappings[0].pop("canon-again"), mappings[1].pop("canon-again")) == (
        attend_layer,
        build_mask,
    )
    assert [dict(mapping) for mapping in mappings] == before
    with pytest.raises(TypeError, match="register: name must be a string, got 3"):
        register(3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Mask.causal(8), LAYOUT), ValueError, "mask is 8 x 8, the layout has 16 tokens"),
        (((Mask.causal(16),), LAYOUT), TypeError, "mask must be one canon.Mask or None"),
        (
            ([0, 10, 16], LAYOUT),
            TypeError,
            r"got \[0, 10, 16\] \(list\): for packed documents "
            r"pass Mask.documents",
        ),
        ((None, 16), TypeError, "layout must be a canon.Layout, got 16"),
        ((None, Layout.zigzag(2, 3)), ValueError, "layout gives rank 2 no tokens"),
        ((None, LAYOUT, None, "slow"), ValueError, "half must be one of .*'slow'"),
        (
            (None, LAYOUT, None, "reference", "zigzag"),
            ValueError,
            "function must be one of .*'zigzag'",
        ),
    ],
)
def test_wrong_arguments_of_sharded_raise(arguments, error, message):
    with pytest.raises(error, match=message), sharded(*arguments):
        pass


def test_unknown_options_of_sharded_raise():
    for option in ("casts", "scale", "sink", "group_", "return_lse"):
        message = f"ring_attention has no option '{option}'"
        with pytest.raises(TypeError, match=message), sharded(None, LAYOUT, **{option: 1}):
            pass


def test_sharded_ends_with_its_block_and_can_be_nested():
    model, ids = tiny("Llama", "canon").eval(), tokens(16)
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        with sharded(Mask.full(16), LAYOUT, half="reference"):
            with sharded(None, LAYOUT, half="reference"):
                torch.testing.assert_close(model(input_ids=ids).logits, alone)
            assert (model(input_ids=ids).logits - alone).norm() > 0.01 * alone.norm()
        assert torch.equal(model(input_ids=ids).logits, alone)


def test_keys_and_values_are_not_repeated(monkeypatch):
    shapes, attention = [], canon.reference.attention

    def recorded(q, k, v, *rest, **options):
        shapes.append((q.shape[2], k.shape[2], v.shape[2]))
        return attention(q, k, v, *rest, **options)

    monkeypatch.setattr(canon.reference, "attention", recorded)
    tiny("Qwen3", "canon")(input_ids=tokens(8))
    assert shapes == [(4, 2, 2)] * 2
