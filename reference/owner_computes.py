"""Owner computes: the rank that holds a token computes its whole sums, in an order that no number
of ranks changes.

`strided_attention` and `magi_attention` use these passes with ``rank_invariant=True``:

    pass       owner of     travels                     computed, tile by tile in sequence order
    forward    queries      K, V                        out, lse over all keys
    backward   queries      K, V                        dq over all keys
               keys         q, dout, lse, delta         dk, dv over all queries

A received token is written to its position in the sequence, and each piece of a rank begins at a
multiple of 128 tokens. So every tile has the operands that it has on one rank. Experiment:
notebooks/08_backward.md. `strided.SequenceGather` brings all tokens of some heads,
`magi.SequenceCast` the needed tokens of all heads.

Tiles at the end of a piece are filled up (`tiles.in_whole_tiles`), because equal bits need a matrix
product that depends on its operands alone. The products of PyTorch do on a CPU with one thread, and
on a GPU only for one ``head_stride``.

Cost of a rank for equal shards of t tokens, n ranks, elements of e bytes (E in reduce_dtype):

                                          bytes received
    each pass     K, V                    (n - 1) b t g (d + dv) e, as without the option
    backward      q, dout, lse, delta     (n - 1) b t h ((d + dv) e + 8)
                  without the option      (n - 1) b t g (d + dv) E for dk, dv

FLOPs: those of "split". Memory: both tensors of an exchange for the whole sequence, twice.

Limits: no "fused" backward, because it adds to dq key tile by key tile; no ring, because its dk and
dv travel.

Sources: one owner for each gradient is "split" of `backward.py`, between ranks. The wish for equal
bits: zhuzilin, ring-flash-attention issue 84.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from canon.ranks.profiling import named_steps
from canon.reference.backward import make_delta, tiled_backward
from canon.reference.local import tiled_forward
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.call import Call
from canon.route.rank_invariance import Piece, pieces_of


@runtime_checkable
class InFlight(Protocol):
    """Messages in flight that bring two tensors."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return both tensors (b, s, heads, width), each token at its position in the sequence."""
        ...


# (x, y, heads): start to bring these heads of x and y (b, t, all heads, width).
Fetch = Callable[[Tensor, Tensor, range | slice], InFlight]


def owner_forward(
    call: Call,
    steps: Sequence[range],
    fetch: Fetch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t). ``steps``: the key heads of
    each step.
    """
    outs, lses = [], []
    keys = fetch(k, v, steps[0])
    for heads, next_heads in named_steps(zip(steps, (*steps[1:], None), strict=True)):
        k_full, v_full = keys.wait()
        if next_heads:
            keys = fetch(k, v, next_heads)
        own = query_heads(heads, q, k)
        parts = [
            tiled_forward(
                q[:, rows, own],
                k_full,
                v_full,
                call.mask.crop(queries=tokens),
                scale=call.scale,
                out_dtype=q.dtype,
                whole_tiles=True,
                max_logits=of_heads(max_logits, own),
            )
            for rows, tokens in _own_pieces(call)
        ]
        outs.append(torch.cat([out for out, _ in parts], dim=1))
        lses.append(torch.cat([lse for _, lse in parts], dim=2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


def owner_backward(
    call: Call,
    steps: Sequence[range],
    fetch_keys: Fetch,
    fetch_queries: Fetch,
    needs_grad: NeedsGrad,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Gradients:
    """Return dq, dk, dv as `ring_backward`."""
    delta = make_delta(dout, out, dlse)
    statistics = [x.transpose(1, 2)[..., None] for x in (lse, delta)]  # (b, t, h, 1)

    def fetch(heads: range) -> tuple[list[InFlight], InFlight | None]:
        own = query_heads(heads, q, k)
        queries = (
            [fetch_queries(*pair, own) for pair in ((q, dout), statistics)]
            if any(needs_grad[1:])
            else []
        )
        return queries, fetch_keys(k, v, heads) if needs_grad[0] else None

    dqs, key_grads = [], []
    queries, keys = fetch(steps[0])
    for heads, next_heads in named_steps(zip(steps, (*steps[1:], None), strict=True)):
        queries_full, keys_full = [each.wait() for each in queries], keys.wait() if keys else None
        if next_heads:
            queries, keys = fetch(next_heads)
        own = query_heads(heads, q, k)
        if queries_full:
            own_keys = [x[:, :, heads.start : heads.stop] for x in (k, v)]
            key_grads.append(_key_gradients(call, queries_full, *own_keys))
        if keys_full:
            own_queries = [x[:, :, own] for x in (dout, q)]
            dqs.append(
                _query_gradient(call, *own_queries, *keys_full, *(x[:, own] for x in (lse, delta)))
            )
    dk, dv = (
        (torch.cat(parts, dim=2) for parts in zip(*key_grads, strict=True))
        if key_grads
        else (None, None)
    )
    return torch.cat(dqs, dim=2) if dqs else None, dk, dv


def query_heads(heads: range, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share these key heads."""
    share = q.shape[2] // k.shape[2]
    return slice(share * heads.start, share * heads.stop)


def of_heads(max_logits: Tensor | None, heads: slice) -> Tensor | None:
    """Return the largest scores of these query heads, as a view."""
    return None if max_logits is None else max_logits[heads]


def _query_gradient(
    call: Call, dout: Tensor, q: Tensor, k_full: Tensor, v_full: Tensor, lse: Tensor, delta: Tensor
) -> Tensor:
    parts = [
        tiled_backward(
            dout[:, rows],
            q[:, rows],
            k_full,
            v_full,
            lse[:, :, rows],
            delta[:, :, rows],
            call.mask.crop(queries=tokens),
            scale=call.scale,
            method=call.backward,
            grad_dtype=q.dtype,
            needs_grad=(True, False, False),
            whole_tiles=True,
        )[0]
        for rows, tokens in _own_pieces(call)
    ]
    return torch.cat(parts, dim=1)


def _key_gradients(
    call: Call, queries_full: Sequence[tuple[Tensor, Tensor]], k: Tensor, v: Tensor
) -> list[Tensor]:
    """Return dk and dv over all queries: ``queries_full`` holds q and dout, then lse and delta."""
    (q, dout), (lse, delta) = queries_full
    statistics = [x.squeeze(-1).transpose(1, 2) for x in (lse, delta)]
    parts = [
        tiled_backward(
            dout,
            q,
            k[:, rows],
            v[:, rows],
            *statistics,
            call.mask.crop(keys=tokens),
            scale=call.scale,
            method=call.backward,
            grad_dtype=k.dtype,
            needs_grad=(False, True, True),
            whole_tiles=True,
        )[1:]
        for rows, tokens in _own_pieces(call)
    ]
    return [torch.cat(grads, dim=1) for grads in zip(*parts, strict=True)]


def _own_pieces(call: Call) -> list[tuple[slice, range]]:
    """Return (rows, tokens) of each piece of this rank.
    A rank without tokens has one empty piece.
    """
    pieces: Sequence[Piece] = pieces_of(call.layout, call.rank) or ((0, range(0)),)
    return [(slice(row, row + len(tokens)), tokens) for row, tokens in pieces]
