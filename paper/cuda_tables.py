"""Compute the tables of `records.md` about the kernels in CUDA C++: a policy's shape, its layers,
and causal sequences.
"""

from kernel_tables import clocks, row_of, speed
from records import load, median, table

POLICY = "B2 S1024 Hq8 Hk1 D256 prefix:768"
CONTENDERS = {  # of `canon bench kernels`: the label, and the row that has the forward
    "canon cuda head_parallel": ("Canon, `cuda`", "canon cuda split"),
    "canon triton head_parallel": ("Canon, `triton`", "canon triton split"),
    "canon auto": ("Canon, `gluon`", "canon auto"),
    "SDPA mask": ("SDPA, dense mask", "SDPA mask"),
    "eager": ("eager, bf16", "eager"),
    "eager float32": ("eager, float32", "eager float32"),
}
LAYERS = {
    "canon cuda": "Canon, `cuda`",
    "canon triton": "Canon, `triton`",
    "canon gluon": "Canon, `gluon`",
    "SDPA mask": "SDPA, dense mask",
    "eager": "eager, bf16",
    "eager float32": "eager, float32",
}


def policy() -> dict[str, str]:
    """Return the tables of the policy's shape, and of 18 checkpointed layers of it."""
    record, rows, both = "kernels_cuda_h200", [], {}
    for contender, (label, forward) in CONTENDERS.items():
        row, first = row_of(record, POLICY, contender), row_of(record, POLICY, forward)
        wall = median(row["both_wall_ms"])
        gpu = median(first["forward_ms"]) + median(row["backward_ms"])
        both[contender] = gpu
        ahead = clocks(record, POLICY, forward, "forward")
        rows.append(
            [
                label,
                f"{ahead[0]:.3f} [{ahead[1]:.3f}]",
                f"{wall:.3f} [{gpu:.3f}]",
                f"{row['peak_mb']:.0f}",
            ]
        )
    layers = {row["contender"]: row for row in load("layers_h200")["results"]}
    stacked = [
        [
            label,
            f"{median(row['both_wall_ms']):.1f} [{median(row['both_ms']):.1f}]",
            f"{row['peak_mb']:.0f}",
        ]
        for label, row in ((label, layers[name]) for name, label in LAYERS.items())
    ]
    return {
        "policy": table(("wall ms [GPU ms]", "forward", "both passes", "peak MB"), rows),
        "layers": table(("18 layers, wall ms [GPU ms]", "both passes", "peak MB"), stacked),
    }


def causal() -> dict[str, str]:
    """Return the table of causal sequences of 8,192 tokens, and the ratios to FlashAttention-2 in
    SDPA.
    """
    record, rows, ratios = "kernels_cuda_causal_h200", [], {"forward": [], "backward": []}
    shapes = {
        int(row["shape"].split()[4].replace("D", "")): row["shape"]
        for row in load(record)["results"]
    }
    for width, shape in sorted(shapes.items()):
        cells = []
        for name in ("forward", "backward"):
            found = [
                speed(record, shape, who, name)
                for who in ("canon cuda split", "canon triton split", "SDPA flash")
            ]
            ratios[name].append(f"{found[0] / found[2]:.2f}")
            cells += [f"{each:.0f}" for each in found]
        rows.append([str(width), *cells])
    header = ("head width", "forward: `cuda`", "`triton`", "FlashAttention-2")
    header += ("backward: `cuda`", "`triton`", "FlashAttention-2")
    return {
        "cuda_causal": table(header, rows, left=0),
        "cuda_forward": ", ".join(ratios["forward"]),
        "cuda_backward": ", ".join(ratios["backward"]),
    }


PARTS = (policy, causal)
