"""The loss of a training step over a sequence that several ranks hold together.

part = layout.shard_batch(batch, rank)                          this rank's tokens and shifted labels
logits = model(part["input_ids"], part["position_ids"])         DDP or FSDP2 around the model
loss = canon.training.sequence_loss(logits, part["shift_labels"], group=mesh["cp"])
loss.backward()
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from canon.masks.arguments import shown, whole
from canon.runtime.agreement import group_state, refused_together
from canon.runtime.checks import accumulate_dtype, check_tensor
from canon.runtime.group import Group, place_in


def sequence_loss(logits: Tensor, shift_labels: Tensor, *, group: Group = None, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy over the valid tokens of all ranks: a scalar, equal on all ranks. A collective.

    Args:
        logits: of this rank's tokens, (b, t, vocabulary) or (t, vocabulary). t may be 0 on some ranks.
        shift_labels: the next token of each token, int64 (b, t) or (t,), from `Layout.shard_batch`.
        group: the ranks that hold the sequence, a ProcessGroup or a DeviceMesh of one dimension; None is all ranks.
        ignore_index: the label of tokens without a loss.

    Rank r has the sum S_r of the losses of its n_r valid tokens. The loss of the group of W ranks is

        L = (S_1 + ... + S_W) / N,      N = n_1 + ... + n_W

    DDP and FSDP2 average gradients over ranks. The mean over r of the gradients of l_r is that of L if l_r = W S_r / N. So
    the returned value is L, but its gradient is that of W S_r / N. Attention sends the gradients of keys to their owners, so
    each rank has its part of the gradient of all l_r. For a framework that adds gradients, divide the loss by W.

    On a mesh of D data and W context ranks, these frameworks average over D W ranks. With the group of the W context ranks,
    the gradient is that of the mean of the D losses: each data rank counts equally. With the group of all D W ranks, each
    token counts equally.

    Without any valid token, the loss and its gradients are 0. Losses are computed in float32 (float64 for float64), which
    takes t x vocabulary elements, and added in float64 between ranks. One all-reduce of 16 bytes; nothing is sent backward.

    Raises TypeError or ValueError on every rank if the arguments of a rank are wrong or differ from those of the others. On
    a GPU, a label outside the vocabulary is a device-side assertion, as in `torch.nn.functional.cross_entropy`.
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
    """Return ``mean``. Its gradient is that of ``factor`` times ``own``, this rank's part of the mean."""

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
