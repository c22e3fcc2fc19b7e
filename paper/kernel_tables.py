"""Compute the tables and numbers of `measured.md` and `records.md` about agreement, kernels and
compilation.
"""

import re
from statistics import geometric_mean

from records import cut_off_cases, lines, load, median, named, span, table, tokens

BESIDE = "kernels_peers_h200"
SHAPES = (  # of the figures
    "B1 S16384 Hq32 Hk8 D128 causal",
    "B1 S16384 Hq32 Hk8 D128 full",
    "B4 S8192 Hq16 Hk16 D128 causal",
    "B1 S16384 Hq32 Hk32 D64 causal",
    "B1 S16384 Hq16 Hk4 D256 causal",
    "B1 S65536 Hq64 Hk8 D128 documents:4096",
    "B1 S65536 Hq64 Hk8 D128 documents:1024",
    "B8 S2048 Hq32 Hk8 D128 causal",
    "B32 S512 Hq32 Hk8 D128 causal",
)
MEMORY = (  # shapes of the table of memory
    "B1 S20480 Hq20 Hk4 D128 causal",
    "B1 S65536 Hq64 Hk8 D128 documents:4096",
    "B1 S16384 Hq16 Hk4 D256 causal",
    "B8 S2048 Hq32 Hk8 D128 causal",
)
REPEATABLE = "canon auto, repeatable"
ORDERED = "canon gluon fused in order"
# Since the run the deterministic default takes the ordered kernel on these: its times count there.
ORDERED_SINCE = (
    "B2 S8192 Hq40 Hk8 D128 causal",
    "B1 S24576 Hq24 Hk4 D128 causal",
    "B1 S16384 Hq32 Hk8 D128 causal",
    "B4 S8192 Hq16 Hk16 D128 causal",
    "B2 S12288 Hq48 Hk8 D128 causal",
    "B1 S32768 Hq28 Hk4 D128 window:4095",
)
DETERMINISTIC = "flash-attn-4 deterministic"
OF_FORWARD = {"canon auto": "Canon", "SDPA cudnn": "cuDNN", "flash-attn-4": "flash-attn-4"}
OF_BESIDE = OF_FORWARD | {
    REPEATABLE: "Canon, deterministic",
    DETERMINISTIC: "flash-attn-4, deterministic",
}
OF_MEMORY = OF_FORWARD | {"canon gluon split": 'Canon, `backward="split"`'}
PEERS = ("SDPA cudnn", "flash-attn-4")
CHECKS = (  # record, what ran, dtypes
    ("check_one_h200", "4 ranks as threads on 1 H200", "bf16, fp16, fp32"),
    ("check_cuda_h200", "the same with the CUDA backend; 3 unordered cases declined", "bf16, fp16"),
    ("check_one_h100", "4 ranks as threads on 1 H100", "bf16, fp16, fp32"),
    ("check_two_h200", "2 H200s, NCCL", "bf16, fp16, fp32"),
    ("check_runs_four_h200", "4 H200s, NCCL, strided attention only", "bf16"),
    ("check_cpu", "4 CPU ranks, Triton's interpreter", "bf16, fp32, fp64"),
    ("check_gluon_simulated", "4 CPU ranks, Hopper kernels simulated", "bf16, fp16"),
)
CUT_OFF = (  # text records of runs that a time limit ended
    ("check_runs_cut_off_eight_h200.txt", "8 H200s, NCCL, cut off by a time limit", "bf16"),
)


def semaphore() -> list[float]:
    """Return the time of the ordered dq with release and acquire over the time without, for each
    shape.
    """
    times: dict[tuple[str, str], list[float]] = {}
    for row in load("kernels_semaphore_h200")["results"]:
        if row["what"] == "ordered" and row["run"] == "3":
            times.setdefault((row["shape"], row["tree"]), []).extend(row["ms"])
    shapes = dict.fromkeys(shape for shape, _ in times)
    return [median(times[shape, "8d91517"]) / median(times[shape, "1dfbf10"]) for shape in shapes]


