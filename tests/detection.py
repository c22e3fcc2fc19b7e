"""Count the planted faults that a judge, three tolerances and a training loss find.

    OMP_NUM_THREADS=1 .venv/bin/python tests/detection.py paper/data/detection_cpu.json

**Faults.** Those of `planted_faults`, and faults of graded size (`GRADED`). A fault takes part if
it changes a bit of a result here. Those of NaN, and of options that no call here has, do not.

**Suite.** Each fault runs on 4 ranks, in a zigzag ring and in Magi attention with two casts, under
a mask of documents and under mask=None. It is found if one of these 4 cases is. All tests compare
the same five tensors: out, lse, dq, dk, dv. Inputs are normal random numbers. In bfloat16, a second
set is that of `canon check`: v and dout have an offset, so that roundings of sums show.

    judge               `agreement`, as in `canon check`, against float64
    assert_close        the defaults of torch.testing.assert_close: rtol 1.6e-2 in bfloat16, 1.3e-6
                        in float32; atol 1e-5. Against dense attention in the same dtype
    transformer engine  rtol = atol = 3.5e-2 in bfloat16, 5e-3 in float32, as in the test of context
                        parallelism of Transformer Engine, tests/pytorch/fused_attn/
                        run_fused_attn_with_cp.py, for grouped heads. Against the same
    flash-attention     the largest error is at most twice that of dense attention in the same
                        dtype, as in hopper/test_flash_attn.py. Against float64; there float32

**Loss.** A model of two layers trains for 100 steps on 4 ranks. Its loss is the mean over the last
10 steps. A run that raises, or whose loss is not finite, is found by both:

    loss, same seed     the loss is farther from that of the reference with the same seed than twice
                        the largest distance of an honest run on 2 or 3 ranks, or by the other
                        schedule
    loss, other seeds   the loss is more than three standard deviations above the mean of honest
                        runs with other seeds

It trains by the ring if the fault changes a result of the ring, else by Magi attention.

**False alarms.** The same tests judge honest code: the reference, and `canon.fast` on a CPU, or
runs of the reference on 2 and 3 ranks. The loss of such a run is judged without its own distance.
"""

import argparse
import copy
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
import torch.distributed as dist
from difference_model import ENDS as TRAINED_ENDS
from difference_model import Model, batch_of
from planted_faults import FAULTS_BY_KIND, with_fault
from sharded import on_this_rank
from torch.nn.functional import cross_entropy

import canon
from canon import Layout, Mask, reference
from canon.testing import Attended, agreement, oracle, orders, process_groups, record

RANKS, TOKENS, WIDTH = 4, 512, 32
HEADS = 4, 2
ENDS = (0, 40, 41, 200, TOKENS)
INPUTS = (("float32", "normal"), ("bfloat16", "normal"), ("bfloat16", "offset"))
SEEDS, HONEST_SEEDS = range(3), range(6)
STEPS, LAST = 100, 10
SCHEDULES = ("ring", "magi")
TOLERANCES = {"bfloat16": 3.5e-2, "float32": 5e-3}  # of Transformer Engine


def graded() -> dict[str, dict[str, tuple[str, str, str, str]]]:
    """Return faults of several sizes, as `FAULTS_BY_KIND`."""
    last = "out = out.transpose(1, 2).to(out_dtype)"
    found: dict[str, dict[str, tuple[str, str, str, str]]] = {"softmax": {}, "gradient": {}}
    for percent in ("10", "0.1", "0.01", "0.001"):
        factor = 1 + float(percent) / 100
        change = "q.shape[-1] ** -0.5", f"{factor!r} * q.shape[-1] ** -0.5"
        found["softmax"][f"the scale is off by {percent} %"] = ("", "checks", *change)
    for percent in ("10", "1", "0.1", "0.01"):
        factor = 1 - float(percent) / 100
        found["softmax"][f"one token's row is off by {percent} %"] = (
            "", "local", last, f"{last}; out[:, -9] *= {factor!r}",
        )  # fmt: skip
        found["gradient"][f"dk is off by {percent} %"] = (
            "", "backward", "of_keys() if keys_need_grad",
            f"[x * y for x, y in zip(of_keys(), ({factor!r}, 1))] if keys_need_grad",
        )  # fmt: skip
    return found


GRADED = graded()


class Tensors(NamedTuple):
    """The inputs of a case, and the results of honest code."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    mask: Mask | None
    exact: Attended
    honest: list[Attended]
    peer: Attended


def tensors(dtype: str, kind: str, seed: int, mask: Mask | None) -> Tensors:
    """Return the inputs of one case, with the oracle's results and honest ones."""
    draw = torch.Generator().manual_seed(seed)
    h, g = HEADS
    q, k, v, dout = (torch.randn(1, TOKENS, heads, WIDTH, generator=draw) for heads in (h, g, g, h))
    dlse = torch.randn(1, h, TOKENS, generator=draw)
    if kind == "offset":
        place = torch.cat([torch.arange(n) / n for n in torch.tensor(ENDS).diff()])
        offset = torch.where((place < 0.25) | (place >= 0.75), 3.0, -3.0)[:, None, None]
        v, dout = v + offset, dout + offset
    given = [x.to(getattr(torch, dtype)) for x in (q, k, v, dout)]
    honest = orders(*given, mask, None, dlse)
    return Tensors(*given, dlse, mask, oracle(*given, mask, None, dlse), honest, honest[0])


