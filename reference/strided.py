"""Strided attention: keys and values of a few heads at a time are gathered from all ranks, and used in one go.

Rank r holds the tokens that the layout gives it. For each group of key heads, all ranks' K and V come together; the
query heads that share them see all their keys at once, so nothing is merged. While a group is computed, the next one is
on its way, and so are the gradients of the one before. A backward pass of three groups of key heads:

    step         0            1            2
    gather     0 | 1          2
    compute      | 0          1            2
    reduce       |            0            1     | 2
               exposed                          exposed

Nothing runs beside the first gather and the last reduction. So the first and the last group may be split into
[f, s-f] and [s-l, l]: see `strides.py`. K and V of the first step travel as one message (`pack_first`), those of the others
as two.

Gathered keys stand in rank order, whatever the layout, and `Layout.local_mask` speaks that order: nothing is re-ordered.
Each rank then has a float32 part of the gradient of every rank's keys. The parts are exchanged all to all and each rank adds
up those of its own tokens in rank order: one fixed order, so the same inputs give the same bits.

Cost, for b t g (d + dv) = N numbers of K and V a rank, all shards equal, W ranks and n steps: forward 2 n messages (one
less if packed) with which each rank receives (W - 1) N items of the inputs' dtype; backward as many again, and n messages
and (W - 1) N items of reduce_dtype. Uneven shards are gathered padded to the largest. Memory: two groups' K and V of all
ranks, and two groups' dk and dv of all ranks: 1 / n of what gathering all heads at once would take.

``backward_schedule="ring"`` leaves the backward pass to `ring.py`: what is saved is the same.
It does not overlap by itself: messages start before the step that they run under, but plain PyTorch decides.

Sources: gathering by head groups, Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2, and Zilin Zhu,
ring-flash-attention; split ends and float32 reduction, aqlaboratory/ring-flash-attention pull request 12.
"""

from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.reference.backward import attention_backward, make_delta
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.differentiable import differentiable
from canon.reference.layout import Layout
from canon.reference.local import attention_forward
from canon.reference.mask import Mask
from canon.reference.ring import ring_backward
from canon.reference.strides import Steps, strided_steps, suggest_strides

__all__ = ["strided_attention", "suggest_strides"]