def shapes_of(record: str) -> list[str]:
    """Return the shapes of a record, in order."""
    return list(dict.fromkeys(row["shape"] for row in load(record)["results"]))


def rows_of(record: str, shape: str) -> list[dict]:
    """Return the rows of a record with this shape."""
    return [row for row in load(record)["results"] if row["shape"] == shape]


def row_of(record: str, shape: str, contender: str) -> dict:
    """Return the row of a contender, or {} where it has no figures."""
    contender = _timed(record, shape, contender)
    rows = (row for row in rows_of(record, shape) if row["contender"] == contender)
    return next((row for row in rows if "failed" not in row and "declined" not in row), {})


def _timed(record: str, shape: str, contender: str) -> str:
    since = (record, contender) == (BESIDE, REPEATABLE) and shape in ORDERED_SINCE
    return ORDERED if since else contender


def clocks(record: str, shape: str, contender: str, name: str) -> tuple[float, float]:
    """Return the medians of wall time and GPU time (ms) of the "forward" or of "both" passes; zeros
    without figures.

    A contender that shares its forward with another one has the other one's GPU time there.
    """
    if not (row := row_of(record, shape, contender)) or f"{name}_wall_ms" not in row:
        return 0.0, 0.0
    sharing = (
        x
        for x in rows_of(record, shape)
        if x["forward_of"] == row["forward_of"] and "forward_ms" in x
    )
    forward = row if "forward_ms" in row else next(sharing)
    passes = [forward["forward_ms"], *([] if name == "forward" else [row["backward_ms"]])]
    return median(row[f"{name}_wall_ms"]), sum(map(median, passes))


def speed(record: str, shape: str, contender: str, name: str) -> float:
    """Return the TFLOP/s of the pass ``name``; 0 where the contender has none."""
    contender = _timed(record, shape, contender)
    found = [row for row in rows_of(record, shape) if row["contender"] == contender]
    return found[0].get(f"{name}_tflops", 0.0) if found else 0.0


def best_peer(record: str, shape: str, name: str) -> float:
    """Return the speed of the fastest peer."""
    return max(speed(record, shape, peer, name) for peer in PEERS)


def agreeing(*records: str) -> str:
    """Return how many schedules of Canon agree in every record. Raises ValueError if one does not,
    or if the lists differ.
    """
    judged = [
        [row for row in load(name)["results"] if row["schedule"] != "one GPU"] for name in records
    ]
    found = [
        {row["schedule"] for row in rows if not row["schedule"].startswith("torch")}
        for rows in judged
    ]
    if not all(row.get("agrees") for rows in judged for row in rows) or found != found[:1] * len(
        found
    ):
        raise ValueError(f"{records}: a schedule does not agree, or the schedules differ")
    return str(len(found[0]))


def _random(record: str) -> str:
    """Return "A of N agree" for a record of `canon check --random`."""
    verdicts = [row[2] for run in load(record)["runs"] for row in run["cases"]]
    return f"{tokens(verdicts.count('agrees'))} of {tokens(len(verdicts))}"


