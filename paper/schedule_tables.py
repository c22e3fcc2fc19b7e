"""Compute tables and numbers of `measured.md` and `records.md`: several GPUs, packed documents,
host time and plans.
"""

from collections.abc import Sequence
from itertools import product
from math import ceil

from records import load, median, only, span, table, tokens

TWO = "schedules_peers_two_h200"
SCHEDULES = (  # name in the record, name on the page
    ("ring contiguous", "ring, contiguous shards"),
    ("ring zigzag", "ring, zigzag"),
    ("ring striped", "ring, striped"),
    ("strided contiguous 8", "strided, contiguous shards, 8 key heads at a time"),
    ("strided zigzag 1", "strided, zigzag, 1 key head at a time"),
    ("strided zigzag 2", "strided, zigzag, 2"),
    ("strided zigzag 4", "strided, zigzag, 4"),
    ("strided zigzag 4, small ends", "strided, zigzag, 4, short first and last head groups"),
    ("strided zigzag 8", "strided, zigzag, 8"),
    ("magi, 0 stages", "magi, one group cast"),
    ("magi, 0 stages, keys kept", "the same, `keep_kv`"),
    ("magi, 1 stages", "magi, own keys first"),
    ("magi, 1 stages, keys kept", "the same, `keep_kv`"),
    ("torch cudnn allgather", "torch `context_parallel`, cuDNN, all-gather"),
    ("torch cudnn alltoall", "torch `context_parallel`, cuDNN, all-to-all"),
    ("torch flash alltoall", "torch `context_parallel`, flash, all-to-all"),
    ("one GPU", "one GPU, the whole sequence"),
)
UNLISTED = (  # in the records, and in no table of causal sequences
    *(
        "strided contiguous 8",
        "strided zigzag 2",
        "strided zigzag 4, small ends",
        "magi, 0 stages, keys kept",
    ),
    *("magi, 1 stages, keys kept", "torch cudnn alltoall", "torch flash alltoall"),
)
PACKED = (
    *((name, label) for name, label in SCHEDULES if name.startswith("magi")),
    ("magi, 2 stages", "magi, own keys first, then two group casts"),
    ("ring zigzag", "ring, zigzag"),
    ("strided zigzag 8", "strided, zigzag, 8 key heads at a time"),
    ("one GPU", "one GPU, the whole pack"),
)


def schedule_table(records: Sequence[str], lengths: Sequence[int]) -> str:
    """Return the table of schedules, with the speed of the forward and of both passes by the number
    of tokens.
    """
    found = {
        (row["schedule"], int(row["shape"].split()[1][1:])): (
            f"{row['forward_tflops']:.0f} / {row['both_tflops']:.0f}"
        )
        for record in records
        for row in load(record)["results"]
    }
    rows = [
        [label, *(found.get((name, n), "") for n in lengths)]
        for name, label in SCHEDULES
        if name not in UNLISTED and any((name, n) in found for n in lengths)
    ]
    return table(("forward / both passes", *(f"{tokens(n)} tokens" for n in lengths)), rows)


def schedule(record: str, name: str, n: int) -> dict:
    """Return the row of a record for a schedule and a number of tokens."""
    return next(
        row
        for row in load(record)["results"]
        if row["schedule"] == name and f" S{n} " in row["shape"]
    )


OF_TWO = {  # names in the record and on the page
    "ring zigzag": "ring, zigzag",
    "strided zigzag, no options": "strided, zigzag",
    "magi, no options": "magi",
    "mesh 1 x 2, strided zigzag": "mesh of 1 x 2, zigzag",
    "strided zigzag, repeatable": "strided, zigzag, deterministic",
    "magi, repeatable": "magi, deterministic",
    "strided zigzag 8, rank invariant": "strided, zigzag, rank invariant",
    "ring-flash-attn zigzag": "ring-flash-attn on flash-attn-4, zigzag",
    "torch cudnn allgather": "torch `context_parallel`, cuDNN, all-gather",
    "one GPU": "one GPU, the whole sequence",
}
FASTEST = "ring zigzag", "strided zigzag, no options", "magi, no options"  # Canon's, by a group
LENGTHS = (8192, 32768, 131072)


