"""The loss of a training step over a sequence that several ranks hold together.

    part = layout.shard_batch(batch, rank)                    # this rank's tokens, shifted labels
    logits = model(part["input_ids"], part["position_ids"])   # DDP or FSDP2 around the model
    loss = canon.training.sequence_loss(logits, part["shift_labels"], group=mesh["cp"])

`linear_sequence_loss` takes hidden states and the output head instead, and never has all logits.
"""

from canon.training.linear_loss import linear_sequence_loss
from canon.training.losses import sequence_loss

__all__ = ["linear_sequence_loss", "sequence_loss"]