def agreement() -> dict[str, str]:
    """Return the table of checks, and the numbers of tests and sanitizers."""
    rows = []
    for record, what, dtypes in CHECKS:
        results = [row for row in load(record)["results"] if row["verdict"] != "declined"]
        agree = sum(row["verdict"] == "agrees" for row in results)
        # Cases of the unordered "fused" are not compared bit by bit.
        repeats = sum(bool(row["same_bits"]) for row in results if "/fused" not in row["case"])
        worst = max(measure["ratio"] for row in results for measure in row["measures"])
        compared = sum("/fused" not in row["case"] for row in results)
        rows.append(
            [
                f"{what} ([record](data/{record}.json))",
                dtypes,
                f"{agree} of {len(results)}",
                f"{repeats} of {compared}",
                f"{worst:.2f}",
            ]
        )
    for record, what, dtypes in CUT_OFF:
        agree, judged, planned = cut_off_cases(record)
        rows.append(
            [
                f"{what} ([record](data/{record}))",
                dtypes,
                f"{agree} of {judged}; {planned} planned",
                "",
                "",
            ]
        )
    again = load("check_again_two_h200")["results"]
    passed = [line for line in lines("tests_h200.txt") if " passed" in line]
    cpu = [line for line in lines("tests_cpu.txt") if " passed" in line]
    count = lambda line, word: re.findall(rf"(\d+) {word}", line)[0]
    slower = semaphore()
    return {
        "random_cpu": _random("random_cpu"),
        "random_distinct": tokens(
            len(
                {
                    (run["seed"], row[0])
                    for run in load("random_cpu")["runs"]
                    for row in run["cases"]
                }
            )
        ),
        "random_gpu": _random("random_gpu_h200"),
        "random_trees": _random("random_trees_cpu"),
        "agreement": table(
            (
                "run",
                "dtypes",
                "cases that agree",
                "cases that repeat their bits",
                "largest error over its bound",
            ),
            rows,
            left=2,
        ),
        "again_runs": tokens(sum(row["processes"] * row["runs_each"] for row in again)),
        "again_wrong": str(sum(row["disagreements"] + row["other_bits"] for row in again)),
        "cpu_tests": tokens(int(count(cpu[0], "passed"))),
        "cpu_cells": count(cpu[1], "passed"),
        "cpu_minutes": re.findall(r"real (\d+)m", "\n".join(lines("tests_cpu.txt")))[0],
        "gpu_tests": count(passed[0], "passed"),
        "gpu_check": count("\n".join(lines("tests_h200.txt")), "s from an empty cache"),
        "later_tests": count(passed[1], "passed"),
        "two_tests": count(passed[2], "passed"),
        "two_failed": count(passed[2], "failed"),
        "newest_tests": count(passed[3], "passed"),
        "semaphore": f"{min(slower):.2f} to {max(slower):.2f}",
        "schedules_agree": agreeing("schedules_four_h200", "schedules_eight_h200"),
    }


def planted() -> dict[str, str]:
    """Return the numbers of planted faults and of mutants, and of those that were not found."""
    rows = load("planted_faults")["results"]
    judge = next(row for row in rows if row["what"] == "faults of the judge")
    ends = [row["ends"] for row in rows if row["what"] == "mutants"]
    return {
        "judge_runs": str(judge["planted"] * judge["dtypes"]),
        "judge_caught": str(judge["caught"]),
        "mutants": str(sum(sum(each.values()) for each in ends)),
        "survivors": str(sum(each.get("survives", 0) for each in ends)),
    }


def kernels() -> dict[str, str]:
    """Return the ratios of speeds of Canon and of the fastest peer."""
    shapes = shapes_of(BESIDE)
    of = lambda contender, name: [speed(BESIDE, shape, contender, name) for shape in shapes]
    ratios = {
        name: [
            ours / best_peer(BESIDE, shape, name)
            for shape, ours in zip(shapes, of("canon auto", name), strict=True)
        ]
        for name in ("forward", "backward")
    }
    pairs = zip(of(REPEATABLE, "backward"), of(DETERMINISTIC, "backward"), strict=True)
    ratios["repeatable"] = [ours / other for ours, other in pairs]
    cudnn = [
        speed(record, SHAPES[0], "SDPA cudnn", "forward")
        for record in (BESIDE, "kernels_triton_h200")
    ]
    found = {f"{name}_over_peer": span(x) for name, x in ratios.items()}
    for name in ("backward", "repeatable"):
        found[f"{name}_slower"] = str(sum(ratio < 1 for ratio in ratios[name]))
    return found | {"rows": str(len(shapes)), "cudnn_runs": span(cudnn, 0)}


def wall() -> dict[str, str]:
    """Return the wall times of the fastest peer over Canon's."""
    shapes = shapes_of(BESIDE)
    ratios = {}
    for name in ("forward", "both"):
        times = ({x: clocks(BESIDE, s, x, name)[0] for x in OF_FORWARD} for s in shapes)
        ratios[f"wall_{name}"] = span(
            min(x for who, x in found.items() if x and who in PEERS) / found["canon auto"]
            for found in times
        )
    return ratios


