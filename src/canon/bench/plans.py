"""`canon bench plans`: measure balance, volume (`PlanReport`) and processor time of plans of
packed documents."""

import statistics
import time

from canon.bench.packs import sampled_packs
from canon.bench.timing import table
from canon.masks.mask import Mask

TOKENS = 8192  # a rank
CHUNK = 1024
MEASURES = "balance", "volume", "worst_receive", "worst_send"
LARGE = 1024, 10_000_000  # ranks, tokens


def measure(counts: list[int] | None, packs: int) -> list[dict]:
    """Return a row for each number of ranks, by default also for a large pack."""
    some = counts or [8, 16, 32, 64]
    rows = [_row("packs", ranks, sampled_packs(TOKENS * ranks, packs)) for ranks in some]
    if not counts:
        ranks, tokens = LARGE
        rows.append(_row("a large pack", ranks, sampled_packs(tokens, 1)))
    return rows


def _row(kind: str, ranks: int, packs: list[list[int]]) -> dict:
    from canon.fast import magi, planner  # loads Triton: not before it is needed
    from canon.masks.plan_cache import PLANS

    row: dict = {"kind": kind, "ranks": ranks, "tokens": packs[0][-1], "chunk": CHUNK}
    row |= {name: [] for name in (*MEASURES, "ms")}
    for mask in map(Mask.documents, packs):
        PLANS.clear()
        start = time.process_time()
        layout = planner.dispatch(mask, ranks, chunk=CHUNK)
        row["ms"].append(1e3 * (time.process_time() - start))
        report = magi.plan_report(mask, layout, chunk=CHUNK)
        for name in MEASURES:
            row[name].append(getattr(report, name))
    return row


def tables(rows: list[dict]) -> list:
    """Return a table of means, and of the median time."""
    lines = []
    for row in rows:
        means = [f"{statistics.mean(row[name]):.3f}" for name in MEASURES]
        time = f"{statistics.median(row['ms']):.0f}"
        lines.append((row["kind"], str(row["ranks"]), str(row["tokens"]), *means, time))
    header = ("sequence", "ranks", "tokens", *(name.replace("_", " ") for name in MEASURES), "ms")
    return [table("plans (means)", header, lines)]
