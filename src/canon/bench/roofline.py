"""Convert milliseconds to TFLOP/s, shares of a roofline and ratios to peers.

    operations   of visible cells: forward 4 h d area, backward 2.5 times that
    roofline     min(product, copy x intensity)
    intensity    operations / bytes, with inputs read once and outputs written once
    to peer      TFLOP/s over that of the fastest peer

Source: Williams, Waterman, Patterson, Roofline (2009).
"""

import statistics

from canon.bench.shapes import Shape

PASSES = {"forward": 1.0, "backward": 2.5}  # FLOPs, relative to the forward pass


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
