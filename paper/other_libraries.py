"""Compute tables and ratios beside other libraries, losses included: cuDNN and flash-attn-4 on one
GPU, MagiAttention and ring-flash-attn on two.
"""

from collections.abc import Iterable
from statistics import median

from kernel_tables import BESIDE, clocks
from records import load, span

RECORD = "packs_magiattention_two_h200"
CONTENDERS = {  # name on the page: beginning of the names in the record; the fastest counts
    "Canon, magi_attention": "Canon magi",
    "Canon, zigzag ring": "Canon zigzag",
    "MagiAttention, its defaults": "MagiAttention default",
    "MagiAttention, the fastest of its settings": "MagiAttention",
    "ring-flash-attn, the fastest of its settings": "ring-flash-attn",
}
SHAPES = {  # name in the record: name in the paper
    "doc4096": "documents ~4,096",
    "doc1024": "~1,024",
    "doc256": "~256",
    "causal": "causal",
}
ONE_SETTING = ("Canon magi", "Canon zigzag", "MagiAttention default")  # these names alone


def cells() -> list[list[str]]:
    """Return a row for each contender: wall and GPU ms of both passes, by shape."""
    rows = []
    for label, name in CONTENDERS.items():
        times = []
        for shape in SHAPES:
            of = [
                row
                for row in load(RECORD)["results"]
                if (row["what"], row["shape"]) == ("time", shape)
                and (row["name"] == name if name in ONE_SETTING else row["name"].startswith(name))
            ]
            best = min(of, key=lambda row: row["both_wall"], default=None)
            times.append(f"{best['both_wall']:.1f} / {best['both_gpu']:.1f}" if best else "")
        rows.append([label, *times])
    return rows


def new_mask(name: str, shape: str) -> float:
    """Return the ms of planning and of the first call with a new mask."""
    row = next(
        row
        for row in load(RECORD)["results"]
        if (row["what"], row["shape"], row["name"]) == ("newmask", shape, name)
    )
    return median(plan + first for plan, first in zip(row["plan_ms"], row["first_ms"], strict=True))


def others() -> dict[str, str]:
    """Return the ratios of other libraries' times to Canon's."""
    times = {
        (row["name"], row["shape"]): row["both_wall"]
        for row in load(RECORD)["results"]
        if row["what"] == "time"
    }
    over = lambda name, shape, ours: times[name, shape] / times[ours, shape]
    packed = [shape for shape in SHAPES if shape != "causal"]
    magi = [name for name, shape in times if shape == "causal" and name.startswith("MagiAttention")]
    return {
        "magi_over_packs": span(over("MagiAttention default", x, "Canon magi") for x in packed),
        "magi_over_causal": span(over(name, "causal", "Canon magi") for name in magi),
        "ring_over_packs": span(
            min(over(f"ring-flash-attn llama3 {n}", x, "Canon magi") for n in (1, 8))
            for x in packed
        ),
        "ring_over_causal": span([over("ring-flash-attn zigzag", "causal", "Canon magi")]),
        "magi_new_mask": span(
            new_mask("MagiAttention default", x) / new_mask("Canon magi", x) for x in packed
        ),
    }


def fastest_over_canon(
    shape: str, peers: Iterable[str], canon: str = "canon auto"
) -> tuple[float, float]:
    """Return wall time and GPU time of both passes of the fastest peer over Canon's, on one GPU."""
    times = [time for peer in peers if (time := clocks(BESIDE, shape, peer, "both"))[0]]
    ours = clocks(BESIDE, shape, canon, "both")
    return min(wall for wall, _ in times) / ours[0], min(gpu for _, gpu in times) / ours[1]


PARTS = (others,)
