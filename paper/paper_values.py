"""Compute the numbers and the tables of the paper from the records.

`values` returns every number by name. The numbers of an article have the first word of the
article's name in front, as in "backward_fused_total". A table is a header and rows of text.
"""

import re
from collections.abc import Sequence

import kernel_tables
import measured
import other_libraries
import schedule_tables
import short_tables
from paper_figures import FIGURES
from records import DATA, load, median, named, provenance, span, tokens

Table = dict[str, list]
FAULTS = "planted_faults"
MUTATED = {  # name in the tests: name in the paper
    "forward by three": "forward, 3 warpgroups",
    "dkdv": "dk, dv",
    "fused": "fused, any order",
    "fused by halves": "fused, any order, half tiles",
    "ordered": "fused, ordered",
    "ordered by halves": "fused, ordered, half tiles",
    "dkdv_hdim256": "dk, dv, width 256",
}
PEERS = "SDPA cudnn", "SDPA flash", "flash-attn-4"  # of eager calls
TABLED = (  # records behind tables and numbers that no figure has
    *(
        "plans",
        "plans_received",
        "planted_faults",
        "random_cpu",
        "random_gpu_h200",
        "kernels_triton_h200",
        "kernels_semaphore_h200",
    ),
    *(
        "schedules_four_h200",
        "packs_four_h200",
        "schedules_timeline_four_h200",
        "host_h200",
        "agreement_two_h200",
    ),
    schedule_tables.TWO,
    kernel_tables.BESIDE,
    other_libraries.RECORD,
    *short_tables.BITS.values(),
)
SCHEDULES = (  # name in the record, name in the paper
    ("ring contiguous", "ring, contiguous"),
    ("ring striped", "ring, striped"),
    ("ring zigzag", "ring, zigzag"),
    ("strided zigzag 1", "strided, 1 key head"),
    ("strided zigzag 4", "strided, 4 key heads"),
    ("strided zigzag 8", "strided, 8 key heads"),
    ("magi, 0 stages", "magi, one group cast"),
    ("torch cudnn allgather", "torch, all-gather"),
    ("torch cudnn alltoall", "torch, all-to-all"),
    ("one GPU", "one GPU alone"),
)


def values() -> dict[str, str]:
    """Return every number by name. The text of a number has its unit only where the record's page
    has it, too.
    """
    found = measured.measured()
    for name, article in measured.ARTICLES.items():
        found |= {f"{name.split('_')[0]}_{key}": value for key, value in article.values().items()}
    found |= faults() | beside_peers() | wall() | checks_and_plans() | schedule_ratios()
    return {
        key: re.sub(r"(?<=\d)%", "\u00a0%", value)
        for key, value in found.items()
        if "|" not in value
    }


def tables() -> dict[str, Table]:
    """Return every table by name."""
    parts = (
        checks,
        schedules,
        packs,
        others,
        wall_times,
        plans,
        mutants,
        clocks,
        launches,
        sources,
    )
    return {part.__name__: part() for part in parts}


# ------------------------------------------------------------------ numbers
def faults() -> dict[str, str]:
    """Return the numbers of planted faults and of mutants, and an example."""
    rows = load(FAULTS)["results"]
    of = lambda what: [row for row in rows if row["what"] == what]
    reasons = [reason for row in of("mutants") for reason in row["reasons"]]
    example = of("example of a fault")[0]
    lacking = lambda part: sum(part in reason for reason in reasons)
    fences, implied, guiding = map(lacking, ("mbarrier.init", "implies it", "assembler"))
    assert fences + implied + guiding == len(reasons)
    return {
        "mutated_kernels": str(len(of("mutants"))),
        "survivors_fence": str(fences),
        "survivors_implied": str(implied),
        "survivors_assembler": str(guiding),
        "survivors_harmless": str(implied + guiding),
        "judge_faults": str(of("faults of the judge")[0]["planted"]),
        "example_mutant": example["mutant"],
        "example_message": example["message"],
    }


def beside_peers() -> dict[str, str]:
    """Return how much longer the faster of cuDNN and flash-attn-4 takes for both passes than
    Canon's default, and the number of shapes on which it is faster.
    """
    shapes, peers = kernel_tables.shapes_of(kernel_tables.BESIDE), kernel_tables.PEERS
    ratios = [other_libraries.fastest_over_canon(shape, peers) for shape in shapes]
    walls, gpus = zip(*ratios, strict=True)
    return {
        "peers_shapes": str(len(shapes)),
        "peers_both": span(gpus),
        "peers_both_wall": span(walls),
        "peers_slower": str(sum(ratio < 1 for ratio in gpus)),
        "peers_slower_wall": str(sum(ratio < 1 for ratio in walls)),
    }


