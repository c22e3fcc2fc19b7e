"""Claims about `canon.integrations.trl`: packs and windows train as with TRL's SFTTrainer, on one
rank and on several.
"""

from functools import partial

import pytest

from canon.testing import process_groups

pytest.importorskip("trl", reason="the extra trl is not installed")
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models
from trainer_runs import assert_same, losses_and_weights, texts
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from canon.integrations.trainer import ContextParallelTrainer
from canon.integrations.trl import ContextParallelSFTTrainer

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
WORDS = Tokenizer(models.WordLevel({str(word): word for word in range(64)}, unk_token="0"))
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=WORDS, pad_token="0", eos_token="1", unk_token="0"
)
CHANGES = dict(packing=True, max_length=40, bf16=False, activation_checkpointing=True)


def run(kind, accumulation=1, **options):
    """Return a run on packs of at most 40 tokens, three in a batch."""
    train, evaluation = (
        Dataset.from_list([{"input_ids": x["input_ids"]} for x in texts(n)]) for n in (20, 5)
    )
    changes = CHANGES | {"gradient_accumulation_steps": accumulation} | options.pop("changes", {})
    return losses_and_weights(
        kind, SFTConfig, train, evaluation, processing_class=TOKENIZER, changes=changes, **options
    )


shared = partial(run, ContextParallelSFTTrainer, half="reference")


def both():
    return [shared(accumulation) for accumulation in (1, 2)]


def test_ranks_train_as_one_process_of_trl():
    one = both()
    for accumulation, found in zip((1, 2), one, strict=True):
        assert_same(found, run(SFTTrainer, accumulation, attention="eager"), tolerance=1e-6)
    for rank in process_groups.processes(both, 2, timeout=250):
        for found, expected in zip(rank, one, strict=True):
            assert_same(found, expected)


def test_another_loss_raises():
    with pytest.raises(ValueError, match="does not support loss_type='dft'"):
        shared(changes={"loss_type": "dft"})


def test_the_methods_of_sfttrainer_that_canon_replaces_are_known():
    """TRL adds its own to those of Trainer, which tests/integrations/test_trainer.py lists."""
    names = {name for name in vars(SFTTrainer) if name in vars(ContextParallelTrainer)}
    assert names - {"__init__", "__module__", "__doc__"} == {"compute_loss", "prediction_step"}
