"""The loss of a training step over a sequence that several ranks hold together.

part = layout.shard_batch(batch, rank)                          this rank's tokens and shifted labels
logits = model(part["input_ids"], part["position_ids"])         DDP or FSDP2 around the model
loss = canon.training.sequence_loss(logits, part["shift_labels"], group=mesh["cp"])
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from canon.masks.arguments import shown, whole
from canon.runtime.agreement import group_state, refused_together
from canon.runtime.checks import accumulate_dtype, check_tensor
from canon.runtime.graph_break import untraced
from canon.runtime.group import Group, place_in


@untraced
def sequence_loss(logits: Tensor, shift_labels: Tensor, *, group: Group = None, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy over the valid tokens of all ranks: a scalar, equal on all ranks. A collective.

    Args:
        logits: of this rank's tokens, (b, t, vocabulary) or (t, vocabulary). t may be 0.
        shift_labels: the next token of each token, int64 (b, t) or (t,), from `Layout.shard_batch`.
        group: the ranks that hold the sequence, a ProcessGroup or a DeviceMesh of one dimension; None is all ranks.
        ignore_index: the label of tokens without a loss.

    If rank r has the sum S_r over n_r valid tokens, the loss of n ranks is L = (S_1 + ... + S_n) / (n_1 + ... + n_n). Its
    gradient is that of n S_r / (n_1 + ... + n_n), because DDP and FSDP2 average over ranks. Where gradients are added, divide
    the loss by n. With the group of context ranks, each data rank counts equally; with that of all ranks, each token does.

    Without valid tokens, the loss and its gradients are 0. Losses are computed in float32 (float64 for float64), and added in
    float64. Cost: one all-reduce of 16 bytes.

    Raises TypeError or ValueError on every rank if arguments are wrong or differ between ranks. On a GPU, a label outside the
    vocabulary is a device-side assertion.
    """
    group, _, ranks = place_in("sequence_loss", group)
    with refused_together("sequence_loss", group, ranks):
        ignore_index = whole("sequence_loss: ignore_index", ignore_index)
        _check_tensors(logits, shift_labels, ignore_index)
    if ranks > 1:
        fields = (
            ("function", "sequence_loss"),
            ("dtype", logits.dtype),
            ("vocabulary", logits.shape[-1]),
            ("ignore_index", ignore_index),
        )
        group_state(group).agree("sequence_loss", fields, wait=logits.device.type == "cpu")
    scores = logits.flatten(0, -2).to(accumulate_dtype(logits.dtype))
    own = cross_entropy(scores, shift_labels.flatten(), ignore_index=ignore_index, reduction="sum")
    totals = torch.stack([own.detach().double(), (shift_labels != ignore_index).sum().double()])
    if ranks > 1:
        with group_state(group).failures("sequence_loss"):
            dist.all_reduce(totals, group=group)
    total, tokens = totals[0], totals[1].clamp(min=1)
    return _GlobalMean.apply(own, total / tokens, ranks / tokens)


class _GlobalMean(torch.autograd.Function):
    """``mean``, with the gradient of ``factor`` times ``own``, this rank's part of it."""

    @staticmethod
    def forward(ctx, own, mean, factor):
        ctx.save_for_backward(factor)
        return mean.to(own.dtype)

    @staticmethod
    def backward(ctx, *grads):
        (factor,) = ctx.saved_tensors
        return grads[0] * factor.to(grads[0].dtype), None, None


def _check_tensors(logits: Any, shift_labels: Any, ignore_index: int) -> None:
    """Raise TypeError or ValueError unless logits and labels fit together. Labels on a GPU are not read."""
    check_tensor("logits", logits)
    check_tensor("shift_labels", shift_labels)
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating-point, got {shown(logits)}")
    if shift_labels.dtype != torch.int64:
        raise TypeError(f"shift_labels must be int64, got {shown(shift_labels)}: pass shift_labels.long()")
    if logits.ndim not in (2, 3) or logits.shape[:-1] != shift_labels.shape:
        raise ValueError(
            "logits must be (b, t, vocabulary) and shift_labels (b, t), or both without b, got "
            f"{tuple(logits.shape)} and {tuple(shift_labels.shape)}"
        )
    if logits.device != shift_labels.device:
        raise ValueError(f"logits and shift_labels must be on one device, got {logits.device}, {shift_labels.device}")
    if shift_labels.device.type == "cpu":
        wrong = (shift_labels != ignore_index) & ((shift_labels < 0) | (shift_labels >= logits.shape[-1]))
        if wrong.any():
            raise ValueError(
                f"shift_labels must be in 0..{logits.shape[-1] - 1} or ignore_index={ignore_index}, "
                f"got {int(shift_labels[wrong][0])}"
            )