def wall() -> dict[str, str]:
    """Return the ratios of Canon's wall time to the fastest peer's, by measured call, and the
    number of shapes.
    """
    rows = load("host_h200")["results"]
    shapes = dict.fromkeys(row["shape"] for row in rows)
    found = {"wall_shapes": str(len(shapes))}
    for key in ("forward", "both", "chain"):
        time = {(row["shape"], row["contender"]): median(row[f"{key}_wall_ms"]) for row in rows}
        peers = {
            s: min(ms for (shape, who), ms in time.items() if shape == s and who in PEERS)
            for s in shapes
        }
        found[f"wall_{key}"] = span([time[s, "canon auto"] / peers[s] for s in shapes])
    return found


def checks_and_plans() -> dict[str, str]:
    """Return numbers of the check, of the plans and of compilation."""
    cases = [row for record, *_ in kernel_tables.CHECKS for row in load(record)["results"]]
    ratios = [measure["ratio"] for row in cases for measure in row["measures"]]
    mean = lambda numbers: sum(numbers) / len(numbers)
    planned = load("plans")["results"]
    plans = [row for row in planned if row["kind"] == "packs"]
    received = [row for row in load("plans_received")["results"] if row["kind"] == "packs"]
    large = next(row for row in planned if row["kind"] == "a large pack")
    speed = lambda shape: (
        f"{kernel_tables.speed(kernel_tables.BESIDE, shape, 'canon auto', 'forward'):.0f}"
    )
    worst = min(float(row[1]) for row in cells(kernel_tables.lengths()["lengths"]))
    volumes = ", ".join(f"{mean(row['volume']):.3f} on {row['ranks']}" for row in plans)
    releases = sorted(
        path.stem.removeprefix("compile_triton_") for path in DATA.glob("compile_triton_*.json")
    )
    spilled = [
        row["spilled"]
        for release in releases
        for row in load(f"compile_triton_{release}")["results"]
    ]
    return {
        "check_declined": str(sum(row["verdict"] == "declined" for row in cases)),
        "check_agree": str(sum(row["verdict"] == "agrees" for row in cases)),
        "check_worst": f"{max(ratios):.2f}",
        "check_median": f"{median(ratios):.2f}",
        "plan_balance": span([mean(row["balance"]) for row in plans], 3),
        "plan_volume": span([mean(row["volume"]) for row in plans], 3),
        "plan_volumes": f"{volumes} ranks",
        "plan_sent": span([mean(row["worst_send"]) for row in plans], 3),
        "plan_sent_received": span([mean(row["worst_send"]) for row in received], 3),
        "plan_large_ms": tokens(round(median(large["ms"]))),
        "documents_tflops": speed("B1 S65536 Hq64 Hk8 D128 documents:1024"),
        "causal_tflops": speed("B1 S16384 Hq32 Hk8 D128 causal"),
        "short_least": f"{worst:.2f}",
        "plan_ms": span([median(row["ms"]) for row in plans], 0),
        "plan_packs": str(len(plans[0]["balance"])),
        "releases": f"{releases[0]} to {releases[-1]}",
        "spilled": str(max(spilled)),
    }


def schedule_ratios() -> dict[str, str]:
    """Return ratios of schedules."""
    host = schedule_tables.schedule("schedules_eight_h200", "ring zigzag", 32768)
    speed = lambda record, name, n: schedule_tables.schedule(record, name, n)["both_tflops"]
    timed = (("schedules_eight_h200", 32768), ("schedules_eight_h200", 131072))
    timed += (("schedules_four_h200", 16384), ("schedules_four_h200", 65536))
    ends = [
        speed(r, "strided zigzag 4, small ends", n) / speed(r, "strided zigzag 4", n)
        for r, n in timed
    ]
    packs = schedule_tables.pack_speeds()
    mean = lambda name, i, j: sum(row[j] for row in packs[name, i]) / len(packs[name, i])
    stages = [
        mean("magi, 1 stages", i, j) / mean("magi, 0 stages", i, j)
        for i in range(2)
        for j in range(2)
    ]
    return {
        "ring_launches": f"{median(host['both_launches_ms']):.1f}",
        "ring_gpu": f"{median(host['both_ms']):.1f}",
        "ends_ratio": span(ends),
        "stages_ratio": span(stages),
    }


# ------------------------------------------------------------------ tables
def cells(markdown: str, columns: Sequence[int] | None = None) -> list[list[str]]:
    """Return the rows of a Markdown table without its header, as plain text, and of some columns
    only.
    """
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in markdown.splitlines()[2:]
    ]
    plain = [[re.sub(r" \(\[[^]]*\]\([^)]*\)\)|`|\*\*", "", cell) for cell in row] for row in rows]
    return plain if columns is None else [[row[column] for column in columns] for row in plain]


