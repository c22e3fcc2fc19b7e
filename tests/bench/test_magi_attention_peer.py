"""MagiAttention beside Canon's schedules: it is judged before it is timed, on packed documents.

A stub with the functions of `magi_attention.api` computes by the reference.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from benching import no_clock_of_schedules, on_cpu  # noqa: F401 (a fixture)

from canon import Layout, Mask, reference
from canon.bench import peers, schedule_peers, schedules, shapes
from canon.testing import process_groups

SHAPE = shapes.shape_of("1,64,2,2,16,documents:20")


class Planned:
    """The key of a stub of `magi_attention.api`: chunks of 16 tokens, dealt in turns."""

    def __init__(self, cu_seqlens_q, cu_seqlens_k, cp_group_or_mesh, causal, **sizes):
        assert sizes == {"num_heads_q": 2, "num_heads_kv": 2, "head_dim": 16, "pad_size": 0}
        assert causal
        assert cu_seqlens_q.dtype is torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        ranks, self.rank = dist.get_world_size(cp_group_or_mesh), dist.get_rank()
        self.mask = Mask.documents(cu_seqlens_q)
        tokens, starts = self.mask.queries, range(0, self.mask.queries, 16)
        chunks = [range(start, start + 16) for start in starts]
        self.layout = Layout([chunks[rank::ranks] for rank in range(ranks)], tokens)
        self.positions = self.layout.positions(self.rank)


def magi_stub(monkeypatch, factor=1.0, positions=lambda x: x):
    """Install a package that computes by the reference, with its results times ``factor``."""

    def calc_attn(q, k, v, key):
        out, lse = reference.magi_attention(
            q, k, v, key.mask, key.layout, own_keys_first=True, return_lse=True
        )
        return factor * out, SimpleNamespace(lse=lse.mT)

    module = ModuleType("magi_attention.api")
    module.magi_attn_varlen_key = Planned
    module.get_position_ids = lambda key: positions(key.positions)
    module.calc_attn = calc_attn
    monkeypatch.setitem(sys.modules, "magi_attention", ModuleType("magi_attention"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    peers.peer_module.cache_clear()


@pytest.fixture(autouse=True)
def no_magi():
    peers.peer_module.cache_clear()
    yield
    peers.peer_module.cache_clear()


def peer_rows():
    return process_groups.threads(schedules.OnRanks((SHAPE,), on_cpu("", 1), peers=True), 2)[0]


def test_magi_attention_agrees_before_it_is_timed(monkeypatch):
    magi_stub(monkeypatch)
    (row,) = peer_rows()
    assert row["schedule"] == "MagiAttention"
    assert row["agrees"]
    assert row["peer"]
    assert row["both_ms"] == [1.0]
    magi_stub(monkeypatch, factor=1.001)
    (row,) = peer_rows()
    assert "disagrees" in row["failed"]
    assert "both_ms" not in row


def test_magi_attention_must_hold_each_token_once(monkeypatch):
    magi_stub(monkeypatch, positions=lambda x: torch.cat([x, x[-1:]]))
    with pytest.raises(RuntimeError, match="ValueError"):
        peer_rows()


def test_magi_attention_is_for_packed_documents_where_it_is_installed(monkeypatch):
    def names(text, ranks=2):
        shape = shapes.shape_of(text)
        return [each.name for each in schedule_peers.peer_schedules(shape, ranks, on_cpu())]

    assert names("1,64,2,2,16,documents:20") == []
    magi_stub(monkeypatch)
    assert names("1,64,2,2,16,documents:20") == ["MagiAttention"]
    assert names("1,64,2,2,16,documents:20", 1) == names("2,64,2,2,16,documents:20") == []
    assert names("1,64,2,2,16,full") == []
