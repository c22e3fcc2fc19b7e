"""A fixed order for the additions to dq: tickets, an order of work tiles that keeps waits short,
and when it pays.

In the fused backward many work tiles (of keys) add to one *tile of dq*: dq of the queries of a
visited tile, for one head. Each span has a **ticket**, each tile of dq a **semaphore**, at first 0.
A CTA adds once the semaphore holds the ticket of the *predecessor*, the previous span in the tile
schedule that visits this tile (0 if none). Then it writes its own.

    tile schedule           work tile A    work tile B    work tile C
    own ticket              1              2              3
    tiles of dq visited     0 1 2 3            2 3          1 2 3
    predecessor's ticket    0 0 0 0            1 1          1 2 2

**Same bits.** Predecessors follow from the mask and the shapes alone. A span whose tiles have
different predecessors is cut (C above); its pieces keep one ticket.

**No deadlock.** CTAs claim all work tiles in the order of the schedule. So the first unfinished one
is running or claimed next, and its predecessors are finished, or earlier in itself.

Source: FlashAttention-3's deterministic backward (Shah et al., 2024). What the order costs:
paper/backward_on_hopper.md."""

from heapq import heapreplace
from operator import itemgetter

import numpy as np

from canon.fast.tables.cells import Cells
from canon.fast.tables.index_ranges import counted
from canon.fast.tables.tile_costs import L2_BYTES, divisors, largest_divisor, tile_costs
from canon.fast.tables.work_tables import visits
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_part, cached_plan

SMS = 132  # of an H200; constant, so that the order and the bits are the same on all GPUs

# CTAs of one head wait for one another; heads share few reads of L2. So additions to a tile of dq x
# heads are at most MAX_ADDITIONS, unless heads read at most 4 L2_BYTES:
# paper/data/lists_side_by_side_h200.json.
CTAS_PER_HEAD = 6
MAX_ADDITIONS = 1100

# Costs of the alternating order, in visits: with n key heads in flight, w = SMS / n CTAs work on
# one, and wait WAITING w^2. L2 misses take DRIFTING (n bytes)^2 / queries, for key heads of one
# query head, or several. Fitted: paper/data/pairs_h200.json.
WAITING = 0.75
DRIFTING = 0.9e-14, 2.3e-14
UNEVEN = 1.2  # alternate if the longest work tile costs more than this times the mean

# `ordered_dq_pays`, by padded width; LAG: visits for each CTA of a head. Fitted:
# paper/data/kernels_peers_h200.json; at width 64 kernels_sweep_widths_h200.json, too.
MAX_SHARE = {64: 0.15, 128: 0.12}
MIN_VISITS = {64: 8, 128: 24}
MIN_VISITS_OF_NARROW = 3  # width 64, key heads that several query heads share
# If dk and dv are sent: ordered is faster at 512 visits, not at 128, in
# paper/data/schedules_peers_two_h200.json.
MIN_VISITS_OF_SENT = 256
LAG = 2.5


def heads_in_flight(groups: int, bytes_per_group: int, additions: float | None = None) -> int:
    """Return how many groups of heads (query heads of a key head) are in flight: as many as fit the
    L2 cache, or more if dq is ordered, by ``additions`` to a mean tile.
    """
    fitting = largest_divisor(groups, bytes_per_group, L2_BYTES)
    if additions is None:
        return fitting
    enough = next((n for n in divisors(groups) if n * CTAS_PER_HEAD >= SMS), max(1, groups))
    close = max(
        largest_divisor(groups, additions, MAX_ADDITIONS),
        largest_divisor(groups, bytes_per_group, 4 * L2_BYTES),
    )
    return max(fitting, min(enough, close))


