"""`canon bench links` times all pairs, and refuses messages with wrong bytes."""

import json
import socket

import pytest
import torch.distributed as dist

from canon.__main__ import main
from canon.bench import links
from canon.costs.network import read_links
from canon.testing import process_groups


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(links, "LARGE", 1 << 16)


def test_every_pair_has_a_row_and_knows_its_hosts(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {dist.get_rank() // 2}")
    found = process_groups.threads(lambda: links.measure(2), 3)
    assert found[0] == found[1] == found[2]
    assert [row["ranks"] for row in found[0]] == [(0, 1), (0, 2), (1, 2)]
    assert [row["one_host"] for row in found[0]] == [True, False, False]
    assert len(links.tables(found[0])[0].rows) == 3


def test_a_message_with_wrong_bytes_has_no_figure(monkeypatch):
    monkeypatch.setattr(links, "_exchange", lambda other, sent, received: received.fill_(7))
    with pytest.raises(RuntimeError, match="wrong bytes arrived from rank"):
        process_groups.threads(lambda: links.measure(2), 2)


def test_the_command_writes_a_record_that_the_plan_reads(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "links.json"
    words = ["bench", "links", "--ranks", "2", "--rounds", "2", "--record", str(path)]
    assert main(words) == 0
    (row,) = json.loads(path.read_text())["results"]
    assert read_links(path).gb_s[0] == row["gb_s"]
    assert read_links(path).us[0] == row["us"]
