"""Few queries over keys that ranks divide, with the bits of one rank: sums travel, and no keys.

    rank 0   first maxima |          weights of its keys, O += P V |
    rank 1   first maxima | gather   weights of its keys           | O += P V |
    rank 2   first maxima |          weights of its keys                      | O += P V -> out

Only the sums depend on the order of keys, so all ranks compute the weights of their keys at once,
and each continues the sums of the rank before (`canon.fast.kernels.gluon.few_queries`).

Keys travel instead (`canon.ranks.divided_keys`) where scores would raise a maximum, where scores or
values are not finite, on other backends than "gluon", and with more than 64 queries or 256 rows
(queries x heads) for a key head.

Cost of a rank with s_r keys, n ranks, in float32 numbers:

    messages          n + 1: an all-gather of b t h, and n broadcasts of b t h (dv + 8)
    memory            2.25 bytes for each weight, b t h s_r of them; heads wider than 128: 2.5
    host              waits for the end, to see whether a maximum must rise: no CUDA graph

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), for the sums.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from canon.faces.public_decode import keys_travel
from canon.fast.device import kernels_for
from canon.fast.local import empty_result
from canon.fast.replay.recordings import replayed
from canon.fast.sinks import under_sink
from canon.fast.tables.cells import Cells, in_place
from canon.fast.transport.messages import transport_for
from canon.masks.mask import Mask, Masks
from canon.ranks.divided_keys import check_starts
from canon.route.checks import Scale

UNIT = 64  # float32 numbers: 256 bytes, for wide stores and one kernel variant
Result = tuple[Tensor, Tensor] | None


def in_order(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Result]:
    """Return `decode_in_order` if the kernels for these tensors (b, t, h, d) can do it, else
    `keys_travel`.
    """
    takes = getattr(kernels_for(q, v), "takes_keys_of_ranks", None)
    return decode_in_order if takes is not None and takes(q, k, v) else keys_travel


def decode_in_order(
    q: Tensor, k: Tensor, v: Tensor, mask: Masks, scale: Scale, sink: Tensor | None,
    group: dist.ProcessGroup | None, rank: int, ranks: int,
) -> Result:  # fmt: skip
    """Return out (b, t, h, dv) in the dtype of q, and lse (b, h, t), over the keys of all ranks;
    None, on all ranks, if the keys must travel. A collective.

    ``mask``: of this rank's keys, or one for each sequence. Raises ValueError, on all ranks, as
    `check_starts`.
    """
    (b, t, h, _), dv, kernels = q.shape, v.shape[3], cast(Any, kernels_for(q, v))
    rows = b * h * t
    state = torch.zeros(
        _padded(rows * dv) + _padded(8 * rows) + 2 * UNIT, dtype=torch.float32, device=q.device
    )
    state, counter = state[:-UNIT], state[-UNIT:].view(torch.int32)  # the counter does not travel
    o = state[: rows * dv].view(b, t, h, dv)
    sums = state[_padded(rows * dv) :][: 8 * rows].view(2, b, h, t, 4)
    must_repeat = state[-1:].view(torch.int32)

    each = (
        [(slice(None), mask)]
        if isinstance(mask, Mask)
        else [(slice(i, i + 1), one) for i, one in enumerate(mask)]
    )
    parts = []
    for x, one in each:
        qkv, cells = (q[x], k[x], v[x]), Cells(one, in_place(one))
        parts.append((x, qkv, cells, kernels.weights_of_rank(*qkv, cells)))

    stride = _padded(rows + 1)
    messages = torch.full(
        (ranks, stride), torch.inf, dtype=torch.float32, device=q.device
    )  # infinity: a row sees no key of the rank
    maxima, numbers = messages[:, :rows].unflatten(1, (b, h, t)), messages.view(torch.int32)
    numbers[rank, rows] = k.shape[1]
    for x, qkv, cells, _ in parts:
        replayed(kernels.write_first_maxima, (*qkv, maxima[rank, x]), cells, scale)
    transport_for(group, q.device).all_gather(messages.view(-1)).wait()
    for x, qkv, cells, weights in parts:
        given = *qkv, maxima[0, x], *weights, counter
        replayed(kernels.write_weights, given, cells, scale, ranks, stride)
    for source in range(ranks):
        if source == rank:
            must_repeat |= counter[1:2]
            for x, qkv, cells, weights in parts:
                replayed(kernels.add_values, (*qkv, *weights, o[x], sums[:, x]), cells)
        dist.broadcast(state, group=group, group_src=source)
    out, lse = empty_result(q, v, q.dtype)
    replayed(kernels.write_results, (o, sums, maxima[0], out, lse, must_repeat), ranks, stride)
    must, *sizes = torch.cat([must_repeat, numbers[:, rows]]).tolist()
    check_starts("decode_attention", sizes)
    return None if must else (out if sink is None else under_sink(out, lse, sink), lse)


def _padded(numbers: int) -> int:
    return -(-numbers // UNIT) * UNIT
