"""Owner computes, with overlap: the passes of ``rank_invariant=True`` on several ranks.

Read `canon.reference.owner_computes` first. A work table of the whole mask (`cells.py`) fixes tiles
and order, so kernels read received tokens where they lie. Alternate steps compute dq, then dk and
dv:

    stream     step 2 i                     step 2 i + 1
    messages   q, dout, lse, delta of i     K, V of i + 1
    compute    dq of i                      dk, dv of i

The contract: `canon.route.rank_invariance`. Odd strides or addresses are copied first; "auto" is
"split".

Cost: bytes as in the reference, plus up to 127 rows without tokens in a message. Memory: the
gathered tokens of two steps, one of them with h / g times the heads.

Sources: as `canon.reference.owner_computes`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from canon.fast.backward import (
    QueryInputs,
    backward_into,
    empty_gradients,
    make_delta,
    rank_invariant_method,
)
from canon.fast.local import empty_result, forward_into
from canon.fast.schedule import receiving
from canon.fast.tables.cells import Cells, Places, aligned, canonical
from canon.fast.transport.messages import Pending
from canon.route.algorithm import Gradients, NeedsGrad
from canon.route.call import Call

Messages = Sequence[tuple[Tensor, ...]]  # the tensors (b, t, heads, width) of each message


class Leg(NamedTuple):
    """A step of a pass: the key ``heads``, and the messages that bring tokens of queries or of
    keys.
    """

    heads: range
    of_queries: bool
    messages: Messages


@runtime_checkable
class Exchange(Protocol):
    """Bring the tokens of other ranks into buffers, for one kind of call."""

    key_places: Places  # own queries x the buffer of keys
    query_places: Places  # the buffer of queries x own keys

    def fetches(self, legs: Sequence[Leg]) -> Callable[[int], Pending]:
        """Return the function that starts the messages of a leg, by its number."""
        ...


def owner_forward(
    call: Call,
    steps: Sequence[range],
    exchange: Exchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = map(aligned, (q, k, v))
    out, lse = empty_result(q, v, q.dtype)
    legs = [_key_leg(heads, k, v) for heads in steps]
    cells = Cells(call.mask, exchange.key_places)
    for number, keys in receiving(len(legs), exchange.fetches(legs)):
        own = query_heads(legs[number].heads, q, k)
        results = out[:, :, own], lse[:, own]
        largest = None if max_logits is None else max_logits[own]
        forward_into(q[:, :, own], *keys, cells, call.scale, *results, max_logits=largest)
        keys = None
    return out, lse


def owner_backward(
    call: Call, steps: Sequence[range], exchange: Exchange, needs_grad: NeedsGrad,
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> Gradients:  # fmt: skip
    q, k, v, dout = *map(aligned, (q, k, v)), canonical(dout.to(q.dtype))
    inputs = QueryInputs(dout, q, lse, make_delta(dout, out, lse, dlse))
    key_cells = Cells(call.mask, exchange.key_places)
    query_cells = Cells(call.mask, exchange.query_places)
    options = call.scale, rank_invariant_method(call.backward)
    dq, dk, dv = empty_gradients(q, k, v, q.dtype, needs_grad)
    legs: list[Leg] = []
    for heads in steps:
        if dq is not None:
            legs.append(_key_leg(heads, k, v))
        if dk is not None:
            some = inputs.heads(query_heads(heads, q, k))
            statistics = tuple(x.transpose(1, 2)[..., None] for x in (some.lse, some.delta))
            legs.append(Leg(heads, True, [(some.q, some.dout), statistics]))

    def compute(number: int, brought: Sequence[Tensor]) -> None:
        heads, of_queries, _ = legs[number]
        here, own = slice(heads.start, heads.stop), query_heads(heads, q, k)
        if of_queries and dk is not None and dv is not None:
            q_full, dout_full, *statistics = brought
            lse_full, delta_full = (x.squeeze(-1).transpose(1, 2) for x in statistics)
            queries = QueryInputs(dout_full, q_full, lse_full, delta_full)
            own_keys, written = (k[:, :, here], v[:, :, here]), (dk[:, :, here], dv[:, :, here])
            backward_into(queries, *own_keys, query_cells, *options, None, *written)
        elif dq is not None:
            written = dq[:, :, own], None, None
            backward_into(inputs.heads(own), *brought, key_cells, *options, *written)

    for number, brought in receiving(len(legs), exchange.fetches(legs)):
        compute(number, brought)
        brought = None
    return dq, dk, dv


def query_heads(heads: range, q: Tensor, k: Tensor) -> slice:
    share = q.shape[2] // k.shape[2]
    return slice(share * heads.start, share * heads.stop)


def _key_leg(heads: range, k: Tensor, v: Tensor) -> Leg:
    k, v = (x[:, :, heads.start : heads.stop] for x in (k, v))
    return Leg(heads, False, [(k, v)])