def checks() -> Table:
    """Return the cases of every check."""
    header = ["run", "dtypes", "agree", "same bits", "largest error / bound"]
    rows = [row for row in cells(kernel_tables.agreement()["agreement"]) if len(row) == len(header)]
    return {"header": header, "rows": rows}


def schedules() -> Table:
    """Return the speeds of schedules on eight and on four GPUs."""
    columns = (("schedules_eight_h200", 32768), ("schedules_eight_h200", 131072))
    columns += (("schedules_four_h200", 16384), ("schedules_four_h200", 65536))
    numbers = {"eight": 8, "four": 4}
    header = [
        "schedule",
        *(f"{numbers[record.split('_')[1]]} GPUs, {tokens(n)}" for record, n in columns),
    ]
    rows = []
    for name, label in SCHEDULES:
        found = [schedule_tables.schedule(record, name, n) for record, n in columns]
        rows.append(
            [label, *(f"{row['forward_tflops']:.0f} / {row['both_tflops']:.0f}" for row in found)]
        )
    return {"header": header, "rows": rows}


def packs() -> Table:
    """Return the mean speeds over packs of documents."""
    header = ["schedule", "8 GPUs", "4 GPUs"]
    return {"header": header, "rows": cells(schedule_tables.packs()["packs"])}


def others() -> Table:
    """Return the times of both passes on two GPUs beside other libraries."""
    header = ["ms, wall / GPU", *other_libraries.SHAPES.values()]
    return {"header": header, "rows": other_libraries.cells()}


def wall_times() -> Table:
    """Return wall and host times of eager calls, by shape and contender."""
    names = {"canon auto": "Canon", "SDPA cudnn": "cuDNN", "SDPA flash": "FA2"}
    names |= {"flash-attn-4": "FA4", "no kernels": "no kernels"}
    rows = [
        [_short(named(row[0])), names[row[1]], *row[2:]]
        for row in cells(schedule_tables.host()["host_calls"])
        if row[1] in names
    ]
    return {
        "header": ["wall (host) ms", "", "forward", "both passes", "chain of 8, per layer"],
        "rows": rows,
    }


def plans() -> Table:
    """Return the quality and the time of plans, as means over packs."""
    header = ["ranks", "tokens", "balance", "volume", "worst receive", "worst send", "planned in"]
    return {"header": header, "rows": cells(schedule_tables.plans()["plans"])}


def mutants() -> Table:
    """Return the number of mutants of each kernel, by the end of the first interleaving, and of
    those that survive.
    """
    ends = ("deadlock", "fault", "other bits", "survives")
    rows = [row for row in load(FAULTS)["results"] if row["what"] == "mutants"]
    counted = [
        [MUTATED.get(row["kernel"], row["kernel"]), *(str(row["ends"].get(end, 0)) for end in ends)]
        for row in rows
    ]
    return {
        "header": ["kernel", "deadlock", "other fault", "other bits", "survive"],
        "rows": counted,
    }


def clocks() -> Table:
    """Return the clocks of shared memory and of the tensor cores for one tile of each kernel."""
    markdown = measured.ARTICLES["backward_on_hopper"].values()["clocks"]
    header = ["clocks per tile", "shared memory", "tensor cores", "measured"]
    return {"header": header, "rows": cells(markdown, (0, 6, 7, 8))}


def launches() -> Table:
    """Return the host time and the GPU time of both passes on eight GPUs."""
    rows = cells(schedule_tables.host()["host_schedules"])
    return {
        "header": ["ms, both passes", "host", "GPU"],
        "rows": [[row[0].replace("`", ""), *row[1:]] for row in rows],
    }


def sources() -> Table:
    """Return the commit, the date and the GPUs of the records behind the figures and the tables."""
    names = {record for drawing in FIGURES.values() for record in drawing.records}
    rows = []
    for name in sorted(names | {f"{record}.json" for record in TABLED}):
        commit, date, gpus, *_ = provenance(name)
        commit = commit.replace("`", "").replace(" with changes", ", changed")
        rows.append([name.removesuffix(".json"), commit, date, gpus.replace("none", "CPU")])
    return {"header": ["record", "commit", "date", "GPUs"], "rows": rows}


def _short(shape: str) -> str:
    """Return a named shape with "32/8" for "32/8 heads" and "~4096" for "documents of mean
    4096".
    """
    return (
        shape.replace(" heads", "")
        .replace("documents of mean ", "documents ~")
        .replace(" x ", " × ")
    )
