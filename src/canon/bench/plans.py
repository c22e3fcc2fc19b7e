"""`canon bench plans`: measure balance, volume (`PlanReport`) and processor time of plans."""

import statistics
import time
from itertools import pairwise
from random import Random

import torch

from canon.bench.packs import sampled_packs
from canon.bench.timing import table
from canon.masks.mask import Mask

TOKENS = 8192  # a rank
CHUNK = 1024
MEASURES = "balance", "volume", "worst_receive", "worst_send"
LARGE = 1024, 10_000_000  # ranks, tokens


def measure(counts: list[int] | None, packs: int) -> list[dict]:
    """Return a row for each number of ranks and kind of sequence, and by default a large one."""
    rows = []
    for ranks in counts or [8, 16, 32, 64]:
        tokens = TOKENS * ranks
        even = torch.linspace(0, tokens, 1001, dtype=torch.float64).round().long()
        cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[:999] + 1
        random = [0, *sorted(cuts.tolist()), tokens]
        rows += [
            _row(
                "packs",
                ranks,
                [Mask.documents(ends) for ends in sampled_packs(tokens, packs)],
            ),
            _row("one causal document", ranks, [Mask.causal(tokens)]),
            _row("a window of 1024", ranks, [Mask.window(tokens, 1024, 0)]),
            _row("1000 documents", ranks, [Mask.documents(even)]),
            _row("1000 documents, cut at random", ranks, [Mask.documents(random)]),
            *(
                _row(f"a tree of 2000 nodes, depth {depth}", ranks, [tree(tokens, depth, 2000)])
                for depth in (4, 200)
            ),
        ]
    if not counts:
        ranks, tokens = LARGE
        rows.append(_row("a large pack", ranks, [Mask.documents(sampled_packs(tokens, 1)[0])]))
    return rows


def tree(tokens: int, depth: int, nodes: int) -> Mask:
    """Return a random tree: a chain of ``depth`` nodes, then nodes that follow one of a path."""
    draw, parents, path = Random(depth), [], [-1]
    for node in range(nodes):
        path = path if node < depth else path[: draw.randint(1, min(depth, len(path)))]
        parents.append(path[-1])
        path.append(node)
    cuts = sorted(draw.randint(0, tokens) for _ in range(nodes - 1))
    return Mask.tree(parents, [stop - start for start, stop in pairwise([0, *cuts, tokens])])


def _row(kind: str, ranks: int, masks: list[Mask]) -> dict:
    from canon.fast import magi, planner  # loads Triton: not before it is needed
    from canon.masks.plan_cache import PLANS

    row: dict = {"kind": kind, "ranks": ranks, "tokens": masks[0].queries, "chunk": CHUNK}
    row |= {name: [] for name in (*MEASURES, "ms")}
    for mask in masks:
        PLANS.clear()
        start = time.process_time()
        layout = planner.dispatch(mask, ranks, chunk=CHUNK)
        row["ms"].append(1e3 * (time.process_time() - start))
        report = magi.plan_report(mask, layout, chunk=CHUNK)
        for name in MEASURES:
            row[name].append(getattr(report, name))
    return row


def tables(rows: list[dict]) -> list:
    """Return a table of means over the packs, and of the median time."""
    lines = []
    for row in rows:
        means = [f"{statistics.mean(row[name]):.3f}" for name in MEASURES]
        time = f"{statistics.median(row['ms']):.0f}"
        lines.append((row["kind"], str(row["ranks"]), str(row["tokens"]), *means, time))
    header = ("sequence", "ranks", "tokens", *(name.replace("_", " ") for name in MEASURES), "ms")
    return [table("plans (means)", header, lines)]
