"""Masks of batches equal their boolean matrices: packed positions, padding,
and the masks of pi0.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from canon import Mask


@st.composite
def packs(draw):
    """Draw the lengths of packed documents for some sequences of n tokens."""
    n = draw(st.integers(0, 9))
    cuts = draw(st.lists(st.sets(st.integers(1, max(1, n - 1))), max_size=3))
    ends = [sorted({0, *(cut for cut in some if cut < n), n}) for some in cuts]
    return n, [[b - a for a, b in pairwise(e)] for e in ends]


@given(packs())
def test_position_ids_that_restart_at_0_make_the_mask_of_packed_documents(pack):
    n, lengths = pack
    rows = [[i for length in some for i in range(length)] for some in lengths]
    masks = tuple(Mask.documents([0, *accumulate(some)]) for some in lengths)
    ids = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), n)
    assert Mask.from_position_ids(ids) == masks
    assert tuple(map(Mask.from_position_ids, rows)) == masks
    if rows:
        assert Mask.from_position_ids(rows) == masks


@given(st.data(), st.integers(0, 9), st.booleans())
def test_padding_sees_nothing_and_is_not_seen(data, n, causal):
    lengths = data.draw(st.lists(st.integers(0, n), max_size=4))
    masks = Mask.padding(lengths, n, causal)
    for mask, length in zip(masks, lengths, strict=True):
        valid = [place < length for place in range(n)]
        assert mask == Mask.block_causal(
            range(n) if causal else [0] * n, q_valid=valid, k_valid=valid
        )
    assert Mask.padding(torch.tensor(lengths, dtype=torch.int64), n, causal) == masks


@given(st.data(), st.integers(0, 3), st.integers(0, 9))
def test_block_causal_of_a_batch_has_the_cells_of_pi0(data, b, n):
    bits = st.lists(st.lists(st.integers(0, 1), min_size=n, max_size=n), min_size=b, max_size=b)
    att, pad = (torch.tensor(data.draw(bits), dtype=torch.int64).reshape(b, n) for _ in range(2))
    levels, valid = att.cumsum(1), pad.bool()
    masks: Any = Mask.block_causal(levels, q_valid=valid, k_valid=valid)
    cells = (levels[:, None] <= levels[:, :, None]) & valid[:, None] & valid[:, :, None]
    assert [mask.dense().tolist() for mask in masks] == cells.tolist()
