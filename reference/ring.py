"""Ring attention: queries stay on their rank, keys and values travel round all ranks.

Each of W ranks holds q, k and v of its own tokens. At step s rank r uses K and V of rank r - s, their owner. In every
step except the last, it sends them to rank r + 1 and receives the next ones from rank r - 1. Ranks count modulo W:

    4 ranks      step 0    step 1    step 2    step 3
    rank 0       K0 V0     K3 V3     K2 V2     K1 V1
    rank 1       K1 V1     K0 V0     K3 V3     K2 V2
    rank 2       K2 V2     K1 V1     K0 V0     K3 V3
    rank 3       K3 V3     K2 V2     K1 V1     K0 V0

Forward: a step gives out and lse, the log of the softmax's denominator, over the keys of one owner. `merge` joins two
results i and j in the accumulation dtype, float32 (float64 for float64). out is rounded once, at the end:

    lse = log(exp(lse_i) + exp(lse_j))        out = exp(lse_i - lse) out_i + exp(lse_j - lse) out_j

If lse_i and lse_j are -inf (no visible key), out is 0 and lse is -inf.

Backward: K and V travel a second time, because a rank saves only its own. Sums of dk and dv follow one step later:
a rank sends a sum after its step, and it arrives during the next one. The path of dK0:

    step 0    rank 0 computes its own part and keeps it
    step 1    rank 1 computes a part, then sends it to rank 2
    step 2    rank 2 adds its part, then sends the sum to rank 3
    step 3    rank 3 adds its part, then sends the sum to rank 0
    end       rank 0 adds the sum to its own part: W - 1 hops

Float addition is not associative, so the order is fixed: the parts for owner o are added as o + 1, o + 2, ..., o.
The same inputs, ranks, layout and options give the same bits, with every `backward` method of this half.
Additions use the accumulation dtype. The first part and each sum are rounded to reduce_dtype for a hop.

Balance under a causal mask: in each step a rank waits for the keys of its neighbour, so one slow rank soon delays all.
The ranks need equal work at *every* step. Zigzag cuts n = 2Wc tokens into 2W chunks of c tokens (of nearly c for other
n). Rank r holds the early chunk r, stored first, and the late chunk 2W - 1 - r:

    chunk    0  1  2  3  4  5  6  7
    rank     0  1  2  3  3  2  1  0

A chunk of queries sees all keys of an earlier chunk, its own keys causally, and no keys of a later chunk. For rank 1:

                          own keys:           keys of rank 0:     keys of rank 2:
                          1         6         0         7         2         5
    queries of chunk 1    causal    -         full      -         -         -
    queries of chunk 6    full      causal    full      -         full      full

Proof that the work is equal, for rank r and owner o of the keys. A cell is a query-key pair, a tile c x c cells.
Every early chunk precedes every late one, because r < W <= 2W - 1 - o.

    o = r    one full tile and two causal ones: c^2 + 2 c (c + 1) / 2 = 2 c^2 + c cells
    o < r    o < r < 2W-1-r < 2W-1-o: both query chunks follow chunk o, neither follows 2W-1-o: two full tiles, 2 c^2
    o > r    r < o < 2W-1-o < 2W-1-r: the late query chunk follows both key chunks, the early one neither: 2 c^2

At step 0 every rank has o = r, at later steps none has. So at every step all ranks compute equally many cells. The
total is W (2 W c^2 + c) = n (n + 1) / 2 cells, the whole causal mask. Other layouts, with t tokens on a rank:

                  o < r              o = r              o > r
    contiguous    t^2                t (t + 1) / 2      0
    striped       t (t + 1) / 2      t (t + 1) / 2      t (t - 1) / 2

With contiguous shards the last rank always has o <= r. So the ring takes about 2 - 1/W times as long as with zigzag.
Striped: query i W + r sees key j W + o if j < i, or if j = i and o <= r. So the mask is causal in i and j, for o > r
without its diagonal. `Layout.local_mask` finds all these masks, so the code treats all steps alike.

Cost of a rank, for equal shards of t tokens. Its K and V have N = b t g (d + dv) elements of e bytes: batch b, g key
heads, widths d and dv. An element of reduce_dtype has E bytes:

                         hops     bytes sent, and as many received
    forward   K, V       W - 1    (W - 1) N e
    backward  K, V       W - 1    (W - 1) N e
              dk, dv     W - 1    (W - 1) N E

In bfloat16 with reduce_dtype float32 that is 2 (W - 1) N bytes forward and 6 (W - 1) N bytes backward.
A hop is one message for each of its two tensors. FLOPs are those of `local.py` and `backward.py` for the cells that the
rank's queries see. Peak memory beyond inputs and outputs does not grow with W. K and V take 2 N elements, and 3 N while
a `Hop` starts. At most five out (in `merge`) or three dq are in the accumulation dtype. Gradients of K and V take up to 6 N
elements: own part, sum, and the sent and received tensors of two hops.
K and V travel during the step's computation, dk and dv during the next one; their last hop has none. Whether messages
overlap with computation depends on the backend; gloo uses the same CPU cores.

Limits: keys make all W - 1 hops, even to ranks without a query that sees them. Only empty shards are not sent.
All ranks start hops in one order and messages between two ranks keep it, so keys and gradients are not mixed up.

Sources: Liu, Zaharia, Abbeel, Ring Attention (2023); zigzag: Zilin Zhu, ring-flash-attention issue 2 (2024), and
mlc-ai/Pith-Train pull request 39; striped: Brandon et al., Striped Attention (2023).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.reference.backward import make_delta, tiled_backward
from canon.reference.call import Call, agreed_call
from canon.reference.checks import accumulate_dtype, under_autocast
from canon.reference.differentiable import differentiable
from canon.reference.layout import Layout
from canon.reference.local import merge, tiled_forward
from canon.reference.mask import Mask
from canon.reference.operators import call_operator, is_traced
from canon.reference.passes import LAYOUTS, Passes, makes_passes

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
    """Return attention of this rank's queries over the keys of all ranks. All ranks must call it and its backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or packed without b.
        mask: over the whole sequence; None is causal.
        layout: the tokens of each rank; None is contiguous.
        scale: factor of the scores; None is 1 / sqrt(d).
        group: the process group; None is all ranks. Without torch.distributed this process is the only rank.
        reduce_dtype: dtype in which dk and dv are sent; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for every step: see `backward.py`.
        return_lse: also return lse (b, h, t), natural logarithm, float32 (float64 for float64), differentiable.

    All ranks must pass equal masks, layouts, dtypes, heads, widths, scales, options and requires_grad. The number of
    tokens is that of the mask, else that of the layout, else W t.

    Raises:
        ValueError: on every rank, if the arguments of one rank do not fit together or differ from those of the others.

    Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("ring_attention", q, k, v, mask, layout, return_lse, **options)


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
    """Return `ring_attention` over `Layout.zigzag`: equal work for all ranks at every step of a causal mask.

    With 2c tokens on a rank, `Layout.local_mask` turns the causal mask into three cases:

        own keys                     Mask.causal(2 * c)
        keys of an earlier rank      all queries x the first c keys
        keys of a later rank         the last c queries x all keys

    Arguments except ``layout``, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Zilin Zhu, ring-flash-attention issue 2 (2024); mlc-ai/Pith-Train pull request 39.
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("zigzag_attention", q, k, v, mask, None, return_lse, **options)


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
    """Return `ring_attention` over `Layout.striped`: a causal mask stays causal on each rank, perhaps without its diagonal.

    Arguments except ``layout``, shapes, results and ValueErrors are those of `ring_attention`.
    Source: Brandon et al., Striped Attention (2023).
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("striped_attention", q, k, v, mask, None, return_lse, **options)


