"""A fixed order for the additions to dq: tickets, the order of work tiles that keeps waits short, and when it pays.

In the fused backward a CTA owns a tile of keys and visits tiles of queries, in *spans* of adjacent tiles. Many work tiles
add to one *tile of dq*: dq of the queries of a visited tile, for one head. Sums in float32 depend on the order of additions.
So each span gets a **ticket**, and each tile of dq has a **semaphore** in global memory that starts at 0. The *predecessor* is
the previous span in the tile schedule that visits this tile. A CTA adds only when the semaphore holds the predecessor's
ticket, or 0 if there is none. After its addition is complete it writes the span's own ticket there. Only the successor waits
for this ticket. So the semaphore holds it until the successor has added, and the successor cannot miss it.

    tile schedule           work tile A    work tile B    work tile C
    own ticket              1              2              3
    tiles of dq visited     0 1 2 3            2 3          1 2 3
    predecessor's ticket    0 0 0 0            1 1          1 2 2

**Same bits.** The predecessors follow from the tile schedule alone: from the mask and the shapes, not from timing or the
number of SMs. So each tile of dq is a sum in a fixed order. Only the choice by method="auto" (`canon.fast.backward`) depends
on the number of SMs: another GPU may run "split" or "head_parallel" instead.

**No deadlock.** CTAs claim work tiles from an atomic counter, in the order of the tile schedule, and process their own
ones in that order. Take the first unfinished work tile. All earlier ones are finished. Claims follow the schedule, so
a running CTA has claimed it, or the next CTA to become idle will. Each predecessor of its spans is in an earlier work
tile, or earlier in the same one. So every semaphore that the CTA waits for will hold the predecessor's ticket, and the
work tile finishes. By induction, all do. The forward kernel gives CTA i work tile i without a claim (`tile_queue`).
With ordered dq, a running CTA could then wait for one that the GPU has not started. So here even the first work tiles
are claimed.

**Memory order** is explained in `canon.fast.kernels.gluon.dq_adder`.

Tickets are numbered by span, along the tile schedule. If the tiles of a span have different predecessors, the span is cut
where the predecessor changes (C above, into two). Its pieces keep one own ticket. One table of tickets serves all key
heads, because each query head has its own semaphores. The schedule lists the spans of a work tile, with the same
tickets, once for each query head of the owner. NumPy builds it in O(spans sqrt(tiles of dq of a head)) operations
(`_next_covering_interval`). `launch.queue` zeroes the semaphores, and `canon.fast.backward` zeroes dq. Heads wider
than 128 have no fused kernel, so no ordered dq.

Source: the semaphores of FlashAttention-3's deterministic backward (Shah et al., 2024, its code). Measurements:
paper/deterministic_dq.md.
"""

from operator import itemgetter

import numpy as np

from canon.fast.kernels.tile_costs import TileCosts, tile_costs
from canon.fast.kernels.work_tables import counted, visits
from canon.masks.mask import Mask
from canon.masks.plan_cache import cached_plan

SMS = 132  # of an H200. A constant, so that other GPUs get the same order and the same bits.
L2_BYTES = 32 << 20  # for the tensors that heads in flight read. The L2 cache of an H200 holds 50 MB.

# Number of heads in flight where work tiles come longest first (`heads_in_flight`). Each CTA must stay behind the CTA
# before it, so waits grow with the number of CTAs of one head: more than about CTAS_PER_HEAD gained nothing. More
# heads in flight shorten the waits. But the CTAs of a head share reads of queries through L2 only while they stay
# close together. We assume that the distance from the first to the last grows in proportion to the number of additions
# to one tile of dq. So the product of additions and heads in flight measures what L2 must hold. It is at most
# MAX_ADDITIONS. Heads that read at most 4 L2_BYTES together are exempt. Both constants are fitted to times of zigzag
# shards (paper/data/lists_side_by_side_h200.json).
CTAS_PER_HEAD = 6
MAX_ADDITIONS = 1100

# Alternating order (`alternation`). An SM runs one CTA. With n key heads in flight, w = SMS / n CTAs work on one of them. The
# unit of time is a visit: the computation of one tile. If each CTA starts 1.5 visits after the one before, their waits
# sum to 1.5 (0 + 1 + ... + w - 1) visits, about WAITING w^2. A key head costs repeat * visits: ``visits`` for each of
# its ``repeat`` query heads. So waits take the share WAITING w^2 / (repeat * visits) of the time. L2 misses take the
# share DRIFTING (n bytes)^2 / queries: the query heads of a key head read ``bytes``. The form of this term is
# empirical. DRIFTING (in queries / byte^2) has one value for key heads of one query head, and one for key heads of
# several. All three constants are fitted to times with 1 to 32 heads in flight (paper/data/pairs_h200.json). The n
# with the smallest sum of both shares is taken.
WAITING = 0.75
DRIFTING = 0.9e-14, 2.3e-14
UNEVEN = 1.2  # alternate if the longest work tile costs more than this times the mean

