"""The messages of a schedule, from the plans that the schedule itself follows.

Each function returns (2, ranks): the tokens that a rank receives or sends, whichever are more, and
those through its NIC. ``hosts``: the host of each rank. An all-gather enters a host once, and its
NICs share it, as in NCCL's rings.
"""

import numpy as np

from canon.fast.group_collectives import transfers
from canon.fast.transport.messages import padded_tokens
from canon.masks.layout import Layout
from canon.masks.mask import Mask


def sizes_of(layout: Layout) -> np.ndarray:
    """Return the tokens of each rank."""
    return np.array([layout.size(rank) for rank in range(layout.ranks)])


def hop(layout: Layout, hosts: np.ndarray, number: int) -> np.ndarray:
    """Return a hop of a ring: the block of the rank ``number`` before the receiver."""
    received = np.roll(sizes_of(layout), number)
    return np.array([received, received * (hosts != np.roll(hosts, 1))])


def all_gather(layout: Layout, hosts: np.ndarray) -> list[np.ndarray]:
    """Return an all-gather of padded shards, and the all-to-all of their gradients."""
    others = (hosts[:, None] != hosts).sum(1)
    everyone = np.full(len(hosts), len(hosts) - 1)
    outside = others / (len(hosts) - others), others
    return [padded_tokens(layout) * np.array([everyone, x]) for x in outside]


def group_cast(mask: Mask, layout: Layout, hosts: np.ndarray) -> np.ndarray:
    """Return all casts of a plan, which are also its reductions."""
    rank, source, first, stop, step, _ = transfers(mask, layout)
    moved = -(-(stop - first) // step)
    counts = [
        [np.bincount(end, tokens, layout.ranks) for end in (rank, source)]
        for tokens in (moved, moved * (hosts[rank] != hosts[source]))
    ]
    return np.max(counts, 1)