def of_two(name: str, n: int, clock: str = "both_wall") -> float:
    """Return the median ms of both passes of a schedule on two GPUs."""
    return median(schedule(TWO, name, n)[f"{clock}_ms"])


OF_FOUR = {
    "magi": "magi, no options",
    "strided": "strided zigzag, no options",
    "mesh": "mesh 2 x 2, strided zigzag",
    "ring": "ring zigzag",
}


def wall_of_four(name: str) -> float:
    """Return the median wall ms of both passes of the longest sequence on four GPUs."""
    return median(schedule("schedules_defaults_four_h200", name, LENGTHS[-1])["both_wall_ms"])


def two_gpus() -> dict[str, str]:
    """Return the table of two GPUs, and ratios of wall times to the least of Canon's."""
    rows = []
    for name, label in OF_TWO.items():
        times = [f"{of_two(name, n):.2f} [{of_two(name, n, 'both'):.2f}]" for n in LENGTHS]
        rows.append([label, *times, f"{schedule(TWO, name, LENGTHS[-1])['peak_mb']:.0f}"])
    header = ("both passes, wall ms [GPU ms]", *(f"{tokens(n)} tokens" for n in LENGTHS))
    default = "strided zigzag, no options"
    over = lambda name: span(of_two(name, n) / of_two(default, n) for n in LENGTHS)
    over_best = lambda name: span(
        of_two(name, n) / min(of_two(each, n) for each in FASTEST) for n in LENGTHS
    )
    ring = [of_two("ring zigzag", n) / of_two(default, n) - 1 for n in LENGTHS]
    return {
        "two": table((*header, "MB, longest"), rows),
        "two_wall": f"{ceil(100 * max(ring))}%",
        **{f"four_{x}": f"{wall_of_four(name):.1f}" for x, name in OF_FOUR.items()},
        "mesh_over_best": over_best("mesh 1 x 2, strided zigzag"),
        "ring_peer_over_strided": over("ring-flash-attn zigzag"),
        "torch_over_strided": over("torch cudnn allgather"),
        "deterministic_over_default": span(
            of_two(f"{name}, repeatable", n) / of_two(f"{name}, no options", n)
            for name in ("strided zigzag", "magi")
            for n in LENGTHS
        ),
        "invariant_over_default": span(
            of_two("strided zigzag 8, rank invariant", n) / of_two(default, n) for n in LENGTHS
        ),
    }


def schedules() -> dict[str, str]:
    """Return the tables of schedules on several GPUs, and the ratios of their speeds."""

    def both(record: str, name: str, n: int) -> float:
        return schedule(record, name, n)["both_tflops"]

    def best(record: str, kind: str, n: int) -> float:
        return max(
            row["both_tflops"]
            for row in load(record)["results"]
            if row["schedule"].startswith(kind) and f" S{n} " in row["shape"]
        )

    def hidden(record: str, name: str, n: int) -> str:
        row = schedule(record, name, n)
        return f"{row['exposed_ms']:.1f} of {median(row['both_ms']):.0f} ms"

    eight, four = "schedules_eight_h200", "schedules_four_h200"
    share = lambda record, name, n: f"{both(record, name, n) / both(record, 'one GPU', n):.0%}"
    runs = [(eight, n) for n in (32768, 131072)] + [(four, n) for n in (16384, 65536, 262144)]
    strided_over = lambda kind: span(
        best(r, "strided zigzag", n) / best(r, kind, n) for r, n in runs
    )
    return {
        "eight": schedule_table((eight, "schedules_long_eight_h200"), (32768, 131072, 524288)),
        "four": schedule_table((four,), (16384, 65536, 262144)),
        "strided_over_torch": strided_over("torch"),
        "strided_over_ring": strided_over("ring"),
        "ring_share_short": share(eight, "ring zigzag", 32768),
        "strided_share_short": share(eight, "strided zigzag 8", 32768),
        "strided_share_two": share(eight, "strided zigzag 2", 131072),
        "strided_share_four": share(eight, "strided zigzag 4", 131072),
        "strided_share_eight": share(eight, "strided zigzag 8", 131072),
        "strided_share_figure": span(
            [
                100 * both(r, "strided zigzag 8", n) / both(r, "one GPU", n)
                for r, n in (("schedules_two_h200", 32768), (four, 65536), (eight, 131072))
            ],
            0,
        ),
        "contiguous_share": share(eight, "ring contiguous", 131072),
        "hidden_strided_eight": hidden(eight, "strided zigzag 4", 131072),
        "hidden_ring_eight": hidden(eight, "ring zigzag", 131072),
        "hidden_strided_four": hidden(four, "strided zigzag 4", 65536),
        "hidden_ring_four": hidden(four, "ring zigzag", 65536),
    }


