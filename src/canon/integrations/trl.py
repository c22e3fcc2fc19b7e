"""TRL's SFTTrainer on sequences that ranks hold together.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="canon")
    settings = SFTConfig(packing=True, max_length=65536)
    trainer = ContextParallelSFTTrainer(model, settings, train_dataset=dataset)
    trainer.train()

A pack is one sequence; its documents come from ``position_ids``. The loss is `sequence_loss`, so
TRL's ``entropy``, ``mean_token_accuracy`` and ``num_tokens`` are not logged. Limits: those of
`canon.integrations.trainer`, and ``loss_type="dft"``.

Source: TRL 1.16, sft_trainer.py.
"""

from typing import Any

from trl import SFTTrainer  # pyright: ignore[reportMissingImports]

from canon.integrations.trainer import ContextParallelTrainer

__all__ = ["ContextParallelSFTTrainer"]


class ContextParallelSFTTrainer(ContextParallelTrainer, SFTTrainer):  # pyright: ignore[reportGeneralTypeIssues]
    """TRL's SFTTrainer, with the arguments of `ContextParallelTrainer`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if (loss := getattr(self.args, "loss_type", "nll")) != "nll":
            raise ValueError(
                f"{type(self).__name__} does not support loss_type={loss!r}: leave "
                'it out, for "nll"'
            )
