"""The predicted bytes of messages are those that a counting process group sees."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshes import mesh

from canon import Layout, Mask, fast
from canon.costs.schedule_costs import plan_of
from canon.costs.traffic import all_gather
from canon.testing import process_groups
from canon.testing.thread_group import ThreadGroup

HEADS, WIDTH = (16, 4), 8
DOCUMENTS = Mask.documents([0, 5, 6, 20, 40])
CAUSAL = Mask.causal(40)
UNEVEN = Layout([[range(20)], [], [range(20, 21)], [range(21, 40)]], 40)


@pytest.fixture
def counted(monkeypatch):
    """Count the bytes of all messages but digests, by (pass, bytes of an element, from, to)."""
    found = Counter()
    methods = {name: getattr(ThreadGroup, name) for name in ("send", "alltoall", "allgather")}

    def counting(name):
        def sent(group, first, second, *rest):
            for to, other in enumerate(group._global_ranks()):
                parts = {"alltoall": second, "allgather": second * group.ranks}.get(name)
                x = parts[to] if parts else first[0]
                if x.nbytes > 16 and (to != group.group_rank if parts else to == second):
                    number = found.get(group.global_rank, 0)
                    found[number, x.element_size(), group.global_rank, other] += x.nbytes
            return methods[name](group, first, second, *rest)

        return sent

    for name in methods:
        monkeypatch.setattr(ThreadGroup, name, counting(name))
    return found


@pytest.mark.parametrize(("function", "mask", "layout", "rows", "options"), [
    ("ring", CAUSAL, Layout.zigzag(40, 4), 4, {}),
    ("ring", CAUSAL, UNEVEN, 4, {}),
    ("strided", CAUSAL, UNEVEN, 4, {}),
    ("strided", CAUSAL, Layout.zigzag(40, 4), 4, {"head_stride": 2}),
    ("magi", DOCUMENTS, fast.dispatch(DOCUMENTS, 4, chunk=3), 4, {}),
    ("magi", CAUSAL, UNEVEN, 4, {"casts": 2, "keep_kv": True}),
    ("ring", CAUSAL, Layout.zigzag(40, 4), 2, {}),
    ("magi", DOCUMENTS, Layout.zigzag(40, 4), 2, {}),
    ("ring", CAUSAL, Layout.zigzag(40, 4), 1, {}),
])  # fmt: skip
def test_bytes_are_those_of_a_counting_group(counted, function, mask, layout, rows, options):
    name, columns = f"{function}_attention", 4 // rows

    def program():
        rank, group = dist.get_rank(), mesh(rows, columns) if columns > 1 else None
        new = lambda heads: torch.ones(1, layout.size(rank), heads, WIDTH, dtype=torch.bfloat16)
        q, k, v = (new(heads).requires_grad_() for heads in (*HEADS, HEADS[1]))
        with fast.backend("torch"):
            out = getattr(fast, name)(q, k, v, mask, layout, group=group, **options)
            counted[rank] = 1
            out.sum().backward()

    process_groups.threads(program)
    items = [(key, nbytes) for key, nbytes in counted.items() if isinstance(key, tuple)]
    hosts = (
        4 if function == "strided" else min(rows, 2)
    )  # the NICs of a host would share an all-gather
    plan = plan_of(name, mask, layout, HEADS, (WIDTH, WIDTH), hosts, columns, **options)
    host = np.arange(4) * hosts // 4
    for number, one in enumerate(plan[1:]):
        for kind, predicted in enumerate(one.messages.sum((0, 1))):
            seen = np.zeros((3, 2, 4))  # bytes by kind of message, received and sent, rank
            for (_, size, x, y), nbytes in ((k, n) for k, n in items if k[0] == number):
                if not kind or host[x] != host[y]:
                    seen[size // 2, [0, 1], [y, x]] += nbytes
            # the ranks of a group cast send other numbers of tokens than they receive
            busy = seen.max(1) if function == "magi" else seen[:, 0]
            assert predicted.tolist() == busy.sum(0)[::columns].tolist()


def test_an_all_gather_enters_each_host_once():
    shards = all_gather(Layout.contiguous(32, 8), np.arange(8) // 4)
    assert [x.tolist() for x in shards[0]] == [[28] * 8, [4] * 8]
    assert [x.tolist() for x in shards[1]] == [[28] * 8, [16] * 8]