def pack_speeds() -> dict[tuple[str, int], list[tuple[float, float, float | None]]]:
    """Return (forward, backward alone, ms that no kernel hides) of each pack, by schedule and
    column: 0 is 8 GPUs, 1 is 4.

    The ms are None where the profiler's were impossible.
    """
    groups = (
        ("packs_eight_h200", "packs_later_eight_h200", "packs_magi_eight_h200"),
        ("packs_four_h200",),
    )
    found: dict[tuple[str, int], list[tuple[float, float, float | None]]] = {}
    for i, records in enumerate(groups):
        seen = set()
        for row in (row for record in records for row in load(record)["results"]):
            key = row["schedule"], i
            if (key, row["shape"]) in seen:  # the first run of a pack counts
                continue
            seen.add((key, row["shape"]))
            one, both = median(row["forward_ms"]), median(row["both_ms"])
            alone = 2.5 * row["forward_tflops"] * one / (both - one)
            found.setdefault(key, []).append((row["forward_tflops"], alone, row.get("exposed_ms")))
    return found


def packs() -> dict[str, str]:
    """Return the table of packed documents, and the ratios of their speeds."""
    found = pack_speeds()
    mean = lambda key, i: sum(row[i] for row in found[key]) / len(found[key])
    rows = [
        [label, *(f"{mean((name, i), 0):.0f} / {mean((name, i), 1):.0f}" for i in range(2))]
        for name, label in PACKED
    ]
    one, whole = "magi, 0 stages", "one GPU"
    both = [(i, j) for i in range(2) for j in range(2)]
    over = lambda other: span([mean((one, i), j) / mean((other, i), j) for i, j in both], 1)
    return {
        "packs": table(
            (
                "forward / backward alone",
                "8 GPUs, 65,536 tokens, 9 packs",
                "4 GPUs, 32,768 tokens, 10 packs",
            ),
            rows,
        ),
        "packs_over_ring": over("ring zigzag"),
        "packs_over_strided": over("strided zigzag 8"),
        "packs_share": span([100 * mean((one, i), j) / mean((whole, i), j) for i, j in both], 0),
        "packs_exposed": span([median(row[2] for row in found[one, i]) for i in range(2)], 1),
        **{f"packs_two_{name}": span(x) for name, x in packs_of_two().items()},
    }


def packs_of_two() -> dict[str, list[float]]:
    """Return wall times of both passes on packs over those of magi, on two GPUs without options."""
    times: dict[str, list[float]] = {}
    for row in load("packs_two_h200")["results"]:
        times.setdefault(row["schedule"], []).append(median(row["both_wall_ms"]))
    names = {"ring": "ring zigzag", "strided": "strided zigzag, no options"}
    names |= {"one": "one GPU", "deterministic": "magi, repeatable"}
    pairs = lambda name: zip(times[name], times["magi, no options"], strict=True)
    return {short: [x / y for x, y in pairs(name)] for short, name in names.items()}


NEW_MASK = ("first_ms", "repeated_ms", "new_mask_ms")