def attended(module, schedule: str, x: Tensors) -> Attended:
    """Return the results of one distributed function over the whole sequence, from all ranks."""
    mask = Mask.causal(TOKENS) if x.mask is None else x.mask
    layout = layout_of(schedule, mask, RANKS)
    attend = partial(function_of(module, schedule), mask=x.mask, layout=layout, return_lse=True)
    given = x.q, x.k, x.v, x.dout, x.dlse
    got = process_groups.threads(lambda: on_this_rank(attend, layout, given), RANKS)[0]
    return Attended(*(mine.to(peer.dtype) for mine, peer in zip(got, x.peer, strict=True)))


def layout_of(schedule: str, mask: Mask, ranks: int) -> Layout:
    if schedule == "ring":
        return Layout.zigzag(mask.queries, ranks)
    return reference.dispatch(mask, ranks)


def function_of(module, schedule: str):
    if schedule == "ring":
        return module.ring_attention
    return partial(module.magi_attention, casts=2)


# ------------------------------------------------------------------ tests of tensors
def judge_finds(got: Attended, x: Tensors) -> bool:
    return not agreement(got, x.exact, x.honest).agrees


def assert_close_finds(got: Attended, x: Tensors, **tolerance: float) -> bool:
    try:
        torch.testing.assert_close(tuple(got), tuple(x.peer), **tolerance)
    except AssertionError:
        return True
    return False


def transformer_engine_finds(got: Attended, x: Tensors) -> bool:
    tolerance = TOLERANCES[str(x.q.dtype).removeprefix("torch.")]
    return assert_close_finds(got, x, rtol=tolerance, atol=tolerance)


def flash_attention_finds(got: Attended, x: Tensors) -> bool:
    worst = lambda result: [
        float((t.double() - true).abs().max()) for t, true in zip(result, x.exact, strict=True)
    ]
    return not all(
        mine <= 2 * theirs for mine, theirs in zip(worst(got), worst(x.peer), strict=True)
    )


TESTS = {
    "judge": judge_finds,
    "assert_close": assert_close_finds,
    "transformer engine": transformer_engine_finds,
    "flash-attention": flash_attention_finds,
}


def size_of(got: Attended, x: Tensors) -> float:
    """Return the largest relative error in L2 of the five tensors."""
    pairs = zip(got, x.exact, strict=True)
    return max(float((t.double() - true).norm() / true.norm()) for t, true in pairs)


class Suite:
    """The 4 cases of one dtype, kind of inputs and seed."""

    def __init__(self, dtype: str, kind: str, seed: int):
        self.named = {"dtype": dtype, "inputs": kind, "seed": seed}
        self.inputs = [tensors(dtype, kind, seed, mask) for mask in (Mask.documents(ENDS), None)]
        self.cases = [(schedule, x) for schedule in SCHEDULES for x in self.inputs]
        self.right = [attended(reference, *case) for case in self.cases]

    def run(self, module) -> dict:
        """Return the tests that find a fault in a module, its size, and whether a bit changed."""
        found, sizes, changed = dict.fromkeys(TESTS, False), [0.0], []
        for (schedule, x), right in zip(self.cases, self.right, strict=True):
            try:
                got = attended(module, schedule, x)
            except Exception as error:
                return self.named | {
                    "raises": type(error.__cause__ or error).__name__,
                    "found": dict.fromkeys(TESTS, True),
                    "changed": [*changed, schedule],
                }
            changed += [] if all(map(torch.equal, got, right)) else [schedule]
            sizes.append(size_of(got, x))
            found = {name: found[name] or test(got, x) for name, test in TESTS.items()}
        return self.named | {"size": max(sizes), "found": found, "changed": changed}


# ------------------------------------------------------------------ training
def losses(module, schedule: str, dtype: str, seed: int, ranks: int = RANKS) -> list[float]:
    """Train, and return the loss of each step."""
    mask = Mask.documents(TRAINED_ENDS)
    layout = layout_of(schedule, mask, ranks)
    torch.manual_seed(seed)
    model = Model()

    def on_a_rank() -> list[float]:
        rank, mine, found = dist.get_rank(), copy.deepcopy(model), []
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, foreach=True)
        draw = torch.Generator().manual_seed(seed)
        attention = lambda q, k, v: function_of(module, schedule)(q, k, v, mask, layout)
        for _ in range(STEPS):
            text = batch_of(draw)
            part = layout.shard_batch({"text": text, "labels": text}, rank, TRAINED_ENDS)
            logits = mine(
                part["text"], part["position_ids"], attention, getattr(torch, dtype)
            ).flatten(0, 1)
            labels = part["shift_labels"].flatten()
            loss = cross_entropy(logits, labels, reduction="sum") / text.numel()
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach()
            for x in (total, *(parameter.grad for parameter in mine.parameters())):
                dist.all_reduce(x)
            found.append(total.item())
            optimizer.step()
        return found

    return process_groups.threads(on_a_rank, ranks)[0]


