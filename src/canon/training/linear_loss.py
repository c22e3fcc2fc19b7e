"""`linear_sequence_loss`: projection, loss and gradients, chunk by chunk of tokens.

    for each chunk
        logits = softcap(hidden W^T + bias)    c x V float32; with ``vocab_group`` V of all columns
        maximum, sum of exp, label's logit     all-gather of 16 c bytes over ``vocab_group``
        dhidden, dW, dbias                     all-reduce of dhidden over it: 4 c D bytes

The loss is added in float64. The backward pass multiplies the sums for weight and bias by the
gradient of the loss, and rounds once.

Cost for N tokens of width D: 6 N D V FLOPs. Peak memory in bytes, beyond inputs, gradients and
results, if D <= V / 32: 1.2 L for L = 4 c V (8 c V) bytes of logits. In 16 bits also 2 D V forward,
and 4 D V backward.

Sources: gradients in the forward pass, Hsu et al., Liger Kernel (2024), also
torch.nn.functional.linear_cross_entropy; divided vocabulary, Shoeybi et al., Megatron-LM (2019),
section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.masks.arguments import whole
from canon.ranks.agreement import agree, named_failures, refused_together
from canon.ranks.graph_break import untraced
from canon.ranks.group import Group, place_in
from canon.route.checks import (
    accumulate_dtype,
    check_alike,
    check_tensor,
    checked_softcap,
    under_autocast,
)
from canon.route.differentiation import undifferentiable
from canon.training.losses import (
    Items,
    check_labels,
    check_range,
    check_weights,
    count_of,
    mean_of_ranks,
    number,
    number_of_items,
)

CHUNK = 2048  # tokens: their float32 logits over a vocabulary of 131,072 take 1 GiB
BLOCKS = 24  # a temporary tensor has at most a chunk's logits divided by this
NO_SECOND_DERIVATIVE = (
    "canon does not support second derivatives of linear_sequence_loss: its gradients are constants"
)
USED = (
    "linear_sequence_loss gives its gradients to one backward pass: call it again instead of "
    "retain_graph=True"
)


@untraced
@under_autocast("hidden", "linear_weight", "linear_bias")
def linear_sequence_loss(
    hidden: Tensor,
    linear_weight: Tensor,
    shift_labels: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weights: Tensor | None = None,
    num_items_in_batch: Items = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk: int | None = None,
    group: Group = None,
    vocab_group: Group = None,
) -> Tensor:
    """Return `sequence_loss` of the logits hidden W^T + bias, computed chunk by chunk.

    Args: those of `sequence_loss`, and
        hidden: (b, t, width) or (t, width); on every rank of ``vocab_group`` the same, with the
            same labels and weights.
        linear_weight, linear_bias: (vocabulary, width) and (vocabulary,), in the dtype of hidden.
            With ``vocab_group`` this rank's rows, at least one; the slices follow each other in
            rank order. Labels count in the whole vocabulary.
        softcap: logits become softcap * tanh(logits / softcap).
        z_loss: factor of the mean of lse squared, which is added.
        label_smoothing: part of the target, 0 to 1, that is divided equally over the vocabulary.
        chunk: tokens whose logits exist at one time; None is 2,048.
        vocab_group: the ranks that hold the vocabulary; None is this rank alone. It shares no other
            rank with ``group``.

    The gradient of hidden is complete on every rank of ``vocab_group``. Logits and sums are float32
    (float64 for float64). In 16 bits the gradient of a chunk's logits is rounded, as an operand of
    both products.

    A second backward pass, and a second derivative, raise RuntimeError. Other errors are those of
    `sequence_loss`; on a GPU, a label outside the vocabulary has the logit 0.
    """
    name = "linear_sequence_loss"
    group, _, ranks = place_in(name, group)
    vocab_group, place, slices = (
        (None, 0, 1) if vocab_group is None else place_in(name, vocab_group)
    )
    with refused_together(name, group, ranks):
        with refused_together(name, vocab_group, slices):
            ignore_index = whole(f"{name}: ignore_index", ignore_index)
            items = number_of_items(num_items_in_batch)
            chunk = CHUNK if chunk is None else whole(f"{name}: chunk", chunk, 1)
            softcap = checked_softcap(softcap)
            z_loss = number("z_loss", z_loss)
            smoothing = number("label_smoothing", label_smoothing, most=1)
            check_labels("hidden (b, t, width)", hidden, shift_labels, weights)
            check_weights(weights, shift_labels, items, ignore_index)
            _check_head(hidden, linear_weight, linear_bias)
            _check_groups(group, vocab_group, ranks, slices)
        needs = tuple(
            torch.is_grad_enabled() and x is not None and x.requires_grad
            for x in (hidden, linear_weight, linear_bias)
        )
        fields = (
            ("width", hidden.shape[-1]),
            ("bias and weights", (linear_bias is not None, weights is not None)),
            ("num_items_in_batch", items if isinstance(items, float | None) else "a tensor"),
            ("softcap, z_loss and label_smoothing", (softcap, z_loss, smoothing)),
            ("ignore_index", ignore_index),
        )
        shared = (
            *fields,
            ("tokens", tuple(shift_labels.shape)),
            ("chunk", chunk),
            ("requires_grad of hidden", needs[0]),
        )
        agree(name, vocab_group, slices, hidden, *shared)
        first, vocabulary = _place_in_vocabulary(linear_weight, vocab_group, place, slices)
        if isinstance(vocabulary, int):
            with refused_together(name, vocab_group, slices):
                check_range(shift_labels, ignore_index, vocabulary)
            agree(name, vocab_group, slices, hidden)
    size = vocabulary if isinstance(vocabulary, int) else None
    agree(name, group, ranks, hidden, *fields, ("vocabulary", size))
    labels, weights = shift_labels.flatten(), None if weights is None else weights.flatten()
    terms = _Terms(
        labels, weights, softcap, z_loss, smoothing, ignore_index, chunk, first, vocabulary,
        vocab_group, slices,
    )  # fmt: skip
    with named_failures(name, group, ranks), named_failures(name, vocab_group, slices):
        own = _LinearSum.apply(hidden, linear_weight, linear_bias, terms, needs)
    return mean_of_ranks(name, own, count_of(labels, weights, ignore_index), items, group, ranks)


@dataclass(frozen=True)
class _Terms:
    """The arguments besides hidden and the head. ``first``: this rank's first row."""

    labels: Tensor
    weights: Tensor | None
    softcap: float | None
    z_loss: float
    smoothing: float
    ignore_index: int
    chunk: int
    first: int | Tensor
    vocabulary: int | Tensor
    vocab_group: Any
    slices: int

    def factors(self, part: slice, dtype: torch.dtype) -> Tensor:
        valid = self.labels[part] != self.ignore_index
        weights = valid if self.weights is None else self.weights[part]
        return torch.where(valid, weights.to(dtype), 0)

    def unit(self, dtype: torch.dtype) -> Tensor:
        """Return the power of two at or below the largest factor, so that gradients of logits fit
        in float16.
        """
        largest = self.factors(slice(None), dtype).abs().amax()
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)

    def statistics(
        self, logits: Tensor, blocks: list[slice], labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return lse, the label's logit and the mean logit of each token."""
        # finite, if a slice has only -inf
        maximum = logits.amax(1).clamp(min=torch.finfo(logits.dtype).min)
        summed = torch.zeros_like(maximum)
        for columns in blocks:
            summed += (logits[:, columns] - maximum[:, None]).exp_().sum(1)
        own = (labels >= 0) & (labels < logits.shape[1])
        at_label = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        target = torch.where(own, at_label, 0)
        total = logits.sum(1) if self.smoothing else torch.zeros_like(maximum)
        if self.slices > 1:
            mine = torch.stack([maximum, summed, target, total])
            parts = [torch.empty_like(mine) for _ in range(self.slices)]
            dist.all_gather(parts, mine, group=self.vocab_group)
            maxima, sums, targets, totals = torch.stack(parts, 1)
            maximum, target, total = maxima.amax(0), targets.sum(0), totals.sum(0)
            summed = (sums * (maxima - maximum).exp()).sum(0)
        return maximum + summed.log(), target, total / self.vocabulary


class _LinearSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, terms, needs):
        rows, accumulate = hidden.flatten(0, -2), accumulate_dtype(hidden.dtype)
        (tokens, width), vocabulary = rows.shape, weight.shape[0]
        kept = min(tokens, terms.chunk)
        size = max(1, kept * vocabulary // (BLOCKS * max(kept, width, 1)))
        blocks = [slice(at, min(at + size, vocabulary)) for at in range(0, vocabulary, size)]
        dhidden = torch.zeros_like(rows) if needs[0] else None
        dweight, dbias = (
            torch.zeros_like(x, dtype=accumulate) if needed else None
            for x, needed in zip((weight, bias), needs[1:], strict=True)
        )
        buffer = hidden.new_empty(kept, vocabulary, dtype=accumulate)
        own = hidden.new_zeros((), dtype=torch.float64)
        unit = terms.unit(accumulate) if terms.weights is not None and tokens else None
        for start in range(0, tokens, terms.chunk):
            part = slice(start, start + terms.chunk)
            x, labels = rows[part], terms.labels[part] - terms.first
            logits, factor = buffer[: x.shape[0]], terms.factors(part, accumulate)
            for block in blocks:
                columns = logits[:, block]
                columns.copy_(_product(x, weight[block].t()))
                if bias is not None:
                    columns += bias[block]
                if terms.softcap is not None:
                    columns.div_(terms.softcap).tanh_().mul_(terms.softcap)
            lse, target, mean = terms.statistics(logits, blocks, labels)
            loss = lse - (1 - terms.smoothing) * target - terms.smoothing * mean
            loss += terms.z_loss * lse.square()
            own += torch.where(factor != 0, factor * loss, 0).double().sum()
            factor = factor if unit is None else factor / unit
            dx = x.new_zeros(x.shape, dtype=accumulate) if needs[0] else None
            for block in blocks if True in needs else ():
                dlogits = _gradient(logits[:, block], lse, factor, labels - block.start, terms)
                if dbias is not None:
                    dbias[block] += dlogits.sum(0)
                dlogits = dlogits.to(x.dtype)
                if dx is not None:
                    dx += _product(dlogits, weight[block])
                if dweight is not None:
                    dweight[block] += _product(dlogits.t(), x)
            if dx is not None:
                if terms.slices > 1:
                    dist.all_reduce(dx, group=terms.vocab_group)
                dhidden[part] = dx
        ctx.gradients, ctx.unit = (dhidden, dweight, dbias), unit
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        total = own.to(accumulate)
        ctx.save_for_backward(total)
        return total

    @staticmethod
    def backward(ctx, *grads):
        if ctx.gradients is None:
            raise RuntimeError(USED)
        (hidden, *head), ctx.gradients = ctx.gradients, None
        factor = grads[0].detach() if ctx.unit is None else grads[0].detach() * ctx.unit
        factor = factor.reshape(1)  # with an axis, so that bfloat16 is multiplied in float32
        for x in (hidden, *head):
            for part in () if x is None else x.chunk(BLOCKS):
                part.mul_(factor)
        head = (None if x is None else x.to(ctx.dtype) for x in head)
        found = None if hidden is None else hidden.reshape(ctx.shape), *head
        if torch.is_grad_enabled():
            found = undifferentiable(NO_SECOND_DERIVATIVE, found, *ctx.saved_tensors, *grads)
        return *found, None, None


def _gradient(logits: Tensor, lse: Tensor, factor: Tensor, labels: Tensor, terms: _Terms) -> Tensor:
    """Return the gradient of uncapped logits. ``labels`` count from the first column."""
    found = (logits - lse[:, None]).exp_().mul_((factor * (1 + 2 * terms.z_loss * lse))[:, None])
    if terms.smoothing:
        found -= (factor * terms.smoothing / terms.vocabulary)[:, None]
    own = (labels >= 0) & (labels < logits.shape[1])
    at_label = torch.where(own, (terms.smoothing - 1) * factor, 0)
    found.scatter_add_(1, labels.clamp(0, logits.shape[1] - 1)[:, None], at_label[:, None])
    if terms.softcap is not None:
        found.mul_((logits / terms.softcap).square_().neg_().add_(1))
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    if accumulate_dtype(a.dtype) == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _place_in_vocabulary(
    weight: Tensor, group: Any, place: int, slices: int
) -> tuple[int | Tensor, int | Tensor]:
    """Return this rank's first row in the vocabulary, and its size. Reads nothing from a GPU."""
    if slices == 1:
        return 0, weight.shape[0]
    size = torch.full((1,), weight.shape[0], dtype=torch.int64, device=weight.device)
    sizes = [torch.empty_like(size) for _ in range(slices)]
    dist.all_gather(sizes, size, group=group)
    ends = torch.cat(sizes).cumsum(0)
    first, vocabulary = ends[place] - weight.shape[0], ends[-1]
    return (int(first), int(vocabulary)) if weight.device.type == "cpu" else (first, vocabulary)


def _check_head(hidden: Tensor, weight: Any, bias: Any) -> None:
    given = {"linear_weight": weight} | ({} if bias is None else {"linear_bias": bias})
    for name, x in given.items():
        check_tensor(name, x)
        check_alike(("hidden", name), (hidden, x))
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or 0 in weight.shape:
        raise ValueError(
            f"linear_weight must be (vocabulary, {hidden.shape[-1]}) and not empty, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_bias must be ({weight.shape[0]},), a row for each of linear_weight, got "
            f"{tuple(bias.shape)}"
        )


def _check_groups(group: Any, vocab_group: Any, ranks: int, slices: int) -> None:
    if min(ranks, slices) > 1:
        shared = set(dist.get_process_group_ranks(group)) & set(
            dist.get_process_group_ranks(vocab_group)
        )
        if len(shared) > 1:
            raise ValueError(
                f"group and vocab_group share the ranks {sorted(shared)}, expected this rank "
                "only: pass two dimensions of a "
                'mesh, group=mesh["cp"] and vocab_group=mesh["tp"]'
            )