def portable() -> dict[str, str]:
    """Return the table of the Triton backend, and the costs of masks and of "auto"."""
    record, rows = "kernels_triton_h200", []
    for shape in shapes_of(record):
        back = max(
            speed(record, shape, f"canon triton {key}", "backward")
            for key in ("split", "head_parallel")
        )
        cells = [speed(record, shape, "canon triton split", "forward"), back]
        for peer in ("FlexAttention", "SDPA flash", "SDPA cudnn"):
            cells += [speed(record, shape, peer, name) for name in ("forward", "backward")]
        pairs = zip(cells[::2], cells[1::2], strict=True)
        rows.append(
            [named(shape), *(f"{one:.0f} / {two:.0f}" if one else "-" for one, two in pairs)]
        )
    over = lambda name: [
        speed(record, shape, "canon triton split", "forward")
        / speed(record, shape, name, "forward")
        for shape in shapes_of(record)
    ]
    return {
        "portable": table(
            (
                "batch x tokens, query/key heads, width, mask",
                "Canon, Triton backend",
                "FlexAttention",
                "FlashAttention-2",
                "cuDNN",
            ),
            rows,
        ),
        "portable_over_flex": span(over("FlexAttention")),
    }


def lengths() -> dict[str, str]:
    """Return Canon's forward over cuDNN's at a few lengths of the sweep."""
    record = "kernels_sweep_widths_h200"
    rows, chosen = [], (512, 1024, 2048, 4096, 8192, 16384)
    found = {
        (row["d"], row["n"], row["contender"]): (
            row.get("forward_tflops", 0.0),
            row.get("backward_tflops", 0.0),
        )
        for row in load(record)["results"]
    }
    for d in (64, 128, 256):
        for i, name in enumerate(("forward", "backward")):
            ratios = [found[d, n, "canon auto"][i] / found[d, n, "SDPA cudnn"][i] for n in chosen]
            rows.append([f"D {d}, {name}", *(f"{ratio:.2f}" for ratio in ratios)])
    worst = min(
        found[d, 512, "canon auto"][0] / found[d, 512, "SDPA cudnn"][0] for d in (64, 128, 256)
    )
    return {
        "short_worst": f"{1 / worst:.2f}",
        "lengths": table(("Canon over cuDNN", *(f"{tokens(n)} tokens" for n in chosen)), rows),
    }


def compilation() -> dict[str, str]:
    """Return the table of kernels that spill registers, by release of Triton."""
    rows = []
    for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        record = f"compile_triton_{version}"
        results = load(record)["results"]
        cells = []
        for backend in ("gluon", "triton"):
            kernels = [row["spilled"] for row in results if row["case"]["backend"] == backend]
            spilled = [bytes_ for bytes_ in kernels if bytes_]
            cells.append(
                f"{len(spilled)} of {len(kernels)}"
                + (f", at most {max(spilled)} bytes" if spilled else "")
            )
        rows.append([f"[{version}](data/{record}.json)", *cells])
    return {
        "compilation": table(
            ("Triton", "Hopper kernels (Gluon) that spill", "Triton kernels that spill"), rows
        )
    }


def tiles() -> dict[str, str]:
    """Return the fastest tile sizes of the Triton backend on a causal sequence, from the records of
    `canon bench tune`.
    """
    rows = []
    for kernel in ("forward", "dq", "dkdv"):
        cells = []
        for suffix in ("_64", "", "_256_more" if kernel == "dq" else "_256"):
            record = f"tune_triton_{kernel}{suffix}_h200"
            timed = [
                row
                for row in load(record)["results"]
                if row.get("ms") and row["shape"].endswith("causal")
            ]
            speeds = {row["config"]: row["tflops"] for row in timed}
            config = max(speeds, key=lambda each: speeds[each])
            keys, columns, _ = config.split(",", 2)
            best, worst = speeds[config], min(speeds.values())
            cells.append(
                f"[{keys} x {columns}](data/{record}.json): {best:.0f} (worst {worst:.0f})"
            )
        rows.append([kernel, *cells])
    return {"tiles": table(("kernel", "D 64", "D 128", "D 256"), rows, left=4)}


