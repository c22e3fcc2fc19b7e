"""`canon bench links` times all pairs, and refuses messages with wrong bytes."""

import socket

import pytest
import torch.distributed as dist

from canon.__main__ import main
from canon.bench import links
from canon.costs.network import ASSUMED, read_links
from canon.testing import process_groups


def test_every_pair_has_a_row_and_wrong_bytes_have_none(monkeypatch):
    monkeypatch.setattr(links, "LARGE", 1 << 16)
    monkeypatch.setattr(socket, "gethostname", lambda: dist.get_rank() // 2)
    found, *others = process_groups.threads(lambda: links.measure(2), 3)
    assert others == [found] * 2
    assert [row["one_host"] for row in found] == [True, False, False]
    monkeypatch.setattr(links, "_exchange", lambda other, sent, received: received.fill_(7))
    with pytest.raises(RuntimeError, match="wrong bytes arrived from rank"):
        process_groups.threads(lambda: links.measure(2), 2)


def test_the_command_writes_a_record_that_the_plan_reads(tmp_path):
    assert main(["bench", "links", "--ranks", "1"]) == 2
    assert main(["bench", "links", "--record", str(tmp_path)]) == 2
    path = tmp_path / "links.json"
    assert main(["bench", "links", "--rounds", "2", "--record", str(path)]) == 0
    links, sources = read_links(path)
    assert links[0, 0] < 300 == ASSUMED[0, 0]
    assert sources == ["measured", "assumed"]
