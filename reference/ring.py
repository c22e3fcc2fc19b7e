"""Ring attention: queries stay on their rank, keys and values travel round all ranks.

Each of n ranks holds q, k and v of its own t tokens. At step i, rank r uses K and V of rank r - i,
their owner (modulo n). A *hop* sends them to rank r + 1 and receives the next ones from rank r - 1:

    n = 4    step 0   step 1   step 2   step 3   dk, dv of owner 0, one step behind its keys
    rank 0   K0 V0    K3 V3    K2 V2    K1 V1    adds the received sum to its own part at the end
    rank 1   K1 V1    K0 V0    K3 V3    K2 V2    step 1: sends its part
    rank 2   K2 V2    K1 V1    K0 V0    K3 V3    step 2: adds its part, and sends the sum
    rank 3   K3 V3    K2 V2    K1 V1    K0 V0    step 3: does the same

Forward, each step starts the next hop, computes out and lse over the keys of one owner, and merges
them into the result. Partial results are float32 (float64 for float64). out is rounded once, at the
end. Backward, K and V travel again, because a rank saves only its own. Its part of dk and dv joins
the sum that follows the keys, which is rounded to reduce_dtype before each hop.

Bits: rank r adds by owner, r, r - 1, ..., r + 1, and the sums of owner o are added by rank, o + 1,
o + 2, ..., o. So a repeated call gives the same bits.

Balance: all ranks need equal work in *every* step. `Layout.zigzag` gives it under a causal mask: of
2 n chunks, rank r holds the r-th from both ends. Contiguous shards take about 2 - 1/n times as
long. Proof: notebooks/02_ring_and_zigzag.md.

Cost of a rank for equal shards. K and V have N = b t g (d + dv) elements of e bytes, E in
reduce_dtype, A in partial results:

                       hops    bytes sent, as many received   peak memory, beyond inputs and outputs
    each pass   K, V   n - 1   (n - 1) N e                    3 N e while a hop starts, else 2 N e
    backward  dk, dv   n - 1   (n - 1) N E                    5 A N if E = A; else see the notebook
    out; dq            0       0                              five tensors like out in `merge`;
                                                              three like dq

Limits: keys make all n - 1 hops, even to ranks without a query that sees them. Nothing hides the
last hop of dk and dv. The backend decides about overlap.

Sources: Liu, Zaharia, Abbeel, Ring Attention (2023); zigzag: Zilin Zhu, ring-flash-attention issue
2 (2024), and mlc-ai/Pith-Train pull request 39; striped: Brandon et al., Striped Attention (2023).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces import public_ring
from canon.masks.mask import Mask
from canon.ranks.profiling import named_steps
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.local import REFERENCE, merged, tiled_forward
from canon.route.algorithm import Algorithm, Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.checks import accumulate_dtype

__all__ = ["ring_attention", "striped_attention", "zigzag_attention"]


Read = Callable[[Mask, Tensor, Tensor], Sequence[Tensor]]
Return = Callable[[Tensor, Tensor], Sequence[Tensor]]


def as_held(mask: Mask, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Return the tensors that travel: K and V, or what `latent.py` projects to them."""
    return k, v