@under_autocast("q", "k", "v")
def _ring(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None,
    layout: Layout | None, return_lse: bool, **options,
):  # fmt: skip
    if is_traced():
        return call_operator("reference", function, q, k, v, mask, layout, return_lse, **options)
    passes = _passes(function, q, k, v, mask, layout, **options)
    return differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=return_lse)


@makes_passes("reference", "ring_attention", "zigzag_attention", "striped_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None, **options
) -> Passes:
    call = agreed_call(function, q, k, v, mask, LAYOUTS.get(function, layout), **options)

    def forward(q, k, v):
        out, lse = ring_forward(q, k, v, call)
        return out.to(q.dtype), lse

    return Passes(forward, partial(ring_backward, call), call)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) and lse (b, h, t), both in float32 (float64 for float64)."""
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, _ = q.shape
    out = q.new_zeros(b, t, h, v.shape[-1], dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    held = [k.contiguous(), v.contiguous()]
    for step in range(call.ranks):
        owner = (call.rank - step) % call.ranks  # of the keys that this rank holds now
        hop = Hop(held, step + 1, call) if step + 1 < call.ranks else None
        part = tiled_forward(q, *held, call.local_mask(owner), scale=call.scale, out_dtype=accumulate)
        out, lse = merge(out, lse, *part)
        held = hop.wait() if hop else held
    return out, lse


def ring_backward(
    call: Call, needs_grad: tuple[bool, bool, bool], dout: Tensor, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's tokens in the dtype of q.

    dq is None if q needs no gradient. dk and dv are None, and not sent, if neither k nor v needs one.
    """
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    held, gradient_hop = [k.contiguous(), v.contiguous()], None
    own_part: list = [None, None]  # dk and dv of this rank's keys from its own queries
    for step in range(call.ranks):
        owner = (call.rank - step) % call.ranks
        hop = Hop(held, step + 1, call) if step + 1 < call.ranks else None
        dq_part, *part = tiled_backward(
            dout, q, *held, lse, delta, call.local_mask(owner),
            scale=call.scale, method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        if dq is not None:
            dq += dq_part
        if gradient_hop:  # the sum of these keys' parts from steps 1 to step - 1
            part = _plus_received(part, gradient_hop)
        if step == 0:
            own_part = part
        elif keys_need_grad:
            gradient_hop = Hop([x.to(call.reduce_dtype).contiguous() for x in part], step + 1, call)
        held = hop.wait() if hop else held
    if gradient_hop:
        own_part = _plus_received(own_part, gradient_hop)
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, *own_part))