# When the fused kernel with ordered dq pays (`ordered_dq_pays`). It makes five MMAs a tile, and "split" seven. In alternating
# order, waits and misses must cost less than the share MAX_SHARE. A tile of keys must also visit more than
# MIN_VISITS_ALTERNATING[padded width] tiles of queries (128 x 128) on average. In the other order it must visit more
# than MIN_VISITS[padded width]. There the model is: each CTA of a head starts LAG visits after the one before. LAG
# times the CTAs of a head must be under a tenth of the work of an SM. LAG is a fit of its own, not the 1.5 above. The
# constants are fitted to paper/data/kernels_sweep_widths_h200.json and pairs_h200.json.
MAX_SHARE = 0.08
MIN_VISITS_ALTERNATING = {64: 8, 128: 12}
MIN_VISITS = {64: 8, 128: 24}
LAG = 2.5


# ------------------------------------------------------------------ heads in flight, and the order of work tiles
def heads_in_flight(groups: int, bytes_per_group: int, additions: float | None = None) -> int:
    """Return how many groups of heads are in flight together: as many as fit the L2 cache, or more if dq is ordered.

    A group is a key head, or the query heads that share one. ``additions``: the mean number of additions to one tile
    of dq, if they are ordered. More groups in flight then shorten the waits, up to as many as occupy all SMs. Either
    of two limits suffices: the CTAs of a head stay together (`MAX_ADDITIONS`), or the groups read at most four times
    `L2_BYTES`.
    """
    choices = divisors(groups)
    largest = lambda each, room: max(n for n in choices if n == 1 or n * each <= room)
    fitting = largest(bytes_per_group, L2_BYTES)
    if additions is None:
        return fitting
    enough = next((n for n in choices if n * CTAS_PER_HEAD >= SMS), choices[-1])
    close = max(largest(additions, MAX_ADDITIONS), largest(bytes_per_group, 4 * L2_BYTES))
    return max(fitting, min(enough, close))


def alternation(
    costs: TileCosts, rows: int, columns: int, repeat: int, groups: int, bytes_per_group: int, queries: int
) -> tuple[int, float] | None:
    """Return how many groups of heads are in flight, and the cost of waits and misses (share of the time); or None.

    None means that short and long work tiles should not alternate, for one of these reasons: there are none; fewer
    than a quarter of a head's work tiles add to one tile of dq; all are about equally long; or repeat * rows < 2 * columns, so
    that under a causal mask adjacent tiles of keys differ by fewer than two visits.
    ``repeat``: query heads per key head; ``bytes_per_group``: of q and dout of a group, which have ``queries`` tokens.
    """
    cost = costs.cost[costs.active]
    if not len(cost) or 4 * mean_additions(costs.spans, columns) < len(cost) or cost.max() <= UNEVEN * cost.mean():
        return None
    if repeat * rows < 2 * columns:
        return None
    waiting = WAITING * SMS**2 / (repeat * int(costs.spans[:, 1].sum()))
    drifting = DRIFTING[repeat > 1] * bytes_per_group**2 / queries
    return min(((n, waiting / n**2 + drifting * n**2) for n in divisors(groups)), key=itemgetter(1))


def alternate(order: np.ndarray, together: int) -> np.ndarray:
    """Return ``order`` (longest first) with sets of short and of long work tiles alternating.

    A set has SMS / together work tiles: one for each CTA of a group in flight. The first set has the shortest work
    tiles, shortest first. The second has the longest ones, longest first. The sets continue so, with the tiles that are left.

    Under a causal mask, all work tiles end at the last query, and short ones start at later queries. A short one that starts
    together with a longer predecessor waits until the predecessor reaches the short one's first query. So in
    longest-first order, work tiles that start together all end when the longest of them ends. In alternating order,
    short ones end one after another, so the long ones after them start staggered, and wait little.
    """
    number = max(1, round(SMS / together))
    which, place = np.divmod(np.arange(len(order)), number)
    place += which // 2 * number  # among the long ones, or the short ones
    return order[np.where(which % 2 == 0, len(order) - 1 - place, place)]


def mean_additions(spans: np.ndarray, columns: int) -> float:
    """Return how many work tiles add to one tile of dq, on average."""
    last = int((spans[:, 0] + columns * spans[:, 1]).max(initial=columns))
    return columns * float(spans[:, 1].sum()) / last


def divisors(groups: int) -> list[int]:
    """Return the divisors of ``groups``, ascending; [1] for 0."""
    return [n for n in range(1, groups + 1) if groups % n == 0] or [1]


