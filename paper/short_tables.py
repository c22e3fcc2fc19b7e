"""Compute tables and numbers of `records.md`: few queries, short sequences, trees, equal
bits.
"""

from records import load, median, span, table, tokens

BITS = {"bits_two": "bits_two_h200", "bits_cpu": "bits_cpu", "bits_gluon": "bits_gluon_simulated"}


def few_queries() -> dict[str, str]:
    """Return the table of few queries over many keys."""
    rows = load("few_queries_h200")["results"]
    us = lambda row, name: 1e3 * median(row[name])
    names = "SDPA cudnn", "canon auto", "canon auto, rank invariant"
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = {
            row["contender"]: f"{us(row, 'forward_wall_ms'):.0f} / {us(row, 'forward_ms'):.1f}"
            for row in rows
            if row["shape"] == shape and "forward_ms" in row
        }
        queries, keys = shape.split()[1][1:], tokens(int(shape.split(":")[1]))
        lines.append([f"{queries} and {keys}", *(found[name] for name in names)])
    ways, made = ("parts", "sums travel", "keys travel"), load("decode_two_h200")["results"]
    cell = lambda row: f"{1e3 * median(row['wall_ms']):.0f} / {row['peak_mb']:.0f}"
    decoding = []
    for shape in dict.fromkeys(row["shape"] for row in made if " S1 " in row["shape"]):
        found = {row["schedule"]: cell(row) for row in made if row["shape"] == shape}
        decoding.append([tokens(int(shape.split(":")[1])), *(found[way] for way in ways)])
    return {
        "few": table(
            ("wall / GPU us, queries and keys", "cuDNN", "Canon", "Canon, same bits"),
            lines,
        ),
        "decoding": table(
            (
                "wall us / MB, 1 query, keys",
                "merged parts",
                *(f"same bits, {way}" for way in ways[1:]),
            ),
            decoding,
        ),
    }


def short_rows() -> dict[str, str]:
    """Return the times of other tiles over those of the forward's own, and cuDNN's over these."""
    rows = load("short_rows_h200")["results"]
    others, peers = [], []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        times = {x["contender"]: median(x["forward_ms"]) for x in rows if x["shape"] == shape}
        own = times.pop("canon gluon split")
        peers.append(times.pop("SDPA cudnn") / own)
        others += [time / own for time in times.values()]
    return {"short_tiles": span(others), "short_tiles_cudnn": span(peers)}


def _equal_bits(record: str) -> str:
    """Return "A of N": the cells of `canon check --bits` with equal bits, of those that were
    computed.
    """
    rows = [row["verdict"] for row in load(record)["results"] if row["row"] != "whole call"]
    return (
        f"{rows.count('equal')} of "
        f"{sum(verdict not in ('declined', 'no option') for verdict in rows)}"
    )


def one_h100() -> dict[str, str]:
    """Return the table of trees on one H100, and the equal bits of all records."""
    trees = [row for row in load("trees_h100")["results"] if row.get("both_wall_ms")]
    times = [
        [row["contender"], f"{median(row['both_wall_ms']):.1f}", f"{median(row['both_ms']):.1f}"]
        for row in trees
    ]
    return {
        "trees": table(("both passes", "wall ms", "GPU ms"), times),
        **{key: _equal_bits(record) for key, record in BITS.items()},
    }


PARTS = (few_queries, short_rows, one_h100)
