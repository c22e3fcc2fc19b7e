"""With rank_invariant=True a decoded query has the bits of the whole forward pass, on any number of
ranks.
"""

from functools import partial

import invariant_worlds
import pytest
import sharded
import torch
import torch.distributed as dist
from invariant_worlds import same_bits
from sharded import DEVICE

from canon import Mask
from canon.faces import public_decode
from canon.route.sink_weights import sigmoid
from canon.testing import process_groups

N = 300


def inputs(dtype=torch.float32, b=1):
    tensors = sharded.whole(Mask.full(N), b=b, d=16, dv=20, dtype=dtype)
    return [x.to(DEVICE) for x in tensors[:3]]


decoded = partial(invariant_worlds.decoded, rank_invariant=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_decoded_one_by_one_have_the_bits_of_the_whole_forward(half, dtype):
    q, k, v = inputs(dtype)
    options = dict(
        sink=torch.randn(4, device=DEVICE), softcap=1.0, rank_invariant=True, return_lse=True
    )
    out, lse = half.attention(q, k, v, **options)
    for i in (0, 127, 128, 254, 299):
        keys = (q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1])
        got = half.decode_attention(*keys, **options)
        assert same_bits(got, (out[:, i : i + 1], lse[:, :, i : i + 1])), i


def test_ranks_have_the_bits_of_one_with_a_mask_for_each_sequence_a_pack_and_no_mask(half):
    """Ranks 1 and 3 have no keys. Query 290 sees a window, which begins inside a tile."""
    q, k, v = inputs(b=2)
    q, ends = q[:, 290:294], (256, 256, 300, 300)
    masks = [Mask.window(N, 150, 0).crop(queries=range(290, 294)), Mask.full(4, N)]
    one = half.attention(q, k, v, masks, rank_invariant=True, return_lse=True)
    assert all(same_bits(one, got) for got in decoded(half, ends, q, k, v, masks))
    packed = [x[1] for x in (q, k, v)]
    assert all(same_bits([x[1] for x in one], got) for got in decoded(half, ends, *packed))


def test_keys_that_begin_inside_a_tile_raise_on_every_rank(half):
    q, k, v = inputs()
    messages = []

    def program():
        held = (slice(0, 100), slice(100, N))[dist.get_rank()]
        with pytest.raises(
            ValueError, match="those of rank 1 begin at 100: give every rank but the last"
        ) as error:
            half.decode_attention(q[:, :1], k[:, held], v[:, held], rank_invariant=True)
        messages.append(str(error.value))
        return half.decode_attention(q[:, :1], k[:, :128], v[:, :128], rank_invariant=True)

    process_groups.threads(program, 2)
    assert len(messages) == 2


def test_a_capture_is_refused_on_every_rank(half, monkeypatch):
    q, k, v = inputs()
    monkeypatch.setattr(public_decode, "is_captured", lambda _: dist.get_rank() == 1)

    def program():
        with pytest.raises((RuntimeError, ValueError), match="a CUDA graph cannot be captured"):
            half.decode_attention(q[:, -1:], k, v, rank_invariant=True)
        return half.decode_attention(q[:, -1:], k, v)

    process_groups.threads(program, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weight_under_a_sink_does_not_depend_on_the_number_of_queries(dtype):
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0), dtype=dtype)
    whole = sigmoid(x)
    assert all(torch.equal(whole[i : i + 1], sigmoid(x[i : i + 1])) for i in range(len(x)))