def strided_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    head_stride: int = 1,
    forward_first_stride: int | None = None,
    backward_first_stride: int | None = None,
    backward_last_stride: int | None = None,
    pack_first: bool = True,
    backward_schedule: str = "scatter",
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Attention of this rank's queries over the keys of all ranks: a collective, forward and backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: over the whole sequence; None is causal.
        layout: which rank holds which tokens; None is contiguous.
        head_stride: how many key heads are gathered at a time; divides g.
        forward_first_stride, backward_first_stride: how many of them are gathered first, to begin sooner; below head_stride.
        backward_last_stride: how many of them are reduced last, to end sooner; below head_stride.
        pack_first: K and V of the first step travel as one message.
        backward_schedule: "scatter", as here, or "ring", as in `ring_attention`, which knows no backward strides.
        scale: of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: in which dk and dv travel and are added up; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options; the number of tokens is the
    mask's, else the layout's, else W t. Results do not depend on the strides, but for the order of sums.

    Raises:
        ValueError: on every rank, if the arguments of one do not fit or differ from the others', or a stride is out of
            range or of no use.

    Source: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2; aqlaboratory/ring-flash-attention pull request 12.
    """
    options = {
        "head_stride": head_stride,
        "forward_first_stride": forward_first_stride,
        "backward_first_stride": backward_first_stride,
        "backward_last_stride": backward_last_stride,
        "pack_first": pack_first,
        "backward_schedule": backward_schedule,
    }
    return _strided(q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse, options)


@under_autocast("q", "k", "v")
def _strided(q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse, options):
    call = agreed_call(
        "strided_attention", q, k, v, mask, layout,
        scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward, **options,
    )  # fmt: skip
    steps = strided_steps(k.shape[-2], **options)  # after the ranks agree: what is wrong is wrong on all of them
    backward = partial(ring_backward, call) if steps.backward is None else partial(strided_backward, call, steps)
    return differentiable(q, k, v, partial(strided_forward, call, steps), backward, call=call, return_lse=return_lse)


def strided_forward(call: Call, steps: Steps, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t)."""
    mask = call.layout.local_mask(call.mask, call.rank, range(call.ranks))
    outs, lses = [], []
    arriving = gather(k, v, steps.forward[0], call, steps.pack_first)
    for heads, following in zip(steps.forward, (*steps.forward[1:], None), strict=True):
        k_full, v_full = arriving.wait()
        if following:
            arriving = gather(k, v, following, call)
        own = query_heads(heads, q, k)
        out, lse = attention_forward(q[:, :, own], k_full, v_full, mask, scale=call.scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


def strided_backward(
    call: Call, steps: Steps, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    mask = call.layout.local_mask(call.mask, call.rank, range(call.ranks))
    delta = make_delta(dout, out, dlse)
    dqs, sums, leaving = [], [], None
    arriving = gather(k, v, steps.backward[0], call, steps.pack_first)
    for heads, following in zip(steps.backward, (*steps.backward[1:], None), strict=True):
        k_full, v_full = arriving.wait()
        if following:
            arriving = gather(k, v, following, call)
        own = query_heads(heads, q, k)
        dq, dk_full, dv_full = attention_backward(
            dout[:, :, own], q[:, :, own], k_full, v_full, out[:, :, own], lse[:, own], mask, scale=call.scale,
            delta=delta[:, own], method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        dqs.append(dq)
        if leaving:  # one reduction at a time is in flight
            sums.append(leaving.wait())
        leaving = reduce(dk_full, dv_full, call) if keys_need_grad else None
    sums += [leaving.wait()] if leaving else []
    dk, dv = (torch.cat(parts, dim=2).to(k.dtype) for parts in zip(*sums, strict=True)) if sums else (None, None)
    return torch.cat(dqs, dim=2).to(q.dtype) if needs_grad[0] else None, dk, dv


def query_heads(heads: range, q: Tensor, k: Tensor) -> slice:
    """The query heads that share these key heads."""
    share = q.shape[2] // k.shape[2]
    return slice(share * heads.start, share * heads.stop)


class gather:
    """Start to bring the keys and values of some heads together. `wait` returns all ranks' K and V, in rank order."""

    def __init__(self, k: Tensor, v: Tensor, heads: range, call: Call, packed: bool = False):
        self.k, self.v = (x[:, :, heads.start : heads.stop] for x in (k, v))
        self.sizes, self.shards, self.requests = [call.layout.size(r) for r in range(call.ranks)], [], []
        if call.ranks == 1:
            return
        for x in [torch.cat([self.k, self.v], dim=-1)] if packed else [self.k, self.v]:
            padded = x.new_zeros(x.shape[0], max(self.sizes), *x.shape[2:])
            padded[:, : x.shape[1]] = x
            shards = [torch.empty_like(padded) for _ in self.sizes]
            self.requests.append(dist.all_gather(shards, padded, group=call.group, async_op=True))
            self.shards.append(shards)

    def wait(self) -> tuple[Tensor, ...]:
        if not self.requests:
            return self.k, self.v
        for request in self.requests:
            request.wait()
        full = [
            torch.cat([shard[:, :size] for shard, size in zip(shards, self.sizes, strict=True)], dim=1)
            for shards in self.shards
        ]
        return tuple(full) if len(full) == 2 else full[0].split([self.k.shape[-1], self.v.shape[-1]], dim=-1)


class reduce:
    """Start to add up all ranks' parts of dk and dv. `wait` returns the sums for this rank's tokens."""

    def __init__(self, dk_full: Tensor, dv_full: Tensor, call: Call):
        self.widths = [dk_full.shape[-1], dv_full.shape[-1]]
        parts = torch.cat([dk_full, dv_full], dim=-1).to(call.reduce_dtype).transpose(0, 1).contiguous()
        sizes = [call.layout.size(r) for r in range(call.ranks)]
        self.received = parts.new_empty(call.ranks, sizes[call.rank], *parts.shape[1:])
        self.request = None
        if call.ranks == 1:
            self.received[0] = parts
        else:
            own = [sizes[call.rank]] * call.ranks
            self.request = dist.all_to_all_single(
                self.received.flatten(0, 1), parts, own, sizes, group=call.group, async_op=True
            )

    def wait(self) -> tuple[Tensor, ...]:
        if self.request:
            self.request.wait()
        total, *others = self.received.unbind(0)
        for other in others:  # in rank order, rounded to reduce_dtype each time
            total = total + other
        return total.transpose(0, 1).split(self.widths, dim=-1)