def as_computed(dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
    """Return the gradients of the tensors that travel."""
    return dk, dv


def ring_forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_logits: Tensor | None = None,
    read: Read = as_held,
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t)."""
    accumulate = accumulate_dtype(q.dtype)
    b, t, h, _ = q.shape
    out = q.new_zeros(b, t, h, call.value_width, dtype=accumulate)
    lse = q.new_full((b, h, t), -torch.inf, dtype=accumulate)
    held = [k.contiguous(), v.contiguous()]
    for step in named_steps(range(call.ranks)):
        owner = (call.rank - step) % call.ranks  # of the keys that this rank holds now
        hop = Hop(held, owner - 1, call) if step + 1 < call.ranks else None
        mask = call.local_mask(owner)
        k, v = read(mask, *held)
        part = tiled_forward(
            q, k, v, mask, scale=call.scale, out_dtype=accumulate, max_logits=max_logits
        )
        out, lse = merged(out, lse, *part)
        held = hop.wait() if hop else held
    return out.to(q.dtype), lse


def ring_backward(
    call: Call,
    needs_grad: NeedsGrad,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    read: Read = as_held,
    returned: Return = as_computed,
) -> Gradients:
    """Return dq, dk, dv of this rank's tokens in the dtype of q; dq is None if q needs no gradient,
    dk and dv (which then do not travel) if neither k nor v needs one.
    """
    accumulate, keys_need_grad = accumulate_dtype(q.dtype), any(needs_grad[1:])
    needs_grad = (needs_grad[0], keys_need_grad, keys_need_grad)  # dk and dv travel together
    delta = make_delta(dout, out, dlse)
    dq = torch.zeros_like(q, dtype=accumulate) if needs_grad[0] else None
    held, gradient_hop = [k.contiguous(), v.contiguous()], None
    own_part = (None, None)  # dk and dv of this rank's keys from its own queries: set at step 0
    for step in named_steps(range(call.ranks)):
        owner = (call.rank - step) % call.ranks
        hop = Hop(held, owner - 1, call) if step + 1 < call.ranks else None
        mask = call.local_mask(owner)
        dq_part, *part = tiled_backward(
            dout,
            q,
            *read(mask, *held),
            lse,
            delta,
            mask,
            scale=call.scale,
            method=call.backward,
            grad_dtype=accumulate,
            needs_grad=needs_grad,
        )
        if dq is not None:
            dq += dq_part
        if keys_need_grad:
            part = returned(*part)
        if gradient_hop:  # brings the sum of ranks owner + 1, ..., rank - 1
            part = _plus_received(part, gradient_hop)
        if step == 0:
            own_part = part
        elif keys_need_grad:
            gradient_hop = Hop(
                [x.to(call.reduce_dtype).contiguous() for x in part], owner - 1, call
            )
        held = hop.wait() if hop else held
    if gradient_hop:
        own_part = _plus_received(own_part, gradient_hop)
    return tuple(None if x is None else x.to(q.dtype) for x in (dq, *own_part))


def ring_parts(call: Call, backward: bool) -> Iterator[Mask]:
    """Yield the local mask of each step."""
    yield from map(call.local_mask, range(call.ranks))


def _plus_received(part: Sequence[Tensor], hop: "Hop") -> list[Tensor]:
    return [mine + received.to(mine.dtype) for mine, received in zip(part, hop.wait(), strict=True)]


class Hop:
    """A transfer in flight: ``tensors`` to the next rank, the same kind of tensors of ``owner``
    from the previous rank.
    """

    def __init__(self, tensors: Sequence[Tensor], owner: int, call: Call):
        tokens = call.layout.size(owner % call.ranks)
        self.received = [x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
        self.sent = tensors  # keeps the memory while this Hop exists
        following, previous = ((call.rank + offset) % call.ranks for offset in (1, -1))
        operations = [_operation(dist.isend, x, following, call) for x in tensors if x.numel()]
        operations += [
            _operation(dist.irecv, x, previous, call) for x in self.received if x.numel()
        ]
        self.requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        for request in self.requests:
            request.wait()
        return self.received


def _operation(kind: Callable, tensor: Tensor, peer: int, call: Call) -> dist.P2POp:
    group = dist.group.WORLD if call.group is None else call.group
    return dist.P2POp(kind, tensor, dist.get_global_rank(group, peer), call.group)


RING, ZIGZAG, STRIPED = (
    Algorithm(REFERENCE, declared, ring_forward, ring_backward, parts=ring_parts)
    for declared in (public_ring.RING, public_ring.ZIGZAG, public_ring.STRIPED)
)

ring_attention = public_ring.ring_attention(RING)
zigzag_attention = public_ring.zigzag_attention(ZIGZAG)
striped_attention = public_ring.striped_attention(STRIPED)