def _plus_received(part: list[Tensor], hop: "Hop") -> list[Tensor]:
    return [mine + received.to(mine.dtype) for mine, received in zip(part, hop.wait(), strict=True)]


class Hop:
    """A transfer in flight: ``tensors`` to the next rank, the same kind of tensors from the previous rank.

    The received block is used at ``step`` (W: at the end). Its owner is rank - step (mod W); the layout gives its size.
    """

    def __init__(self, tensors: list[Tensor], step: int, call: Call):
        tokens = call.layout.size((call.rank - step) % call.ranks)
        self.received = [x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        self.sent = tensors  # keeps the memory while this Hop exists
        following, previous = ((call.rank + offset) % call.ranks for offset in (1, -1))
        operations = [_operation(dist.isend, x, following, call) for x in tensors if x.numel()]
        operations += [_operation(dist.irecv, x, previous, call) for x in self.received if x.numel()]
        self.requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """Wait for the transfer and return the received tensors."""
        for request in self.requests:
            request.wait()
        return self.received


def _operation(kind: Callable, tensor: Tensor, peer: int, call: Call) -> dist.P2POp:
    group = dist.group.WORLD if call.group is None else call.group
    return dist.P2POp(kind, tensor, dist.get_global_rank(group, peer), call.group)
