"""Convert milliseconds to TFLOP/s, shares of a roofline, ratios to peers, and two verdicts.

    operations   forward 4 h d area of each sequence, backward 2.5 times that: visible cells alone
    roofline     min(product, copy x intensity), both measured in the same run
    intensity    operations / bytes, with every input read once and every output written once
    to peer      TFLOP/s over that of the fastest peer on this shape in this run

Source: Williams, Waterman, Patterson, Roofline (2009).
"""

import statistics

from canon.bench.shapes import Shape

PASSES = {"forward": 1.0, "backward": 2.5}  # FLOPs, relative to the forward pass
CLOSE = 1.10  # the most that "auto" may take, relative to the fastest method
PARTIAL_COST = 0.08  # the most that partial masks may cost, relative to an equal area of full tiles


def compulsory_bytes(shape: Shape, itemsize: int, name: str) -> float:
    """Return the least bytes that a pass must move."""
    queries = shape.b * shape.n * shape.h
    keys = shape.b * shape.keys * shape.g
    # q and out, k and v; q, out, dout and dq, k, v, dk and dv
    times = {"forward": 2, "backward": 4}[name]
    return times * itemsize * shape.d * (queries + keys) + 4.0 * queries


def roofline(shape: Shape, itemsize: int, name: str, ceilings: dict[str, float]) -> float:
    """Return the TFLOP/s that a pass cannot exceed."""
    intensity = PASSES[name] * shape.operations / compulsory_bytes(shape, itemsize, name)
    return min(ceilings["matmul_tflops"], ceilings["copy_tbs"] * intensity)


def add_speeds(rows: list[dict], shape: Shape, itemsize: int, ceilings: dict[str, float]) -> None:
    """Add _tflops, _roofline and _to_peer of each timed pass to the rows of one shape."""
    for name, factor in PASSES.items():
        best = roofline(shape, itemsize, name, ceilings)
        timed = [row for row in rows if row.get(f"{name}_ms")]
        for row in timed:
            row[f"{name}_tflops"] = (
                factor * shape.operations / statistics.median(row[f"{name}_ms"]) / 1e9
            )
            row[f"{name}_roofline"] = row[f"{name}_tflops"] / best
        peer = max((row[f"{name}_tflops"] for row in timed if not row["canon"]), default=None)
        for row in timed if peer else []:
            row[f"{name}_to_peer"] = row[f"{name}_tflops"] / peer


def auto_verdicts(rows: list[dict]) -> list[dict]:
    """Compare "canon auto" with the fastest method of each shape and pass."""
    verdicts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for name in PASSES:
            timed = [
                row
                for row in rows
                if row["shape"] == shape and row["canon"] and row.get(f"{name}_ms")
            ]
            times = {row["contender"]: statistics.median(row[f"{name}_ms"]) for row in timed}
            times = {contender: x for contender, x in times.items() if "invariant" not in contender}
            auto = times.pop("canon auto", None)
            if auto and times:
                best = min(times, key=lambda contender: times[contender])
                verdict = {
                    "shape": shape,
                    "pass": name,
                    "best": best,
                    "auto_to_best": auto / times[best],
                }
                verdicts.append(verdict | {"within": auto <= CLOSE * times[best]})
    return verdicts


def partial_costs(partial: list[dict], full: list[dict]) -> list[dict]:
    """Return full TFLOP/s over partial TFLOP/s - 1, for each contender and pass."""
    costs = []
    others = {row["contender"]: row for row in full}
    for row in partial:
        other = others.get(row["contender"], {})
        for name in PASSES:
            key = f"{name}_tflops"
            if key in row and key in other:
                cost = other[key] / row[key] - 1
                told = {
                    "contender": row["contender"],
                    "partial": row["shape"],
                    "full": other["shape"],
                    "pass": name,
                }
                costs.append(told | {"cost": cost, "within": cost <= PARTIAL_COST})
    return costs
