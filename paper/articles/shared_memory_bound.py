"""Compute the tables and numbers of `shared_memory_bound.md` from the records, and draw its figure."""

from collections import Counter

from plots import BLUE, GREEN, ONE, PURPLE, SKY, VERMILION, YELLOW, Drawing, finish, new
from records import cell, load, only, samples, table, tokens

SMS = 132
LANES = 128  # bytes of shared memory in a clock.
RATE = 2048  # multiply-adds of two-byte elements of an SM in a clock.
WARPS = 4  # in a warpgroup. Each executes each instruction of the loop.
PROFILED = {  # name on the page: record, keys or queries owned x visited by a tile, MMAs
    "forward": ("ncu_first_f128", 128, 128, 2),
    "dk, dv": ("ncu_first_k128", 128, 64, 4),
    "dq": ("ncu_first_q128", 128, 128, 3),
    "fused": ("ncu_first_u128", 128, 64, 5),
}
PARTS = ("MMA operands", "TMA", "dq stores", "lse, delta", "dS stores")


def clocks(kernel: str) -> dict[str, float]:
    """Return the clocks that one tile takes: of shared memory by part, of the tensor cores ("MMA"), and measured.

    The profile counts the clocks ("wavefronts") that instructions of the loop take in shared memory. The TMA unit is not in
    that count: its part is computed from the bytes that it moves.
    """
    record, owned, visited, mmas = PROFILED[kernel]
    heads, n, d = 32, 16384, 128
    columns = n // visited
    tiles = heads * sum(columns - i * owned // visited for i in range(n // owned))
    rows = samples(f"{record}_samples")
    executed = Counter(int(row["executed"]) for row in rows).most_common(1)[0][0] / WARPS
    found = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        opcode = row["source"].split()[1 if row["source"].startswith("@") else 0]
        part = {"HGMMA": PARTS[0], "STS": PARTS[2], "LDS": PARTS[3], "STSM": PARTS[4]}.get(opcode.split(".")[0])
        if part:
            found[part] += int(row["shared_wavefronts"]) / executed
    moved = 2 * 2 * visited * d + (
        4 * visited * d if kernel == "fused" else 0
    )  # two tiles arrive, dq in float32 leaves
    found["TMA"] = moved / LANES
    elapsed = cell(record, "Elapsed Cycles") * SMS / tiles
    return {**found, "MMA": mmas * owned * visited * d / RATE, "measured": elapsed}


def values() -> dict[str, str]:
    rows = []
    for kernel in PROFILED:
        found = clocks(kernel)
        total = sum(found[part] for part in PARTS)
        parts = [f"{found[part]:.0f}" if found[part] else "" for part in PARTS]
        rows.append([kernel, *parts, f"{total:.0f}", f"{found['MMA']:.0f}", f"{found['measured']:.0f}"])
    fused = clocks("fused")
    stores = sum(
        int(row["shared_wavefronts"])
        for row in samples("ncu_third_u128_ordered_samples")
        if row["source"].startswith("STS ")
    )
    stores /= (
        Counter(int(row["executed"]) for row in samples("ncu_third_u128_ordered_samples")).most_common(1)[0][0] / WARPS
    )
    total = sum(fused[part] for part in PARTS)

    def pair(kernel: str, shape: str, first: str, second: str, machine: int) -> tuple[float, float]:
        found = [
            only(load("variants_h200")["results"], kernel=kernel, shape=shape, variant=variant, machine=machine)[
                "tflops"
            ]
            for variant in (first, second)
        ]
        return found[0], found[1]

    causal, narrow = "1,16384,32,8,128,causal", "1,16384,32,32,64,causal"
    early = "lse read before S is issued; dP starts at -delta"
    changes = (
        (
            "load lse before S is issued; let dP start at -delta",
            "dk, dv, D 128",
            pair("dkdv", causal, "as it was", early, 1),
        ),
        (
            "128 queries per tile, not 64: the left operand is read half as often",
            "dk, dv, D 64",
            pair("dkdv", narrow, "64 queries a tile", "128 queries a tile", 1),
        ),
        (
            "compute dq transposed: its stores have no bank conflicts",
            "fused, D 128",
            pair("fused", causal, early, "dq made transposed, a half each", 4),
        ),
        (
            "the same, and each warpgroup computes all of every second dq tile",
            "fused, D 64",
            pair("fused", narrow, "128 queries a tile", "in turns, dq made transposed", 4),
        ),
        (
            "issue the next S before this tile ends",
            "dk, dv, D 128",
            pair("dkdv", causal, early, "the next tile's S issued before this one ends", 1),
        ),
        (
            "issue the next S before this tile ends",
            "fused, D 128",
            pair("fused", causal, early, "the next tile's S issued before this one ends", 1),
        ),
        (
            "add dq from registers with `red.global`",
            "fused, D 128",
            pair("fused", causal, early, "added from registers, red.global", 3),
        ),
        (
            "leave out the addition to dq (wrong result)",
            "fused, D 128",
            pair("fused", causal, early, "TMA addition left out (wrong)", 2),
        ),
        (
            "leave out the stores of dq too (wrong result)",
            "fused, D 128",
            pair("fused", causal, early, "stores of dq and addition left out (wrong)", 2),
        ),
    )
    return {
        "clocks": table(("clocks per tile", *PARTS, "shared memory, all", "tensor cores", "measured"), rows),
        "changes": table(
            ("change", "kernel", "before", "after"),
            [[what, kernel, f"{a:.0f}", f"{b:.0f}"] for what, kernel, (a, b) in changes],
            left=2,
        ),
        "fused_shared": f"{total / fused['measured']:.0%}",
        "fused_ceiling": f"{fused['MMA'] / total:.0%}",
        "fused_total": tokens(round(total)),
        "fused_mma": tokens(round(fused["MMA"])),
        "stores_before": f"{fused['dq stores']:.0f}",
        "stores_after": f"{stores:.0f}",
        "dq_rate": f"{clocks('dq')['MMA'] / clocks('dq')['measured']:.0%}",
        "dq_clock": f"{cell('ncu_first_q128', 'SM Frequency'):.2f}",
    }


def figure():
    figure, grid = new(width=8.5, height=3.8)
    axes = grid[0][0]
    colours = dict(zip(PARTS, (BLUE, SKY, VERMILION, GREEN, PURPLE), strict=True))
    labels = []
    for i, kernel in enumerate(PROFILED):
        found, base = clocks(kernel), 0.0
        for part, colour in colours.items():
            axes.bar(i - 0.27, found[part], 0.25, bottom=base, color=colour, label=part if kernel == "fused" else None)
            base += found[part]
        axes.bar(
            i,
            found["MMA"],
            0.25,
            color=YELLOW,
            edgecolor="black",
            linewidth=0.5,
            label="tensor cores" if kernel == "fused" else None,
        )
        axes.bar(i + 0.27, found["measured"], 0.25, color="#cccccc", label="measured" if kernel == "fused" else None)
        for x, value in ((i - 0.27, base), (i, found["MMA"]), (i + 0.27, found["measured"])):
            axes.text(x, value + 40, f"{value:,.0f}", ha="center", fontsize=8)
        owned, visited = PROFILED[kernel][1:3]
        labels.append(f"{kernel}\n{owned} x {visited}")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 4600)
    axes.set_xlim(-0.5, 5.1)
    axes.legend(fontsize=8, loc="center right", frameon=False, title="clocks of an SM", title_fontsize=8)
    finish(axes, f"Clocks that one tile takes, D 128, 16,384 tokens, causal: {ONE}", "", "clocks per tile", grid="y")
    return figure


FIGURE = Drawing(figure, tuple(f"ncu_first_{k}128{end}" for k in "fkqu" for end in ("_samples.csv", ".txt")))
