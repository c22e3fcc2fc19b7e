"""Compute the tables and numbers of `backward_on_hopper.md` from the records, and draw its first
figure.
"""

from collections import Counter

from plots import BLUE, GREEN, ONE, PURPLE, SKY, VERMILION, YELLOW, Drawing, finish, new
from records import cell, load, median, only, samples, table, tokens

from articles import order_of_dq

SMS = 132
LANES = 128  # bytes of shared memory per clock
RATE = 2048  # multiply-adds of 16-bit elements of an SM per clock
WARPS = 4  # of a warpgroup; each executes each instruction of the loop
PROFILED = {  # name on the page: record, keys or queries owned x visited by a tile, MMAs
    "forward": ("ncu_first_f128", 128, 128, 2),
    "dk, dv": ("ncu_first_k128", 128, 64, 4),
    "dq": ("ncu_first_q128", 128, 128, 3),
    "fused": ("ncu_first_u128", 128, 64, 5),
}
PARTS = ("MMA operands", "TMA", "dq stores", "lse, delta", "dS stores")
EARLY = "lse read before S is issued; dP starts at -delta"
NEXT = "the next tile's S issued before this one ends"
TRANSPOSED, ALTERNATING = "dq made transposed, a half each", "in turns, dq made transposed"
CHANGES = (  # text on the page; kernel, width, variants before and after, and machine in the record
    ("load lse before S is issued; let dP start at -delta", ("dkdv", 128, "as it was", EARLY, 1)),
    (
        "128 queries per tile, not 64: the left operand is read half as often",
        ("dkdv", 64, "64 queries a tile", "128 queries a tile", 1),
    ),
    (
        "compute dq transposed: its stores have no bank conflicts",
        ("fused", 128, EARLY, TRANSPOSED, 4),
    ),
    (
        "the same, and each warpgroup computes all of every second dq tile",
        ("fused", 64, "128 queries a tile", ALTERNATING, 4),
    ),
    ("issue the next S before this tile ends", ("dkdv", 128, EARLY, NEXT, 1)),
    ("issue the next S before this tile ends", ("fused", 128, EARLY, NEXT, 1)),
    (
        "add dq from registers with `red.global`",
        ("fused", 128, EARLY, "added from registers, red.global", 3),
    ),
    (
        "leave out the addition to dq (wrong result)",
        ("fused", 128, EARLY, "TMA addition left out (wrong)", 2),
    ),
    (
        "leave out the stores of dq too (wrong result)",
        ("fused", 128, EARLY, "stores of dq and addition left out (wrong)", 2),
    ),
)


