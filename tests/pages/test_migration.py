"""Claims about `paper/migration.md`: calls of Canon run as printed and equal dense attention; masks
equal FlexAttention's.
"""

import copy
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from folders import PAPER
from sharded import close
from torch.nn.attention.flex_attention import create_mask

import canon
from canon import Band, Layout, Mask, fast, reference
from canon.testing import oracle, process_groups

PAGE = (PAPER / "migration.md").read_text()
BLOCKS = re.findall(r"^```python\n# ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(TRANSFORMERS,) = (code for system, code in BLOCKS if system == "Hugging Face")
CANON = [code for system, code in BLOCKS if system == "Canon"]
TOKENS, ENDS, KEY_ENDS, LEFT, PREFIX = 32, [0, 8, 32], [0, 12, 36], 5, 7
SCALE = 0.3


def whole(tokens):
    """Return q, k and v of all tokens: equal on all ranks, in float64, with 8 query heads, 4 key
    heads and narrower values.
    """
    # ranks are threads: they share torch's own generator
    drawn = torch.Generator().manual_seed(tokens)
    sizes = ((1, tokens, 8, 16), (1, tokens, 4, 16), (1, tokens, 4, 8))
    return [torch.randn(size, dtype=torch.float64, generator=drawn) for size in sizes]


CAUSAL, DOCUMENTS = Mask.causal(TOKENS), Mask.documents(ENDS)
# causal and aligned at the lower right corner
OF_KEYS = Mask([Band(0, 8, 0, 12, -99, 4), Band(8, 32, 12, 36, -99, 4)], TOKENS, KEY_ENDS[-1])
# of each block of Canon, in the order of the page
EXPECTED = [CAUSAL, *[DOCUMENTS] * 2, *[CAUSAL] * 4, *[DOCUMENTS] * 2, OF_KEYS]
EXPECTED += [Mask.window(TOKENS, LEFT, 0)]
SCALED = 4  # the block of Pith-Train has a scale


def names_of_the_page(rank, ranks):
    """Return the names that a block of the page takes from its reader."""

    def project(part):
        assert part.keys() == {"input_ids", "labels", "position_ids", "shift_labels"}
        return [x[:, part["input_ids"][0]] for x in whole(TOKENS)]

    q, k, v = (whole(TOKENS)[0], *whole(KEY_ENDS[-1])[1:])
    ids = torch.arange(TOKENS)[None]
    return dict(
        **dict(attn=reference, Mask=Mask, Layout=Layout, pairwise=pairwise, project=project),
        **dict(group=None, rank=rank, ranks=ranks, tokens=TOKENS, sm_scale=SCALE, left=LEFT),
        **dict(cu_seqlens=ENDS, cu_seqlens_q=ENDS, cu_seqlens_k=KEY_ENDS, prefix_length=PREFIX),
        **dict(q_ranges=[(0, 8), (8, 32)], k_ranges=[(0, 8), (8, 32)], types=["causal", 1]),
        **dict(zip(("whole_q", "whole_k", "whole_v"), whole(TOKENS), strict=True)),
        **dict(packed_q=q[0], packed_k=k[0], packed_v=v[0]),
        batch={"input_ids": ids, "labels": ids},
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", range(len(EXPECTED)))
def test_a_call_of_canon_runs_as_printed_and_equals_dense_attention(place, ranks):
    code = CANON[place]
    mask, scale = EXPECTED[place], SCALE if place == SCALED else None
    q, (k, v) = whole(TOKENS)[0], whole(mask.keys)[1:]
    expected_out, expected_lse, *_ = oracle(q, k, v, torch.zeros_like(q[..., :8]), mask, scale)

    def program():
        rank = dist.get_rank()
        names = names_of_the_page(rank, ranks)
        exec(code, names)
        layout, rank = (
            (names["layout"], rank) if "layout" in names else (Layout.contiguous(TOKENS, 1), 0)
        )
        out, lse = (layout.shard(x, rank, dim) for x, dim in ((expected_out, 1), (expected_lse, 2)))
        packed = names["out"].ndim == 3
        close([names["out"]], [out[0] if packed else out])
        if "lse" in names:
            close([names["lse"]], [lse[0] if packed else lse])
        if "whole" in names:
            close([names["whole"]], [expected_out[0]])

    process_groups.threads(program, ranks)


def test_every_call_of_canon_has_its_result():
    assert len(CANON) == len(EXPECTED)


def test_masks_of_flex_attention_equal_those_of_canon():
    names = names_of_the_page(0, 1)
    names["document"] = torch.tensor([0] * 8 + [1] * 24)
    (flex,) = (code for system, code in BLOCKS if system == "FlexAttention")
    exec(flex, names)
    exec(CANON[-1], names)
    assert len(names["masks"]) == 4
    for name, mask in names["masks"].items():
        cells = create_mask(names[name], None, None, TOKENS, TOKENS, device="cpu")[0, 0]
        assert torch.equal(mask.dense(), cells), name


def test_the_code_for_transformers_runs_as_printed():
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    from tiny_models import tiny, tokens, whole_step

    ids, ends, model = tokens(20), [0, 8, 20], tiny("Llama")
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    _, expected, _ = whole_step(
        tiny("Llama"), {"input_ids": ids, "labels": ids, "position_ids": positions}
    )

    def program():
        mask, rank = Mask.documents(ends), dist.get_rank()
        names = dict(
            canon=canon, model=copy.deepcopy(model), ids=ids, ends=ends, mask=mask, rank=rank
        )
        names["layout"] = fast.dispatch(mask, 2)
        exec(TRANSFORMERS, names)
        torch.testing.assert_close(names["loss"], expected, rtol=1e-5, atol=0)

    process_groups.threads(program, 2)
