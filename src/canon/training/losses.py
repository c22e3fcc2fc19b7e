"""`sequence_loss`: the mean cross-entropy of all ranks."""

import math
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from canon.masks.arguments import shown, whole
from canon.ranks.agreement import agree, named_failures, refused_together
from canon.ranks.graph_break import untraced
from canon.ranks.group import Group, place_in
from canon.route.checks import accumulate_dtype, check_tensor

Items = int | float | Tensor | None


@untraced
def sequence_loss(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    weights: Tensor | None = None,
    num_items_in_batch: Items = None,
    group: Group = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross-entropy over the valid tokens of all ranks: a scalar. A collective.

    Args:
        logits: of this rank's tokens, (b, t, vocabulary) or (t, vocabulary). t may be 0.
        shift_labels: the next token of each token, int64 (b, t) or (t,), from `Layout.shard_batch`.
        weights: a constant factor of each token's loss, floating-point (b, t) or (t,). The mean
            divides by their sum, so they must be finite and at least 0. Weight 0 counts as no
            label. With num_items_in_batch, they may have any sign.
        num_items_in_batch: divide by this number of all ranks and microbatches instead, so that
            losses of microbatches add up. 1 gives the sum. 0 needs tokens without labels.
        group: the ranks that hold the sequence, as in `canon.faces`.
        ignore_index: the label of tokens without a loss.

    The gradient on each of n ranks is n times that of its own tokens' part of the mean, because DDP
    and FSDP2 average over ranks. Where gradients are added, divide the loss by n. With a group of
    context ranks, each data rank counts equally; with all ranks, each token.

    Without valid tokens, the loss and its gradients are 0. Losses are computed in float32 (float64
    for float64), and added in float64. Cost: one all-reduce of 16 bytes.

    Raises TypeError or ValueError on every rank if arguments are wrong or differ between ranks. On
    a GPU, a label outside the vocabulary is a device-side assertion, 0 items give an infinite loss,
    items in a tensor are not compared, and the host waits for weights without items, except in a
    CUDA graph.
    """
    name = "sequence_loss"
    group, _, ranks = place_in(name, group)
    with refused_together(name, group, ranks):
        ignore_index = whole(f"{name}: ignore_index", ignore_index)
        items = number_of_items(num_items_in_batch)
        check_labels("logits (b, t, vocabulary)", logits, shift_labels, weights)
        check_weights(weights, shift_labels, items, ignore_index)
        check_range(shift_labels, ignore_index, logits.shape[-1])
    fields = (
        ("vocabulary", logits.shape[-1]),
        ("ignore_index", ignore_index),
        ("weights", None if weights is None else "given"),
        ("num_items_in_batch", items if isinstance(items, float | None) else "a tensor"),
    )
    agree(name, group, ranks, logits, *fields)
    scores = logits.flatten(0, -2).to(accumulate_dtype(logits.dtype))
    labels = shift_labels.flatten()
    counted = (
        labels if weights is None else labels.masked_fill(weights.flatten() == 0, ignore_index)
    )
    losses = cross_entropy(scores, counted, ignore_index=ignore_index, reduction="none")
    if weights is not None:
        losses = torch.where(
            counted != ignore_index, losses * weights.flatten().to(losses.dtype), 0
        )
    own = losses.sum(dtype=torch.float64).to(losses.dtype)
    return mean_of_ranks(name, own, count_of(labels, weights, ignore_index), items, group, ranks)


def mean_of_ranks(
    name: str, own: Tensor, counted: Tensor, items: Any, group: Any, ranks: int
) -> Tensor:
    """Return the sum of all ranks' ``own``, divided by ``items`` or the sum of ``counted``."""
    totals = torch.stack([own.detach().double(), counted])
    if ranks > 1:
        with named_failures(name, group, ranks):
            dist.all_reduce(totals, group=group)
    divisor = totals[1] if items is None else torch.zeros_like(totals[1]) + items
    divisor = torch.where(totals[1] == 0, 1, divisor)
    return _GlobalMean.apply(own, totals[0] / divisor, ranks / divisor)


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


def count_of(labels: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of valid tokens, or the sum of their weights' sizes."""
    valid = labels != ignore_index
    counted = valid if weights is None else torch.where(valid, weights.flatten().abs(), 0)
    return counted.sum(dtype=torch.float64)


def number_of_items(value: Any) -> float | Tensor | None:
    """Return `num_items_in_batch` as a float, or a tensor on a GPU unread; None stays."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.reshape(()).double() if value.is_cuda else value.item()
    if value is None or (isinstance(value, Tensor) and value.is_cuda):
        return value
    return number("num_items_in_batch", value)


def number(name: str, value: Any, most: float = math.inf) -> float:
    """Return a finite number from 0 to ``most``."""
    expected = f">= 0{'' if most == math.inf else f' and <= {most}'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number {expected}, got {shown(value)}")
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= most:
        raise ValueError(f"{name} must be a finite number {expected}, got {value}")
    return number


def check_labels(expected: str, x: Any, shift_labels: Any, weights: Any) -> None:
    """Raise unless x, labels and weights fit. ``expected``: of x."""
    name = expected.split()[0]
    given = {name: x, "shift_labels": shift_labels} | (
        {} if weights is None else {"weights": weights}
    )
    for each, tensor in given.items():
        check_tensor(each, tensor)
        if tensor.device != x.device:
            raise ValueError(
                f"{name} and {each} must be on one device, got {x.device}, {tensor.device}"
            )
    for each in given.keys() - {"shift_labels"}:
        if not given[each].is_floating_point():
            raise TypeError(f"{each} must be floating-point, got {shown(given[each])}")
    if shift_labels.dtype != torch.int64:
        raise TypeError(
            f"shift_labels must be int64, got {shown(shift_labels)}: pass shift_labels.long()"
        )
    if x.ndim not in (2, 3) or x.shape[:-1] != shift_labels.shape:
        raise ValueError(
            f"{name} must be {expected.removeprefix(name + ' ')} and shift_labels (b, t), or both "
            f"without b, got {tuple(x.shape)} and {tuple(shift_labels.shape)}"
        )
    if weights is not None and (weights.shape != shift_labels.shape or weights.requires_grad):
        wrong = (
            "a tensor with a gradient: pass weights.detach()"
            if weights.requires_grad
            else tuple(weights.shape)
        )
        raise ValueError(
            "weights must be constants of the shape of shift_labels, "
            f"{tuple(shift_labels.shape)}, got {wrong}"
        )


def check_weights(
    weights: Tensor | None, shift_labels: Tensor, items: Any, ignore_index: int
) -> None:
    """Raise ValueError if weights of a mean could cancel, or lose digits, or items are 0."""
    if (
        shift_labels.device.type == "cpu"
        and isinstance(items, float)
        and not items
        and count_of(shift_labels.flatten(), weights, ignore_index)
    ):
        raise ValueError("num_items_in_batch must be above 0 if labels count, got 0")
    if (
        weights is None
        or items is not None
        or (weights.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return
    least = torch.finfo(torch.float32).tiny
    fits = (
        (weights == 0)
        | ((weights >= least) & (weights < math.inf))
        | (shift_labels == ignore_index)
    )
    if not fits.all():
        raise ValueError(
            f"weights must be finite, and 0 or at least {least:.1e}, because the mean divides by "
            f"their sum; got {weights[~fits][0].item()}: for advantages, which have both signs, "
            "pass num_items_in_batch, the number of labelled tokens of all ranks and microbatches"
        )


def check_range(shift_labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise ValueError for a label outside the vocabulary, unless on a GPU."""
    if shift_labels.device.type == "cpu":
        wrong = (shift_labels != ignore_index) & ((shift_labels < 0) | (shift_labels >= vocabulary))
        if wrong.any():
            raise ValueError(
                f"shift_labels must be in 0..{vocabulary - 1} or ignore_index={ignore_index}, "
                f"got {int(shift_labels[wrong][0])}"
            )