def clocks(kernel: str) -> dict[str, float]:
    """Return the clocks that one tile takes: of shared memory by part, of the tensor cores ("MMA"),
    and measured.

    The profile counts the clocks ("wavefronts") of shared memory for each instruction of the loop.
    This count excludes the TMA unit, so its part follows from the bytes that it moves.
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
        part = {"HGMMA": PARTS[0], "STS": PARTS[2], "LDS": PARTS[3], "STSM": PARTS[4]}.get(
            opcode.split(".")[0]
        )
        if part:
            found[part] += int(row["shared_wavefronts"]) / executed
    leaving = 4 * visited * d if kernel == "fused" else 0  # bytes of dq in float32
    moved = 2 * 2 * visited * d + leaving  # two tiles of 16-bit elements arrive
    found["TMA"] = moved / LANES
    elapsed = cell(record, "Elapsed Cycles") * SMS / tiles
    return {**found, "MMA": mmas * owned * visited * d / RATE, "measured": elapsed}


EXCHANGED = "dS and dQ exchanged by named barriers, one buffer of dQ"
SCALED = "dq scaled by the kernel that casts it"
RELEASED = "as before, and Q and dO released by named barriers"
REGISTERS = "dq added from registers, two elements an instruction"
LATER = (  # text on the page; run, method, variants before and after in `variants_barriers_h100`
    ("release Q and dO by named barriers", (1, "split", "as it was", RELEASED)),
    ("scale dq in the kernel that casts it", (2, "fused", "as it was", SCALED)),
    ("the same, and release Q and dO by named barriers", (2, "fused", "as it was", RELEASED)),
    (
        "exchange dS and dQ by named barriers, with one buffer of dQ",
        (1, "fused", "as it was", EXCHANGED),
    ),
    ("the same, in a fixed order", (1, "ordered", "as it was", EXCHANGED)),
    ("add dq from registers, two elements an instruction", (3, "fused", "as it was", REGISTERS)),
)


def values() -> dict[str, str]:
    """Return the tables and numbers of the page, by name."""
    rows = []
    for kernel in PROFILED:
        found = clocks(kernel)
        parts = [f"{found[part]:.0f}" if found[part] else "" for part in PARTS]
        rows.append(
            [
                kernel,
                *parts,
                *(f"{value:.0f}" for value in (shared(found), found["MMA"], found["measured"])),
            ]
        )
    fused, dq = clocks("fused"), clocks("dq")
    # dq is transposed since this profile
    today = shared(fused) - fused["dq stores"] + later_stores()
    return {
        "clocks": table(
            ("clocks per tile", *PARTS, "shared memory, all", "tensor cores", "measured"), rows
        ),
        "changes": changes(),
        "later": later(),
        "fused_shared": f"{shared(fused) / fused['measured']:.0%}",
        "fused_ceiling": f"{fused['MMA'] / today:.0%}",
        "fused_today": tokens(round(today)),
        "fused_total": tokens(round(shared(fused))),
        "fused_mma": tokens(round(fused["MMA"])),
        "stores_before": f"{fused['dq stores']:.0f}",
        "stores_after": f"{later_stores():.0f}",
        "dq_rate": f"{dq['MMA'] / dq['measured']:.0%}",
        **order_of_dq.values(),
    }


def shared(found: dict[str, float]) -> float:
    """Return the clocks of shared memory in a tile, all parts together."""
    return sum(found[part] for part in PARTS)


def later_stores() -> float:
    """Return the clocks per tile of the stores of dq in the later kernel."""
    rows = samples("ncu_third_u128_ordered_samples")
    executed = Counter(int(row["executed"]) for row in rows).most_common(1)[0][0] / WARPS
    return (
        sum(int(row["shared_wavefronts"]) for row in rows if row["source"].startswith("STS "))
        / executed
    )


def changes() -> str:
    """Return the table of single changes: TFLOP/s of the MMAs before and after each."""
    rows = []
    for text, (kernel, d, before, after, machine) in CHANGES:
        speeds = [f"{tflops(kernel, d, variant, machine):.0f}" for variant in (before, after)]
        rows.append([text, f"{'dk, dv' if kernel == 'dkdv' else kernel}, D {d}", *speeds])
    return table(("change", "kernel", "before", "after"), rows, left=2)


def later() -> str:
    """Return the table of later changes: the speed after each over that before it, on all shapes of
    its run.
    """
    rows = []
    for text, (run, method, before, after) in LATER:
        found = [
            row
            for row in load("variants_barriers_h100")["results"]
            if (row["run"], row["method"]) == (run, method)
        ]
        ratios = [
            median(only(found, shape=shape, variant=before)["backward_ms"])
            / median(only(found, shape=shape, variant=after)["backward_ms"])
            for shape in dict.fromkeys(row["shape"] for row in found)
        ]
        rows.append([text, method, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return table(("change", "kernel", "speed after over before"), rows, left=2)


def tflops(kernel: str, d: int, variant: str, machine: int) -> float:
    """Return the speed of one variant of a kernel on one machine of the record."""
    shape = "1,16384,32,8,128,causal" if d == 128 else "1,16384,32,32,64,causal"
    rows = load("variants_h200")["results"]
    return only(rows, kernel=kernel, shape=shape, variant=variant, machine=machine)["tflops"]


def figure():
    """Draw the clocks of one tile in four kernels."""
    figure, grid = new(width=8.5, height=3.8)
    axes = grid[0][0]
    colours = dict(zip(PARTS, (BLUE, SKY, VERMILION, GREEN, PURPLE), strict=True))
    labels = []
    for i, kernel in enumerate(PROFILED):
        found, base = clocks(kernel), 0.0
        for part, colour in colours.items():
            axes.bar(
                i - 0.27,
                found[part],
                0.25,
                bottom=base,
                color=colour,
                label=part if kernel == "fused" else None,
            )
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
        axes.bar(
            i + 0.27,
            found["measured"],
            0.25,
            color="#cccccc",
            label="measured" if kernel == "fused" else None,
        )
        for x, value in ((i - 0.27, base), (i, found["MMA"]), (i + 0.27, found["measured"])):
            axes.text(x, value + 40, f"{value:,.0f}", ha="center", fontsize=8)
        owned, visited = PROFILED[kernel][1:3]
        labels.append(f"{kernel}\n{owned} x {visited}")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 4600)
    axes.set_xlim(-0.5, 5.1)
    axes.legend(
        fontsize=8, loc="center right", frameon=False, title="clocks of an SM", title_fontsize=8
    )
    finish(
        axes,
        f"Clocks that one tile takes, D 128, 16,384 tokens, causal: {ONE}",
        "",
        "clocks per tile",
        grid="y",
    )
    return figure


FIGURE = Drawing(
    figure, tuple(f"ncu_first_{k}128{end}" for k in "fkqu" for end in ("_samples.csv", ".txt"))
)
