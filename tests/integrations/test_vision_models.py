"""Models of transformers that see images: embeddings and positions (3, b, n) are made before the
sequence is divided, and the tokens of an image see one another.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask
from canon.testing import process_groups
from canon.training import sequence_loss

pytest.importorskip("transformers", reason="the extra transformers is not installed")
import transformers
from tiny_models import SIZES, WINDOWED, Float64, tokens, with_large_weights

from canon.integrations.transformers import build_mask, register, sharded
from canon.integrations.transformers_masks import pattern_of

PAGE = Path(__file__).parents[2] / "paper" / "in_your_program.md"
IMAGE, START, STOP = 60, 62, 63  # special tokens
TOLERANCE = 1e-9


def near(found, expected):
    return (found - expected).norm() < TOLERANCE * expected.norm()


def filled(name, attention, **config):
    """Return a model in float64 with large weights, equal in every call."""
    register()
    configuration = getattr(transformers, f"{name}Config")(image_token_id=IMAGE, **config)
    with Float64():
        model = getattr(transformers, f"{name}ForConditionalGeneration")(configuration)
        model.set_attn_implementation({"text_config": attention, "vision_config": "eager"})
        return with_large_weights(model, torch.float64).double()


# --- Qwen2.5-VL: positions of three axes


def qwen(attention):
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = dict(
        depth=2,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        window_size=16,
        fullatt_block_indexes=[1],
        out_hidden_size=64,
    )
    text = SIZES | dict(hidden_size=64, rope_parameters=rotary)
    special = dict(video_token_id=61, vision_start_token_id=START, vision_end_token_id=STOP)
    return filled("Qwen2_5_VL", attention, text_config=text, vision_config=vision, **special)


def gradients_of(model):
    return {name: x.grad for name, x in model.named_parameters()}


def test_the_code_of_the_page_has_the_loss_and_gradients_of_eager_attention():
    """Text and an image on two ranks, with the gradients of both parts of the model."""
    section = PAGE.read_text().split("## Images in the sequence")[1]
    code = section.split("```python\n")[1].split("```")[0]
    draw = torch.Generator().manual_seed(0)
    text, image = torch.randint(50, (7,), generator=draw), torch.tensor([START, *[IMAGE] * 8, STOP])
    ids = torch.cat([text[:3], image, text[3:]])[None]
    pixels = torch.randn(4 * 8, 3 * 2 * 4 * 4, generator=draw, dtype=torch.float64)
    grid, labels = torch.tensor([[1, 4, 8]]), ids.masked_fill(ids >= IMAGE, -100)
    alone, models, layout = qwen("eager"), [qwen("canon"), qwen("canon")], Layout.zigzag(17, 2)
    with Float64():
        images = dict(
            pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).int()
        )
        logits = alone(ids, **images, use_cache=False).logits
        true_loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        true_loss.backward()
    given = dict(ids=ids, pixels=pixels, grid=grid, image_token=IMAGE, labels=labels, layout=layout)
    given |= dict(mask=Mask.causal(17), sharded=sharded, sequence_loss=sequence_loss, torch=torch)

    def program():
        rank = dist.get_rank()
        names = given | dict(rank=rank, model=models[rank], __name__="page")
        with Float64():
            exec(code, names)
            names["loss"].backward()
        assert names["positions"].shape == (3, 1, 17)
        assert near(names["loss"].detach(), true_loss.detach())
        for name, gradient in gradients_of(models[rank]).items():
            dist.all_reduce(gradient)
            assert near(gradient / 2, gradients_of(alone)[name]), name

    process_groups.threads(program, 2)


# --- Gemma 3 and PaliGemma: blocks


VISION = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
)


def gemma(attention):
    text = transformers.Gemma3TextConfig(**SIZES, **WINDOWED)
    given = dict(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return filled("Gemma3", attention, **given)


def paligemma(attention):
    vision = VISION | dict(projection_dim=32)
    text = dict(model_type="gemma", **SIZES)
    given = dict(text_config=text, vision_config=vision, projection_dim=32)
    return filled("PaliGemma", attention, **given)


N = 26
BLOCKS = [4, 15], [13, 21]  # longer than the window, and shorter


KINDS = torch.zeros(2, N, dtype=torch.long)  # token_type_ids: 1 is an image
for start, stop in zip(*BLOCKS, strict=True):
    KINDS[0, start:stop] = 1
KINDS[1, 20:] = 1


@torch.no_grad()
def test_blocks_of_images_compute_as_eager_attention_on_one_process():
    valid = torch.ones(2, N, dtype=torch.long)
    valid[1, 23:] = 0
    batch = dict(input_ids=tokens(N, 2) % 60, use_cache=False, attention_mask=valid)
    with Float64():
        expected, found = (
            gemma(x)(**batch, token_type_ids=KINDS).logits for x in ("eager", "canon")
        )
        causal = gemma("canon")(**batch).logits
    rows = valid.bool()
    assert near(found[rows], expected[rows])
    assert not near(causal[rows], expected[rows])


@torch.no_grad()
def test_a_model_that_passes_its_mask_on_names_what_to_call():
    """PaliGemma makes a mask for its language model, which makes one again."""
    ids, kinds = tokens(N) % 60, torch.arange(N)[None] >= 9
    model, one = paligemma("canon"), Layout.contiguous(N, 1)
    with Float64():
        expected = paligemma("eager")(ids, token_type_ids=kinds.long(), use_cache=False).logits
        with pytest.raises(ValueError, match="call the language model inside `sharded`, with"):
            model(ids, token_type_ids=kinds.long(), use_cache=False)
        with sharded(Mask.causal(N).with_blocks([0], [9]), one, half="reference"):
            with pytest.raises(ValueError, match="call the language model inside `sharded`, with"):
                model(ids, use_cache=False)
            embeddings = model.get_input_embeddings()(ids)
            hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False)
        assert near(model.lm_head(hidden.last_hidden_state), expected)


@torch.no_grad()
def test_ranks_compute_blocks_of_images_from_the_mask_of_sharded():
    layout, batch = Layout.zigzag(N, 2), {"input_ids": tokens(N) % 60}
    kinds = KINDS[:1]
    mask = Mask.causal(N).with_blocks(*BLOCKS)
    with Float64():
        expected = gemma("eager")(**batch, token_type_ids=kinds, use_cache=False).logits
    model = gemma("canon")

    def program():
        part = layout.shard_batch(batch, dist.get_rank())
        with Float64(), sharded(mask, layout, half="reference"):
            logits = model(**part, use_cache=False).logits
            assert near(layout.unshard(logits), expected)
            with pytest.raises(ValueError, match=r"pass Mask.with_blocks\(starts, stops\), and"):
                model(**part, token_type_ids=layout.shard(kinds, dist.get_rank()))

    process_groups.threads(program, 2)


def test_blocks_that_bands_cannot_order_are_refused():
    """PaliGemma 2 adds blocks after the window; an image in parts is more than blocks."""
    from transformers import masking_utils as theirs

    ids = torch.tensor([[-1, 0, 0, -1, 0]])
    blocks = theirs.blockwise_overlay(ids)
    window = theirs.sliding_window_causal_mask_function(3)
    documents = theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1]]))
    causal = theirs.or_masks(theirs.causal_mask_function, blocks)
    for function in (
        theirs.or_masks(window, blocks),
        theirs.or_masks(theirs.causal_mask_function, documents),
        theirs.and_masks(causal, documents),
        theirs.and_masks(theirs.causal_mask_function, causal),
        blocks,
    ):
        with pytest.raises(ValueError, match=r"is not supported.*such as Mask.with_blocks"):
            pattern_of(function)
    with pytest.raises(ValueError, match="tokens of one block of images are apart"):
        build_mask(1, 5, 5, mask_function=causal)