@cached_part
def alternation(
    cells: Cells, rows: int, columns: int, repeat: int, groups: int, bytes_per_group: int
) -> tuple[int, float] | None:
    """Return how many groups of heads are in flight, and the cost of the order (share of the time);
    None if few work tiles add to one tile of dq, or all are about equally long.

    ``repeat``: query heads per key head; ``bytes_per_group``: of q and dout."""
    costs = tile_costs(cells, rows, columns, True, repeat, columns)
    cost = costs.cost[costs.active]
    if (
        not len(cost) * groups
        or 4 * mean_additions(costs.spans, columns) < len(cost)
        or cost.max() <= UNEVEN * cost.mean()
    ):
        return None
    if repeat * rows < 2 * columns:
        return None
    waiting = WAITING * SMS**2 / (repeat * int(costs.spans[:, 1].sum()))
    drifting = DRIFTING[repeat > 1] * bytes_per_group**2 / cells.sizes[0]
    best, longest_first = (1, np.inf), np.sort(cost)[::-1]
    for lost, n in sorted((waiting / n**2 + drifting * n**2, n) for n in divisors(groups)):
        if lost >= best[1]:
            break
        lost += idle_end(np.tile(alternate(longest_first, n).repeat(n), groups // n))
        best = min(best, (n, lost), key=itemgetter(1))
    return best


def idle_end(cost: np.ndarray) -> float:
    """Return how long CTAs idle at the end, as a share of the time."""
    free = [0.0] * SMS
    for each in cost.tolist():
        heapreplace(free, free[0] + each)
    return max(free) * SMS / cost.sum() - 1


def alternate(order: np.ndarray, together: int) -> np.ndarray:
    """Return ``order`` (longest first) with sets of SMS / together short and long work tiles
    alternating: the shortest ascending, then the longest descending. This staggers the starts and
    ends of causal work tiles.
    """
    number = max(1, round(SMS / together))
    which, place = np.divmod(np.arange(len(order)), number)
    place += which // 2 * number  # among the long or the short ones
    return order[np.where(which % 2 == 0, len(order) - 1 - place, place)]


def mean_additions(spans: np.ndarray, columns: int) -> float:
    """Return how many work tiles add to a mean tile of dq."""
    last = int((spans[:, 0] + columns * spans[:, 1]).max(initial=columns))
    return columns * float(spans[:, 1].sum()) / last


@cached_plan
def ordered_dq_pays(
    mask: Mask,
    query_heads: int,
    key_heads: int,
    sms: int,
    width: int,
    rows: int,
    columns: int,
    sends: bool,
) -> bool:
    """Return whether fused with ordered dq is faster than "split". Heads count over the batch.

    ``sends``: "split" sends dk and dv to other ranks during its kernel of dq."""
    visited, tiles = visits(Cells(mask), 128, 128, True, 128)
    each = query_heads // key_heads
    least = MIN_VISITS_OF_NARROW if width == 64 and each > 1 else MIN_VISITS[width]
    if mask.keys > mask.queries or (sends and width > 64):
        least = MIN_VISITS_OF_SENT
    if visited <= least * tiles:
        return False
    if mask.keys <= mask.queries:
        bytes_per_head = 4 * width * each * mask.queries
        found = alternation(Cells(mask), rows, columns, each, key_heads, bytes_per_head)
        if found:
            return found[1] < MAX_SHARE[width]
    lag = LAG * min(tiles, sms / key_heads)  # of the last CTA of a head, in tiles
    return visited * query_heads / sms > 10 * lag


def cut_by_tickets(
    spans: np.ndarray, begin: np.ndarray, end: np.ndarray, order: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut spans where the predecessor changes. Return them, begin and end for each tile, and the
    tickets (predecessor's, own). ``order``: one head's tiles.
    """
    work_tile, place = counted((end - begin)[order])
    along = spans[begin[order][work_tile] + place]
    first, stop = along[:, 0] // columns, along[:, 0] // columns + along[:, 1]
    holds = np.zeros(stop.max(initial=0), np.int64)  # the ticket that each tile of dq holds
    pieces = []  # span, first tile of dq, predecessor's ticket
    for i, (start, end_) in enumerate(zip(first.tolist(), stop.tolist(), strict=True)):
        held = holds[start:end_]
        pieces.append((i, start, held.item(0)))
        for at in (held[1:] != held[:-1]).nonzero()[0].tolist():
            pieces.append((i, start + at + 1, held.item(at + 1)))
        held.fill(i + 1)
    span, column, previous = np.array(pieces, np.int64).reshape(-1, 3).T
    made, last = along[span], np.append(span[1:] != span[:-1], True)[: len(span)]
    made[:, 0] = columns * column
    made[:, 1] = np.where(last, stop[span], np.append(column[1:], 0)[: len(span)]) - column
    ends = np.cumsum(np.bincount(work_tile[span], minlength=len(order)))
    new_begin, new_end = np.zeros_like(begin), np.zeros_like(end)
    new_begin[order], new_end[order] = np.append(0, ends)[: len(order)], ends
    return made, new_begin, new_end, np.stack([previous, span + 1], 1)