def host() -> dict[str, str]:
    """Return the tables of host time."""
    results = load("host_h200")["results"]
    clocks = lambda row, name: (
        f"{median(row[f'{name}_wall_ms']):.3f} ({median(row[f'{name}_host_ms']):.3f})"
    )
    rows = [
        [
            row["shape"],
            row["contender"],
            *(clocks(row, name) for name in ("forward", "both", "chain")),
        ]
        for row in results
    ]
    header = ("shape", "wall (host) ms", "forward", "both passes", "a layer of 8")
    new_masks = [
        [
            row["shape"],
            f"{median(row['documents']):.0f}",
            *(f"{median(row[name]):.1f}" for name in NEW_MASK),
        ]
        for row in load("masks_h200")["results"]
        if "first_ms" in row
    ]
    names = (
        "ring zigzag",
        "strided zigzag 1",
        "strided zigzag 4",
        "strided zigzag 8",
        "magi, 0 stages",
        "torch cudnn allgather",
        "one GPU",
    )
    timed = {(row["shape"], row["contender"]): row for row in results}
    short = dict.fromkeys(shape for shape, _ in timed if "S8192" not in shape)
    wall = lambda shape, who, name: median(timed[shape, who][f"{name}_wall_ms"])
    to_cudnn = lambda name: span(
        wall(x, "canon auto", name) / wall(x, "SDPA cudnn", name) for x in short
    )
    share = [wall(x, "no kernels", "both") / wall(x, "canon auto", "both") for x in short]
    labels = dict(SCHEDULES)
    times: dict[tuple, list[float]] = {}
    for row, key in product(load("host_beside_987cd40_h200")["results"], ("wall_ms", "host_ms")):
        of = row["tree"], row["measure"], row["shape"], key
        times.setdefault(of, []).extend(row[key])
    to_base = lambda measure: span(
        median(times["b2e1a817", *of]) / median(times["987cd40", *of])
        for of in product([measure], short, ("wall_ms", "host_ms"))
    )
    launching = []
    for name in names:
        row = schedule("schedules_eight_h200", name, 32768)
        launching.append(
            [
                labels[name],
                f"{median(row['both_launches_ms']):.1f}",
                f"{median(row['both_ms']):.1f}",
            ]
        )
    return {
        "host_calls": table(header, rows, left=2),
        "host_short": table(
            header, [row for row in rows if row[1] in ("canon auto", "SDPA cudnn")], left=2
        ),
        "short_forward": to_cudnn("forward"),
        "short_both": to_cudnn("both"),
        "short_chain": to_cudnn("chain"),
        **{f"base_{name}": to_base(name) for name in ("forward", "both", "chain")},
        "no_kernels": span([100 * x for x in share], 0),
        "new_masks": table(
            ("shape", "documents", "first ms", "repeated ms", "new mask ms"), new_masks
        ),
        "agreed_us": " and ".join(
            f"{us:.0f}" for us in load("agreement_two_h200")["agreed_call_us"]
        ),
        "ring_with_first": _ring_wall(0, True),
        "ring_without_first": _ring_wall(0, False),
        "ring_with": _ring_wall(1, True),
        "ring_without": _ring_wall(1, False),
        "host_schedules": table(
            ("ms, both passes, 8 GPUs, 32,768 tokens", "host: launches", "GPU"), launching
        ),
    }


def plans() -> dict[str, str]:
    """Return the table of plans, with means over packs, and the worst send of a planner that counts
    received tokens only.
    """
    results, rows = load("plans")["results"], []
    mean = lambda values: sum(values) / len(values)
    packs = [row for row in results if row["kind"] == "packs"]  # 8 ranks first
    received = [row for row in load("plans_received")["results"] if row["kind"] == "packs"]
    quality = lambda row: [
        f"{mean(row[key]):.3f}" for key in ("balance", "volume", "worst_receive", "worst_send")
    ]
    for row in packs:
        rows.append(
            [str(row["ranks"]), tokens(row["tokens"]), *quality(row), f"{median(row['ms']):.0f} ms"]
        )
    large = next(row for row in results if row["kind"] == "a large pack")
    header = ("ranks", "tokens", "balance", "volume", "worst receive", "worst send", "planned in")
    return {
        "balance_eight": f"{mean(packs[0]['balance']):.2f}",
        "volume_eight": f"{mean(packs[0]['volume']):.0%}",
        "planned_large": tokens(round(median(large["ms"]))),
        "plans": table(header, rows, left=0),
        "plan_sent_received": span([mean(row["worst_send"]) for row in received], 3),
    }


def training() -> dict[str, str]:
    """Return the table of the training experiment: tokens per second and peak memory,
    by function.
    """
    causal, packed, two = (
        {row["function"]: row for row in load(f"swap_{name}_h200")["results"]}
        for name in ("causal", "packed", "causal_two")
    )
    speed = lambda row: (
        f"{tokens(round(row['tokens_per_second']))} ({row['peak_bytes'] / 1e9:.1f} GB)"
        if row
        else "-"
    )
    names = dict.fromkeys((*causal, *two))
    rows = [[name, *(speed(found.get(name)) for found in (causal, packed, two))] for name in names]
    header = (
        "tokens per second (peak memory)",
        "one causal sequence",
        "packed documents",
        "one causal sequence, two H200s",
    )
    return {"training": table(header, rows)}