@cached_plan
def ordered_dq_pays(
    mask: Mask, query_heads: int, key_heads: int, sms: int, width: int, rows: int, columns: int
) -> bool:
    """Return whether the fused backward with ordered dq is faster than "split". Heads are counted over the batch.

    ``width``: of the padded heads; ``rows`` and ``columns``: of the fused kernel's tiles.
    """
    visited, tiles = visits(mask, 128, 128, True, 128)
    if visited <= min(MIN_VISITS_ALTERNATING[width], MIN_VISITS[width]) * tiles:
        return False
    each = query_heads // key_heads
    # With more keys than queries, many keys probably belong to other ranks. "split" sends their dk and dv while its dq
    # kernel runs, which "fused" cannot. So only the stricter test below counts then.
    if mask.keys <= mask.queries:
        costs, bytes_per_head = tile_costs(mask, rows, columns, True, each, columns), 4 * width * each * mask.queries
        if found := alternation(costs, rows, columns, each, key_heads, bytes_per_head, mask.queries):
            return visited > MIN_VISITS_ALTERNATING[width] * tiles and found[1] < MAX_SHARE
    lag = LAG * min(tiles, sms / key_heads)  # of the last CTA of a head, in tiles
    return visited > MIN_VISITS[width] * tiles and visited * query_heads / sms > 10 * lag


# ------------------------------------------------------------------ tickets
def cut_by_tickets(
    spans: np.ndarray, begin: np.ndarray, end: np.ndarray, order: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut spans where the predecessor changes. Return the cut spans, begin and end for each work tile, and the tickets.

    ``spans[begin[i]:end[i]]`` are those of tile i, and ``order`` is the order of the tiles of one head in the tile
    schedule, the same for all heads. Tickets are (predecessor's, own) for each cut span. Spans are numbered 1, 2, ... along
    the schedule before the cut. 0 means no predecessor.

    Consider the boundary of two tiles of dq. A span that starts or ends there visits only one of the two. The two
    tiles then have different last spans. The next span that covers both has two predecessors, so it is cut there.
    """
    number = (end - begin)[order]
    work_tile, place = counted(number)
    along = spans[begin[order][work_tile] + place]
    first = along[:, 0] // columns
    stop = first + along[:, 1]
    n, width = len(along), int(stop.max(initial=0)) + 1
    boundary, after = np.concatenate([first, stop]), np.tile(np.arange(1, n + 1), 2)
    cut = _next_covering_interval(first + 1, stop, boundary, after)
    pieces = np.concatenate([np.arange(n) * width + first, (cut * width + boundary)[cut < n]])
    span, column = np.divmod(np.unique(pieces), width)
    previous = n - _next_covering_interval(first[::-1], stop[::-1], column, n - span)
    tickets = np.stack([previous, span + 1], 1)
    cut_spans = along[span]
    is_last = np.append(span[1:] != span[:-1], True)[: len(span)]
    cut_spans[:, 0] = columns * column
    cut_spans[:, 1] = np.where(is_last, stop[span], np.append(column[1:], 0)[: len(span)]) - column
    ends = np.cumsum(np.bincount(work_tile[span], minlength=len(order)))
    new_begin, new_end = np.zeros_like(begin), np.zeros_like(end)
    new_begin[order], new_end[order] = np.append(0, ends)[: len(order)], ends
    return cut_spans, new_begin, new_end, tickets


def _next_covering_interval(begin: np.ndarray, end: np.ndarray, point: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return, for each point, the first interval i >= ``after`` with begin[i] <= point < end[i]; len(begin) if none.

    Intervals are grouped into blocks. For each block and point, a table has the first block, from this one on, with an
    interval that holds the point. So only two blocks are searched for each point: that of ``after``, and that of the
    table.
    """
    n, width = len(begin), int(end.max(initial=0)) + 1
    size = 1 << max(4, (width // 3).bit_length() // 2)
    blocks = n // size + 1  # with room for after = n
    begin, end = (
        np.append(x, np.zeros(blocks * size - n)).astype(np.int32).reshape(blocks, size) for x in (begin, end)
    )
    following = np.zeros((blocks + 1, width), np.int32)  # +1 where an interval begins, -1 where it ends
    block = np.arange(blocks)[:, None]
    np.add.at(following, (block, begin), 1)
    np.add.at(following, (block, end), -1)
    np.cumsum(following, 1, out=following)  # how many intervals of a block hold a point
    following[:] = np.where(following > 0, np.arange(blocks + 1, dtype=np.int32)[:, None], np.int32(blocks))
    for i in reversed(range(blocks)):  # the block itself if it holds the point, else the answer of the next block
        np.minimum(following[i], following[i + 1], out=following[i])
    point, after = point.astype(np.int32), after.astype(np.int32)
    number = np.arange(size, dtype=np.int32)

    def search(some: np.ndarray, block: np.ndarray) -> np.ndarray:
        at = point[some, None]
        hit = begin[block] <= at
        hit &= at < end[block]
        hit &= number >= (after[some] - size * block)[:, None]
        place = hit.argmax(1)
        return np.where(hit[np.arange(len(some)), place], size * block + place, n)

    found = search(np.arange(len(point)), after // size)
    left = np.flatnonzero(found == n)
    later = following[after[left] // size + 1, point[left]]
    left, later = left[later < blocks], later[later < blocks]
    found[left] = search(left, later)
    return found
