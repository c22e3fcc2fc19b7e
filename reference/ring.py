"""Ring attention: queries stay on their rank, keys and values travel round all ranks.

Each of W ranks holds q, k and v of its own tokens. At step s rank r uses K and V of rank r - s, their owner. In every
step except the last, it sends them to rank r + 1 and receives the next ones from rank r - 1. Rank numbers are taken
modulo W:

    4 ranks      step 0    step 1    step 2    step 3
    rank 0       K0 V0     K3 V3     K2 V2     K1 V1
    rank 1       K1 V1     K0 V0     K3 V3     K2 V2
    rank 2       K2 V2     K1 V1     K0 V0     K3 V3
    rank 3       K3 V3     K2 V2     K1 V1     K0 V0

Forward: a step gives out and lse, the log of the softmax's denominator, over the keys of one owner. `merge` joins two
results i and j in the accumulation dtype, float32 (float64 for float64). out is rounded once, at the end (a second
time if there is a sink):

    lse = log(exp(lse_i) + exp(lse_j))        out = exp(lse_i - lse) out_i + exp(lse_j - lse) out_j

If lse_i and lse_j are -inf (no visible key), out is 0 and lse is -inf.

Backward: K and V travel a second time, because a rank saves only its own. Each rank computes a part of dk and dv for
every owner's keys. The sum of these parts follows the keys over the same links. Each step but the last sends keys at
its start, and each step but the first sends its sum at its end. So a sum is in flight during the next step. The last
one is in flight after all steps, and nothing hides it. The path of dK0:

    step 0    rank 0 computes its own part and keeps it
    step 1    rank 1 computes a part, then sends it to rank 2
    step 2    rank 2 computes a part, adds the received one, then sends the sum to rank 3
    step 3    rank 3 does the same and sends the new sum to rank 0
    end       rank 0 adds the received sum to its own part, after W - 1 hops

Float addition is not associative, so the order is fixed: o + 1, o + 2, ..., o for the keys of owner o.
Rank r joins its forward results, and adds its parts of dq, in the order of the steps: owners r, r - 1, ..., r + 1.
On the same hardware and software, a repeated call with the same inputs, layout, options and number of ranks gives the
same bits. Additions use the accumulation dtype. dk and dv are rounded to reduce_dtype before each hop.

Balance under a causal mask: rank r can start step s + 1 only after rank r - 1 has started step s, which sends the keys.
So a rank that starts a step late delays the next rank at the next step. It can also delay the previous rank, whose send
may not end before the late rank posts its receive. The ranks need equal work at *every* step. Zigzag cuts n = 2Wc
tokens into 2W chunks of c tokens. Rank r holds the early chunk r, stored first, and the late chunk 2W - 1 - r. For
other n, chunk sizes differ by at most one token, and the work is nearly equal. With 4 ranks:

    chunk    0  1  2  3  4  5  6  7
    rank     0  1  2  3  3  2  1  0

A query chunk sees all keys of an earlier chunk, its own keys causally, and no keys of a later chunk (-). For rank 1:

                          own keys:           keys of rank 0:     keys of rank 2:
                          1         6         0         7         2         5
    queries of chunk 1    causal    -         full      -         -         -
    queries of chunk 6    full      causal    full      -         full      full

A cell is a pair of a query and a key. A block is a chunk of queries x a chunk of keys, c x c cells. The work of a step,
forward or backward, is its number of visible cells. Proof that all ranks have equal work at every step: let r be the
rank, and o the owner of the keys that it uses. Every early chunk precedes every late one, because r < W <= 2W - 1 - o.

    o = r    one full block and two causal ones: c^2 + 2 c (c + 1) / 2 = 2 c^2 + c cells
    o < r    o < r < 2W-1-r < 2W-1-o: both query chunks follow chunk o, neither follows 2W-1-o: two full blocks, 2 c^2
    o > r    r < o < 2W-1-o < 2W-1-r: the late query chunk follows both key chunks, the early one neither: 2 c^2

At step 0 every rank has o = r, at later steps none has. So at every step all ranks compute equally many cells. In all
steps a rank computes (2 c^2 + c) + (W - 1) 2 c^2 = 2 W c^2 + c cells. W times that is n (n + 1) / 2, the whole causal
mask. Other masks can be unbalanced. Visible cells of a step in other layouts, under a causal mask, with t tokens on a rank:

                  o < r              o = r              o > r
    contiguous    t^2                t (t + 1) / 2      0
    striped       t (t + 1) / 2      t (t + 1) / 2      t (t - 1) / 2

With contiguous shards the last rank always has o <= r: about (W - 1) t^2 + t^2 / 2 cells. A zigzag rank has t = 2c:
about W t^2 / 2 cells. So a pass takes about 2 - 1/W times as long as with zigzag, if time is proportional to cells.
Striped: rank r holds the tokens r, r + W, r + 2W, and so on. Its query i is token i W + r; key j of rank o is token
j W + o. The query sees the key if j < i, or if j = i and o <= r. So the local mask is causal, without its diagonal if
o > r. `Call.local_mask` finds all these masks by `Layout.local_mask`, so the code treats all steps alike.

Cost of a rank, for equal shards of t tokens. Its K and V have N = b t g (key_width + value_width) elements. b is the
batch, g the number of key heads. The widths are the last axes of k and v. An element has e bytes in the dtype of q,
E in reduce_dtype and A in the accumulation dtype. A hop sends two messages, one for each tensor:

                           hops     bytes sent, and as many received
    each pass   K, V       W - 1    (W - 1) N e
    backward    dk, dv     W - 1    (W - 1) N E

With bfloat16 inputs and reduce_dtype float32 the table gives 2 (W - 1) N bytes forward and 6 (W - 1) N bytes backward.
If neither k nor v needs a gradient, dk and dv make no hops. Not counted: to compare the calls, in each pass every rank
gets a digest of 8 bytes from each other rank (`agreement.py`). FLOPs are those of `local.py` and `backward.py` for
the visible cells of this rank's queries. Peak memory beyond inputs, outputs, tiles, row statistics:

    K, V      2 N e bytes; 3 N e while a `Hop` starts: those sent by the previous hop, those in use, and the next ones
    out, dq   forward: up to five tensors of out's shape (in `merge`); backward: three of dq's; accumulation dtype
    dk, dv    while a hop starts, (2 A + 4 E) N bytes: the part of the own keys, the sum, and the sent and received
              tensors of this hop and of the previous one, which is freed afterwards. If E = A, only 5 A N, because
              the sum itself is sent. If E < A, an addition can take more: (3.5 A + 2 E) N for equal widths. These are
              the part of the own keys, the part of this step, the new sum and received dk or dv after its cast, and
              both tensors of the hop. With h query heads, backward="head_parallel" adds A N h / g (`backward.py`)

A hop of K and V is in flight during the step that starts it. A hop of dk and dv starts at the end of a step and is in
flight during the next step, if there is one. Whether hops overlap with the computation depends on the backend; gloo
needs CPU cores of its own for this.
Limits: keys make all W - 1 hops, even to ranks without a query that sees them. Only empty shards are not sent.
All ranks start hops in the same order, and messages between two ranks arrive in the order sent. So keys and gradients
are not mixed up.

This file exceeds the usual limit of 200 lines, so that the proof, the costs and the code stay on one page.

Sources: Liu, Zaharia, Abbeel, Ring Attention (2023); zigzag: Zilin Zhu, ring-flash-attention issue 2 (2024), and
mlc-ai/Pith-Train pull request 39; striped: Brandon et al., Striped Attention (2023).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.local import merge, tiled_forward
from canon.reference.sinks import under_sink
from canon.runtime.autograd import differentiable
from canon.runtime.call import Call, agreed_call
from canon.runtime.checks import accumulate_dtype, check_sink, kind_of_sink, under_autocast
from canon.runtime.group import Group
from canon.runtime.operators import call_operator, is_traced
from canon.runtime.passes import LAYOUTS, Passes, makes_passes

__all__ = ["ring_attention", "striped_attention", "zigzag_attention"]


def ring_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    layout: Layout | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return attention of this rank's queries over the keys of all ranks. All ranks must call it and its backward.

    Args:
        q, k, v: this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or all three without the batch axis.
        mask: over the whole sequence; None is causal.
        layout: the tokens of each rank; None is contiguous.
        scale: factor of the scores; None is 1 / sqrt(d).
        sink: a logit (h,) of each query head, as in `attention`, equal on all ranks. A rank's gradient of it is the sum
            over its own tokens: add the gradients of all ranks, as for every replicated parameter.
        group: a ProcessGroup or a DeviceMesh of one dimension; None is all ranks. Without torch.distributed this process
            is the only rank.
        reduce_dtype: dtype in which dk and dv are sent; None is float32 (float64 for float64).
        backward: "fused", "split", "head_parallel" or "auto", for every step: see `backward.py`.
        return_lse: also return lse (b, h, t) or (h, t), the natural logarithm of the softmax's denominator without the
            sink, in float32 (float64 for float64). It is differentiable.

    h is a multiple of g. All ranks must pass equal masks, layouts, dtypes, batches, heads, widths, scales, options and
    requires_grad. The sequence is as long as the mask; without a mask, as the layout; without both, W t tokens: then
    all shards must be equally long.

    Raises ValueError or TypeError on every rank, if arguments of a rank do not fit together or differ between ranks.
    Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("ring_attention", q, k, v, mask, layout, sink, return_lse, **options)


def zigzag_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return `ring_attention` over `Layout.zigzag`. Under a causal mask, all ranks have nearly equal work at each step.

    Arguments (except ``layout``) and results are those of `ring_attention`. Raises the same errors. For sources, see the
    module's docstring.
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("zigzag_attention", q, k, v, mask, None, sink, return_lse, **options)


def striped_attention(
    q: Float[Tensor, "*b t h d"],
    k: Float[Tensor, "*b t g d"],
    v: Float[Tensor, "*b t g dv"],
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    group: Group = None,
    reduce_dtype: torch.dtype | None = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Float[Tensor, "*b t h dv"] | tuple[Float[Tensor, "*b t h dv"], Float[Tensor, "*b h t"]]:
    """Return `ring_attention` over `Layout.striped`. A causal mask stays causal at each step; it may lose its diagonal.

    Arguments (except ``layout``) and results are those of `ring_attention`. Raises the same errors. For sources, see the
    module's docstring.
    """
    options = dict(scale=scale, group=group, reduce_dtype=reduce_dtype, backward=backward)
    return _ring("striped_attention", q, k, v, mask, None, sink, return_lse, **options)


@under_autocast("q", "k", "v")
def _ring(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None,
    layout: Layout | None, sink: Tensor | None, return_lse: bool, **options,
):  # fmt: skip
    """Return out, or out and lse. Under autocast, cast q, k, v."""
    if is_traced():
        check_sink(q, sink)
        # under torch.compile or a dispatch mode: the operator finds `_passes` by the name of the function
        out, lse = call_operator("reference", function, q, k, v, mask, layout, **options)
    else:
        passes = _passes(function, q, k, v, mask, layout, sink=kind_of_sink(sink), **options)
        # `_passes` has compared its shape and dtype between ranks: a wrong sink raises on all of them.
        check_sink(q, sink)
        out, lse = differentiable(q, k, v, passes.forward, passes.backward, call=passes.call, return_lse=True)
    return under_sink(out, lse, sink, return_lse)


@makes_passes("reference", "ring_attention", "zigzag_attention", "striped_attention")
def _passes(
    function: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout | None, *, sink=None, **options
) -> Passes:
    """Return both passes, after a comparison of the call between all ranks."""
    call = agreed_call(function, q, k, v, mask, LAYOUTS.get(function, layout), **options, sink=sink)

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
    own_part: list = [None, None]  # dk and dv of this rank's keys from its own queries: set at step 0
    for step in range(call.ranks):
        owner = (call.rank - step) % call.ranks
        hop = Hop(held, step + 1, call) if step + 1 < call.ranks else None
        dq_part, *part = tiled_backward(
            dout, q, *held, lse, delta, call.local_mask(owner),
            scale=call.scale, method=call.backward, grad_dtype=accumulate, needs_grad=needs_grad,
        )  # fmt: skip
        if dq is not None:
            dq += dq_part
        if gradient_hop:  # brings the sum of ranks owner + 1, ..., rank - 1
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

    The received tensors belong to owner (rank - use_step) mod W. ``use_step``: the step that reads them; W if they are
    read after the last step.
    """

    def __init__(self, tensors: list[Tensor], use_step: int, call: Call):
        tokens = call.layout.size((call.rank - use_step) % call.ranks)
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