def beside_peers() -> dict[str, str]:
    """Return tables of both passes beside peers in one run, ratios, and the cost of
    ``rank_invariant=True``.
    """
    shapes = shapes_of(BESIDE)
    tflops = lambda name, shape, kind: row_of(BESIDE, shape, name).get(f"{kind}_tflops", 0)
    cell = lambda number, form=".0f": f"{number:{form}}" if number else "-"
    forwards, backwards = tuple(OF_FORWARD), tuple(OF_BESIDE)
    speeds = [
        [
            named(shape),
            *(cell(tflops(name, shape, "forward")) for name in forwards),
            *(cell(tflops(name, shape, "backward")) for name in backwards),
        ]
        for shape in shapes
    ]
    wall = [
        [named(shape), *(cell(clocks(BESIDE, shape, name, "both")[0], ".2f") for name in backwards)]
        for shape in shapes
    ]
    memory = [
        [named(shape), *(cell(row_of(BESIDE, shape, x).get("peak_mb", 0)) for x in OF_MEMORY)]
        for shape in MEMORY
    ]

    def ratio(one: str, other: str, kind: str = "backward") -> dict[str, float]:
        pairs = {shape: (tflops(one, shape, kind), tflops(other, shape, kind)) for shape in shapes}
        return {shape: x / y for shape, (x, y) in pairs.items() if x and y}

    ratios = {
        "auto_flash4": ratio("canon auto", "flash-attn-4"),
        "repeatable_flash4": ratio(REPEATABLE, DETERMINISTIC),
        "forward_cudnn": ratio("canon auto", "SDPA cudnn", "forward"),
        "forward_flash4": ratio("canon auto", "flash-attn-4", "forward"),
    }
    long = [shape for shape in shapes if int(shape.split()[1][1:]) >= 8192]
    ratios["long_flash4"] = {x: ratios["auto_flash4"][x] for x in long}
    found = {f"{name}_mean": f"{geometric_mean(x.values()):.2f}" for name, x in ratios.items()}
    found |= {f"{name}_span": span(x.values()) for name, x in ratios.items()}
    found |= {
        f"{name}_slower": f"{sum(y < 1 for y in x.values())} of {len(x)}"
        for name, x in ratios.items()
    }
    any_order = "canon gluon split", "canon gluon fused"
    behind = max(
        max(tflops(name, shape, "backward") for name in any_order)
        / tflops("canon auto", shape, "backward")
        for shape in shapes
    )
    names = "canon auto, rank invariant", "canon auto"

    def cost(shape: str, passes: str) -> float:
        option, default = (clocks(BESIDE, shape, name, passes)[0] for name in names)
        return option / default

    short = [shape for shape in shapes if int(shape.split()[1][1:]) <= 2048]
    short_cudnn = sum(ratios["forward_cudnn"][shape] < 1 for shape in short)
    costs = [(shape.split()[4], cost(shape, "both")) for shape in shapes]
    return {
        **found,
        "peers": table(
            (
                "TFLOP/s of GPU time",
                *(f"forward: {OF_FORWARD[x]}" for x in forwards),
                *(f"backward: {OF_BESIDE[x]}" for x in backwards),
            ),
            speeds,
        ),
        "peers_wall": table(("both passes, wall ms", *OF_BESIDE.values()), wall),
        "peers_memory": table(("memory of both passes, MB", *OF_MEMORY.values()), memory),
        "short_cudnn": f"{short_cudnn} of {len(short)}",
        "auto_behind": f"{behind - 1:.0%}",
        "ordered_since": str(len(ORDERED_SINCE)),
        "invariant_forward": span(cost(shape, "forward") for shape in shapes),
        "invariant_both": span(cost for _, cost in costs),
        **{
            f"invariant_{d}": span([cost for width, cost in costs if width == f"D{d}"])
            for d in (64, 128, 256)
        },
    }


PARTS = (
    agreement,
    planted,
    kernels,
    wall,
    portable,
    lengths,
    compilation,
    tiles,
    beside_peers,
)
