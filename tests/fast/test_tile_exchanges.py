"""Owner computes in canon.fast: messages overlap with kernels, casts carry whole tiles, and kept
keys are not sent again.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from invariant_worlds import MASKS, N, inputs
from sharded import shards

from canon import Layout, Mask, fast
from canon.fast import owner_computes
from canon.fast.transport.tile_exchanges import TileCast, TileGather
from canon.testing import process_groups


def backward_events(monkeypatch, function, **options):
    """Return the messages and kernels of rank 0 in one backward pass, in order."""
    events, mask, layout = [], MASKS["causal"], Layout.contiguous(N, 2, 128)

    def noted(owner, name, event):
        """Note ``event``, or the event that it computes from the arguments, at each call of a
        function on rank 0.
        """
        plain = getattr(owner, name)

        def call(*arguments, **options):
            if dist.get_rank() == 0:
                events.append(event if isinstance(event, str) else event(arguments))
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(TileGather, "_fetch", "fetch")
    noted(TileCast, "_fetch", "fetch")
    noted(
        owner_computes,
        "backward_into",
        lambda arguments: "dq" if arguments[-1] is None else "dk, dv",
    )

    def program():
        q, k, v, dout = shards(layout, inputs(mask, "multi-head", torch.float32)[:4])
        q, k = q.requires_grad_(), k.requires_grad_()
        out = getattr(fast, function)(q, k, v, mask, layout, rank_invariant=True, **options)
        if dist.get_rank() == 0:
            events.clear()
        out.backward(dout)

    process_groups.threads(program, 2)
    return events


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        # two key heads, one a step: K, V and dq, then the queries and dk, dv, for each head
        ("strided_attention", {"head_stride": 1}, ["fetch", "dk, dv", "fetch", "dq"]),
        ("magi_attention", {}, []),
    ],
)
def test_the_next_message_is_in_flight_during_each_kernel(function, options, expected, monkeypatch):
    events = backward_events(monkeypatch, function, **options)
    assert events == ["fetch", "fetch", "dq", *expected, "dk, dv"]


@pytest.mark.parametrize("keep", [False, True])
def test_kept_keys_are_not_sent_again(keep, exchanged, monkeypatch):
    backward_events(monkeypatch, "magi_attention", keep_kv=keep)
    keys, queries = 2 * [16 + 16], 2 * [16 + 16, 1 + 1]  # widths of the rows, on two ranks
    assert sorted(x.shape[-1] for _, _, x, *_ in exchanged) == sorted(
        keys + queries + ([] if keep else keys)
    )


def test_casts_carry_whole_tiles_that_are_needed():
    mask = Mask.documents([0, 200, 700])
    layout = Layout([[range(128), range(512, 700)], [range(128, 512)]], 700)
    calls = [
        SimpleNamespace(layout=layout, mask=mask, rank=rank, ranks=2, group=None) for rank in (0, 1)
    ]
    sender, receiver = (TileCast(call).plans for call in calls)
    assert sender[False].receives == [0, 384], (
        "the second document sees tokens 200 to 699: tiles 1, 2 and 3 of the other rank"
    )
    assert receiver[True].receives == [256, 0], "tokens 512 to 699: a whole tile and a short one"