def last_loss(*given, **options) -> float:
    """Return the mean loss of the last steps; infinity if the run raises or diverges."""
    try:
        found = torch.tensor(losses(*given, **options)[-LAST:]).mean()
    except Exception:
        return float("inf")
    return float(found) if found.isfinite() else float("inf")


class Training:
    """The losses of honest runs in one dtype."""

    def __init__(self, dtype: str):
        run = partial(last_loss, reference)
        self.dtype = dtype
        self.right = {
            (schedule, seed): run(schedule, dtype, seed)
            for schedule in SCHEDULES
            for seed in HONEST_SEEDS
        }
        self.others = {
            (schedule, seed, ranks): run(schedule, dtype, seed, ranks=ranks)
            for schedule in SCHEDULES
            for seed in SEEDS
            for ranks in (2, 3)
        }

    def distances(self, left_out: tuple | None = None) -> list[float]:
        """Return the distances between honest runs with the same seed, without one of them."""
        found = [
            abs(loss - self.right[schedule, seed])
            for (schedule, seed, ranks), loss in self.others.items()
            if (schedule, seed, ranks) != left_out
        ]
        return found + [abs(self.right["ring", s] - self.right["magi", s]) for s in HONEST_SEEDS]

    def judged(self, loss: float, schedule: str, seed: int, left_out: tuple | None = None) -> dict:
        """Return the loss tests that find a fault."""
        others = [x for (_, other), x in self.right.items() if other != seed]
        distance = abs(loss - self.right[schedule, seed])
        return {
            "loss, same seed": not distance <= 2 * max(self.distances(left_out)),
            "loss, other seeds": not loss <= mean(others) + 3 * stdev(others),
        }

    def run(self, module, schedule: str, seed: int) -> dict:
        loss = last_loss(module, schedule, self.dtype, seed)
        named = {"dtype": self.dtype, "schedule": schedule, "seed": seed, "loss": loss}
        return named | {"found": self.judged(loss, schedule, seed)}

    def honest(self) -> list[dict]:
        """Return the false alarms of honest runs."""
        return [
            {
                "dtype": self.dtype,
                "schedule": schedule,
                "seed": seed,
                "ranks": ranks,
                "loss": loss,
                "found": self.judged(loss, schedule, seed, (schedule, seed, ranks)),
            }
            for (schedule, seed, ranks), loss in self.others.items()
        ]


# ------------------------------------------------------------------ the experiment
def faulty_modules() -> list[tuple[str, str, object]]:
    """Return kind, name and module of every fault."""
    kinds = {kind: faults | GRADED.get(kind, {}) for kind, faults in FAULTS_BY_KIND.items()}
    return [
        (kind, name, with_fault(*fault[1:]))
        for kind, faults in kinds.items()
        for name, fault in faults.items()
    ]


def experiment(report=print) -> list[dict]:
    """Return the results of all faults, and of honest code."""
    modules, results, taking_part = faulty_modules(), [], {}
    for dtype, kind in INPUTS:
        for suite in (Suite(dtype, kind, seed) for seed in SEEDS):
            for name, module in (("reference", reference), ("canon.fast", canon.fast)):
                results.append({"what": "honest tensors", "code": name} | suite.run(module))
            for group, fault, module in modules:
                row = suite.run(module)
                for schedule in row["changed"]:
                    taking_part.setdefault((group, fault), (module, set()))[1].add(schedule)
                results.append({"what": "tensors", "kind": group, "fault": fault} | row)
            report(suite.named)
    for dtype in dict.fromkeys(dtype for dtype, _ in INPUTS):
        training = Training(dtype)
        results += [{"what": "honest loss"} | row for row in training.honest()]
        report("training", dtype, max(training.distances()), sorted(training.right.values()))
        for (group, fault), (module, schedules) in taking_part.items():
            schedule = next(name for name in SCHEDULES if name in schedules)
            for seed in SEEDS:
                row = training.run(module, schedule, seed)
                results.append({"what": "loss", "kind": group, "fault": fault} | row)
            report("training", dtype, fault)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    path = parser.parse_args().record
    command = record.command("python", "tests/detection.py", str(path))
    what = " ".join(__doc__.split("**Faults.**")[1].replace("**", "").split())
    record.write(path, command, experiment(), what=what)


if __name__ == "__main__":
    main()