def messages() -> dict[str, str]:
    """Return the ms of gathers beside kernels and alone, and the gains of a message that starts
    first and of copy engines.
    """
    profile = only(
        load("schedules_timeline_four_h200")["results"],
        schedule="strided zigzag 4",
        transport="NCCL's default",
    )
    ranks = [
        [(begin, length / 1000) for begin, length, kernel in kernels if "AllGather" in kernel]
        for kernels in profile["kernels_of_both_by_rank"]
    ]
    longest = [max(length for _, length in found) for found in ranks]
    alone = [length for found in ranks for begin, length in found if begin < 1000]
    waiting, late = (load(f"packs_{name}_four_h200")["results"] for name in ("begun", "not_begun"))
    pairs = [
        (one, two)
        for one, two in zip(waiting, late, strict=True)
        if one["schedule"].startswith("magi, 1")
    ]
    gain = lambda key: span(one[f"{key}_tflops"] / two[f"{key}_tflops"] for one, two in pairs)
    copied = [
        row["both_tflops"]
        / schedule("schedules_eight_h200", row["schedule"], 131072)["both_tflops"]
        for row in load("schedules_copy_engines_eight_h200")["results"]
    ]
    return {
        "gather_worst": span(longest[1:], 1),
        "gather_alone": span(alone, 2),
        "started_forward": gain("forward"),
        "started_both": gain("both"),
        "copy_both": span(copied),
    }


def methods() -> dict[str, str]:
    """Return a table of both passes by repeatable methods, and with "fused" in any order."""
    found, rows = load("methods_two_and_four_h200")["results"], []
    for schedule_name, ranks in (("zigzag", 2), ("strided", 2), ("zigzag", 4), ("strided", 4)):
        for n in dict.fromkeys(x["tokens"] for x in found if x["ranks"] == ranks):
            times = [
                only(found, schedule=schedule_name, ranks=ranks, tokens=n, backward=method)[
                    "both_wall_ms"
                ]
                for method in ("auto", "fused")
            ]
            case = f"{schedule_name}, {ranks} GPUs, {tokens(n)} tokens"
            rows.append([case, *(f"{x:.2f}" for x in times)])
    return {"methods": table(("both passes, wall ms", "repeatable", "any order"), rows)}


def links() -> dict[str, str]:
    """Return the rates of messages, in a profile of four GPUs with 16,384 tokens each."""
    rates = {
        "gather_rate": rate("strided zigzag 8", "AllGather", 3 * 4),
        "hop_rate": rate("ring zigzag", "SendRecv", 4),
        "exchange_rate": rate("strided zigzag 8 fused", "SendRecv", 3 * 8, last=True),
    }
    return {name: f"{gigabytes:.0f}" for name, gigabytes in rates.items()}


def rate(name: str, kernel: str, bytes_of_key: int, last: bool = False) -> float:
    """Return the GB/s of the first or last message of a schedule, with so many bytes for each
    token, of 8 key heads of width 128.

    The first one starts on all ranks together; its slowest rank counts. A rank of the last one may
    wait; the fastest counts."""
    record = load("schedules_timeline_four_h200")["results"]
    row = only(record, schedule=name, transport="NCCL's default")
    of = [
        [us for _, us, label in kernels if kernel in label]
        for kernels in row["kernels_of_both_by_rank"]
    ]
    us = min(found[-1] for found in of) if last else max(found[0] for found in of)
    return 16384 * 8 * 128 * bytes_of_key / us / 1e3


PARTS = (
    schedules,
    two_gpus,
    methods,
    packs,
    host,
    plans,
    training,
    messages,
    links,
)


def _ring_wall(rank: int, checked: bool) -> str:
    """Return the median wall time of a rank's forward,
    with or without the comparison of arguments.
    """
    rows = load("agreement_two_h200")["results"]
    return tokens(
        round(median(row["forward_us"][rank] for row in rows if row["checked"] is checked))
    )
