"""Ring attention: queries stay, keys and values go round the ranks and are used as they pass.

Rank r holds the tokens that the layout gives it. At step s it holds the keys and values of rank r - s (mod W):

    4 ranks      step 0    step 1    step 2    step 3
    rank 0       K0        K3        K2        K1            every step: send what you hold to rank r + 1,
    rank 1       K1        K0        K3        K2            receive from rank r - 1, and meanwhile attend
    rank 2       K2        K1        K0        K3
    rank 3       K3        K2        K1        K0

Forward: each step gives a part (out, lse) over one rank's keys; parts are merged in float32, rounded once at the end.

Backward: two rings. K and V go round again; they are not kept, so memory does not grow with W. The float32 gradients
dk and dv of a block travel with it, one step behind: each rank adds its part to what it received and sends the sum on.
A rank keeps its own part of its own keys' gradient at home and adds it last: W - 1 gradient hops, not W. For rank 0:

    4 ranks      step 0    step 1         step 2         step 3         after
    rank 1       -         dK0 of 1       .              .              .
    rank 2       -         .              + dK0 of 2     .              .
    rank 3       -         .              .              + dK0 of 3     .
    rank 0       dK0 of 0  .              .              .              + all three

So each gradient is summed in one fixed order: same inputs, same bits. (Left to autograd, a ring breaks: a rank that
skips a block it cannot see would never make its share of the reverse sends.)

Cost, for b t g (d + dv) = N numbers of K and V a rank: forward W - 1 messages and (W - 1) N items of the inputs' dtype;
backward as many again, and W - 1 messages and (W - 1) N items of reduce_dtype. Memory: two blocks of K and V, two
of dk and dv, float32 out, lse and dq. Empty shards send nothing.

It does not overlap by itself: `post` starts a hop before the step that it runs under, but plain PyTorch decides.

Sources: Liu, Zaharia, Abbeel, Ring Attention (2023); zigzag: Zilin Zhu, ring-flash-attention issue 2 (2024), and
mlc-ai/Pith-Train pull request 39; striped: Brandon et al., Striped Attention (2023).
"""

from collections.abc import Callable
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
from canon.reference.local import attention_forward, merge
from canon.reference.mask import Mask

__all__ = ["ring_attention", "striped_attention", "zigzag_attention"]


def ring_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
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
        scale: of the scores; None is 1 / sqrt(d).
        group: the ranks; None is all. Without an initialised process group: one rank.
        reduce_dtype: in which dk and dv travel; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for each step's part.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales and options; the number of tokens is the
    mask's, else the layout's, else W t.

    Raises:
        ValueError: on every rank, if the arguments of one do not fit or differ from the others'.

    Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
    """
    return _ring("ring_attention", q, k, v, mask, layout, scale, group, reduce_dtype, backward, return_lse)


def zigzag_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """`ring_attention` over `Layout.zigzag`: under a causal mask every rank has the same work at every step.

    With 2b tokens a rank, `Layout.local_mask` turns the causal mask into three cases:

        the own block        Mask.causal(2b)
        an earlier rank's    all queries x the first half of its keys
        a later rank's       the second half of the queries x all its keys

    Arguments, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Zilin Zhu, ring-flash-attention issue 2 (2024); mlc-ai/Pith-Train pull request 39.
    """
    return _ring("zigzag_attention", q, k, v, mask, Layout.zigzag, scale, group, reduce_dtype, backward, return_lse)


def striped_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """`ring_attention` over `Layout.striped`: under a causal mask every step is causal, with or without its diagonal.

    Arguments, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Brandon et al., Striped Attention (2023).
    """
    return _ring("striped_attention", q, k, v, mask, Layout.striped, scale, group, reduce_dtype, backward, return_lse)


@under_autocast("q", "k", "v")
def _ring(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    layout: Layout | Callable[[int, int], Layout] | None,
    scale: float | None,
    group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype | None,
    backward: str,
    return_lse: bool,
):
    call = agreed_call(
        function, q, k, v, mask, layout, scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward
    )

    def forward(q, k, v):
        out, lse = ring_forward(q, k, v, call)
        return out.to(q.dtype), lse

    return differentiable(q, k, v, forward, partial(ring_backward, call), call=call, return_lse=return_lse)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (b, t, h, dv) and lse (b, h, t), both in the accumulation dtype."""
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, _ = q.shape
    out = q.new_zeros(b, t, h, v.shape[-1], dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    held = [k.contiguous(), v.contiguous()]
    for step in range(call.ranks):
        owner = (call.rank - step) % call.ranks  # whose keys are here
        hop = post(held, step + 1, call) if step + 1 < call.ranks else None
        part = attention_forward(q, *held, call.local_mask(owner), scale=call.scale, out_dtype=accumulate)
        out, lse = merge(out, lse, *part)
        held = hop.wait() if hop else held
    return out, lse


def ring_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens, in the dtype of q. Unneeded ones are not computed or sent."""
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    held, gradient_hop = [k.contiguous(), v.contiguous()], None
    home: list = [None, None]  # dk and dv of the own keys
    for step in range(call.ranks):
        owner = (call.rank - step) % call.ranks
        hop = post(held, step + 1, call) if step + 1 < call.ranks else None
        dq_part, *part = attention_backward(
            dout, q, *held, out, lse, call.local_mask(owner), scale=call.scale, delta=delta, method=call.backward,
            grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        if dq is not None:
            dq += dq_part
        if gradient_hop:  # what the ranks before this one found for the same keys
            part = [mine + received.to(accumulate) for mine, received in zip(part, gradient_hop.wait(), strict=True)]
        if step == 0:
            home = part
        elif keys_need_grad:
            gradient_hop = post([x.to(call.reduce_dtype).contiguous() for x in part], step + 1, call)
        held = hop.wait() if hop else held
    if gradient_hop:
        home = [mine + received.to(accumulate) for mine, received in zip(home, gradient_hop.wait(), strict=True)]
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, *home))


class post:
    """Start one hop: what this rank holds goes to the next rank, what the previous one holds comes in.

    ``step`` is the step at which the received block will be used; it is then that of rank ``rank - step``, whose number
    of tokens the layout knows, so nothing need be asked. `wait` returns the received tensors.
    """

    def __init__(self, tensors: list[Tensor], step: int, call: Call):
        tokens = call.layout.size((call.rank - step) % call.ranks)
        self.received = [x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        self.sent = tensors  # kept alive until they have left
        after, before = ((call.rank + way) % call.ranks for way in (1, -1))
        operations = [_operation(dist.isend, x, after, call) for x in tensors if x.numel()]
        operations += [_operation(dist.irecv, x, before, call) for x in self.received if x.numel()]
        self.requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        for request in self.requests:
            request.wait()
        return self.received


def _operation(kind: Callable, tensor: Tensor, peer: int, call: Call) -> dist.P2POp:
    everyone = dist.group.WORLD if call.group is None else call.group
    return dist.P2POp(kind, tensor, dist.get_global_rank(everyone, peer), call.group)
