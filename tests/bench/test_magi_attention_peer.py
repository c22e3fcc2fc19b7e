"""MagiAttention beside Canon's schedules: it is judged before it is timed, on packed documents.

A stub with the functions of `magi_attention.api` computes by the reference.
"""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from benching import no_clock_of_schedules, on_cpu  # noqa: F401 (a fixture)

from canon import Layout, Mask, reference
from canon.bench import peers, schedule_peers, schedules, shapes
from canon.bench.on_ranks import OnRanks
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
    measure = functools.partial(schedules.measure, peers=True)
    return process_groups.threads(OnRanks(measure, (SHAPE,), on_cpu("", 1)), 2)[0]


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


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        (lambda x: torch.cat([x, x[-1:]]), "66 tokens of a sequence of 64, 64 of them distinct"),
        (lambda x: x[1:], "62 tokens of a sequence of 64, 62 of them distinct"),
    ],
    ids=["padding", "lost tokens"],
)
def test_magi_attention_must_hold_each_token_once(positions, found, monkeypatch):
    magi_stub(monkeypatch, positions=positions)
    with pytest.raises(RuntimeError, match=found):
        peer_rows()


def test_magi_attention_is_for_packed_documents_where_it_is_installed(monkeypatch):
    names = lambda text, ranks=2: [
        each.name for each in schedule_peers.peer_schedules(shapes.shape_of(text), ranks, on_cpu())
    ]
    assert names("1,64,2,2,16,documents:20") == []
    assert schedules.fields(on_cpu())["peers"]["MagiAttention"].startswith(
        "not installed (No module named"
    )
    magi_stub(monkeypatch)
    assert names("1,64,2,2,16,documents:20") == ["MagiAttention"]
    assert names("1,64,2,2,16,documents:20", 1) == names("2,64,2,2,16,documents:20") == []
    assert names("1,64,2,2,16,full") == []
    assert schedules.fields(on_cpu())["peers"]["MagiAttention"] == "unknown version"
