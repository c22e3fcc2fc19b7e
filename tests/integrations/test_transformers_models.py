"""The table of models in paper/in_your_program.md: each entry works as eager attention in float64,
or raises one sentence.

In float64 only the order of sums differs: 4 layers and 200 terms keep the relative error under 1e-9
by far.
"""

import functools
import re
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask
from canon.testing import process_groups

pytest.importorskip("transformers", reason="the extra transformers is not installed")
from tiny_models import Float64, assert_close, sharded_step, tiny64, tokens, whole_step

from canon.integrations.transformers import sharded

PAGE = Path(__file__).parents[2] / "paper" / "in_your_program.md"
N = 26
ENDS = [0, 11, 17, N]
NAMES = {
    "Llama": "Llama",
    "Mistral": "Mistral",
    "Qwen3": "Qwen3",
    "Qwen3Moe": "Qwen3-MoE",
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3",
    "Gemma4": "Gemma 4",
    "GptOss": "gpt-oss",
    "DeepseekV3": "DeepSeek V3",
}
USES = "step", "packed", "packed in sharded", "generate"  # the columns of the table
RAISES = {
    ("GptOss", "packed"): "position_ids restart .*pass use_cache=False, or use canon.integrations"
}
TOLERANCE = 1e-9
FUNCTIONS = {1: "magi", 2: "ring", 4: "strided"}  # of each number of ranks


@contextmanager
def as_in_the_table(name, use):
    """Compute in float64. Expect the error of the table."""
    with Float64():
        if (name, use) in RAISES:
            with pytest.raises(ValueError, match=RAISES[name, use]) as raised:
                yield
            assert re.fullmatch("canon: .*", str(raised.value))  # one line
        else:
            yield


def batch():
    return {"input_ids": tokens(N), "labels": tokens(N)}


@functools.cache
def eager(name):
    with Float64():
        return whole_step(tiny64(name), batch())


every_model = pytest.mark.parametrize("name", NAMES)


@every_model
def test_one_process_computes_as_eager_attention(name):
    expected = eager(name)
    with as_in_the_table(name, "step"):
        assert_close(whole_step(tiny64(name, "canon"), batch()), expected, tolerance=TOLERANCE)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", FUNCTIONS)
@every_model
def test_ranks_compute_as_eager_attention(name, ranks):
    layout, model, expected = Layout.zigzag(N, ranks), tiny64(name, "canon"), eager(name)

    def program():
        with as_in_the_table(name, "step"):
            found = sharded_step(
                model, batch(), None, layout, half="reference", function=FUNCTIONS[ranks]
            )
            assert_close(found, expected, tolerance=TOLERANCE)

    process_groups.threads(program, ranks)


@functools.cache
def of_documents(name):
    """Return the logits of each document alone, one after the other."""
    model, ids = tiny64(name), tokens(N)
    with Float64(), torch.no_grad():
        parts = [model(ids[:, a:b], use_cache=False).logits for a, b in pairwise(ENDS)]
    return torch.cat(parts, 1)


def assert_near(found, expected):
    assert (found - expected).norm() < TOLERANCE * expected.norm()


@every_model
@torch.no_grad()
def test_packed_positions_compute_as_documents_alone(name):
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ENDS)])[None]
    expected = of_documents(name)
    with as_in_the_table(name, "packed"):
        found = tiny64(name, "canon")(tokens(N), position_ids=positions, use_cache=False).logits
        assert_near(found, expected)


@every_model
def test_packed_documents_on_two_ranks_compute_as_documents_alone(name):
    layout, model, expected = Layout.zigzag(N, 2), tiny64(name, "canon"), of_documents(name)

    @torch.no_grad()
    def program():
        part = layout.shard_batch({"input_ids": tokens(N)}, dist.get_rank(), ENDS)
        with (
            as_in_the_table(name, "packed in sharded"),
            sharded(Mask.documents(ENDS), layout, half="reference"),
        ):
            logits = model(**part, use_cache=False).logits
            assert_near(layout.unshard(logits), expected)

    process_groups.threads(program, 2)


def generated(model, **options):
    """Return tokens and logits of 6 greedy steps: prompts of 9 and 12 tokens in a batch, padded on
    the left.
    """
    ids, valid = tokens(12, 2), torch.ones(2, 12, dtype=torch.long)
    valid[0, :3] = 0
    model.eval().generation_config.eos_token_id = None
    result = model.generate(
        ids,
        attention_mask=valid,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


@every_model
def test_generate_with_a_cache_chooses_the_tokens_of_eager_attention(name):
    with Float64():
        expected, true_logits = generated(tiny64(name))
    with as_in_the_table(name, "generate"):
        found, logits = generated(tiny64(name, "canon"))
        assert found.shape == (2, 18)
        assert torch.equal(found, expected)
        assert_near(logits, true_logits)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_generate_with_a_static_cache_raises(name):
    with pytest.raises(
        ValueError,
        match="static cache needs a mask that is a tensor: leave out cache_implementation",
    ):
        generated(tiny64(name, "canon"), cache_implementation="static")


@pytest.mark.parametrize("steps", [1, 2])
def test_generate_raises_on_every_rank_inside_sharded(steps):
    layout, model = Layout.zigzag(N, 2), tiny64("Llama", "canon").eval()

    def program():
        ids = layout.shard(tokens(N), dist.get_rank())
        with (
            Float64(),
            sharded(None, layout, half="reference"),
            pytest.raises(
                ValueError,
                match=r"sharded does not support generate.*generate on one "
                r"process, outside",
            ),
        ):
            model.generate(ids, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        return True

    assert process_groups.threads(program, 2) == [True, True]


def test_the_table_of_the_page_states_these_outcomes():
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| (.*) "
        r"\|$",
        PAGE.read_text().split("## Models of transformers")[1],
        re.M,
    )
    found = {
        name: tuple(cells.split(" | "))
        for name, cells in rows
        if set(cells.split(" | ")) <= {"works", "raises"}
    }
    assert found == {
        shown: tuple("raises" if (name, use) in RAISES else "works" for use in USES)
        for name, shown in NAMES.items()
    }
