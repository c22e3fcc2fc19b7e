"""The program `notebooks/long_training.py`: its loss is that of one rank, its formula counts what
the model has and saves.
"""

import json
from functools import partial

import long_training
import pytest
from folders import NOTEBOOKS
from held_memory import Held
from programs import on_forked_ranks

from canon.testing import process_groups

SMALL = dict(
    tokens=384, layers=2, width=32, heads=4, key_heads=2, head_width=8, mlp_width=64,
    vocabulary=64, full_every=2, window=40, piece=100, steps=2,
)  # fmt: skip
# float32: 4.3 has a spacing of 5e-7; AdamW enlarges roundings of gradients near 0
ROUNDING = 5e-6


def run_of(**options):
    return long_training.Run(**SMALL | options)


RUNS = {
    "zigzag": dict(attention="zigzag"),
    "strided, fast": dict(attention="strided", half="fast"),
    "magi, documents": dict(attention="magi", mean=90),
}


def all_losses():
    return {name: long_training.measured(run_of(**run))["loss"] for name, run in RUNS.items()}


def test_the_loss_does_not_depend_on_the_number_of_ranks():
    one, two = (process_groups.processes(all_losses, ranks)[0] for ranks in (1, 2))
    for name, losses in one.items():
        assert len(losses) == 3
        assert two[name] == pytest.approx(losses, abs=ROUNDING), name


def first_losses(runs):
    trainers = [long_training.Trainer(run_of(**run)) for run in runs]
    return [trainer.step(trainer.batch(0)) for trainer in trainers]


def test_some_layers_see_a_window_and_the_others_all_earlier_tokens():
    """SDPA is the judge of full layers; it has no window."""
    wide = [dict(full_every=1, attention="torch"), dict(full_every=1), dict(window=384)]
    program = partial(first_losses, [*wide, dict(window=40), dict(full_every=3, window=40)])
    sdpa, full, window_of_all, narrow, narrow_only = process_groups.processes(program, 1)[0]
    assert [full, window_of_all] == pytest.approx([sdpa, sdpa], abs=ROUNDING)
    losses = sorted([sdpa, narrow, narrow_only])
    assert min(y - x for x, y in zip(losses, losses[1:], strict=False)) > 50 * ROUNDING


def test_the_record_has_all_steps_beside_the_formula(tmp_path):
    options = {x: [y] for x, y in SMALL.items()} | {"tokens": [128, 256], "steps": [1]}
    words = [
        str(word)
        for name, values in options.items()
        for word in (f"--{name.replace('_', '-')}", *values)
    ]
    path = tmp_path / "long.json"
    output = on_forked_ranks(NOTEBOOKS / "long_training.py", 2, *words, "--record", str(path))
    record = json.loads(path.read_text())
    assert record.keys() >= {"command", "commit", "date", "machine"}
    assert [entry["tokens"] for entry in record["results"]] == [128, 256]
    for entry in record["results"]:
        formula = long_training.Formula(run_of(tokens=entry["tokens"], steps=1), 2)
        assert str(formula) in output
        assert (entry["ranks"], entry["parameters"]) == (2, formula.parameters)
        assert len(entry["loss"]) == len(entry["seconds"]) == 2
        assert entry["seconds_per_step"] == entry["seconds"][1]  # without the first step
        assert entry["tokens_per_second"] == entry["tokens"] / entry["seconds_per_step"]
        assert entry["peak_bytes"] is None  # on a CPU
        assert entry["predicted"] == {
            "seconds": formula.seconds,
            "peak_bytes": formula.peak_bytes,
            "tensors": formula.tensors(),
        }


def held_bytes():
    """Return the most bytes of a step after the first beside the model and the states of AdamW, and
    the parameters of the model.
    """
    found = []
    for layers in (2, 4):
        trainer = long_training.Trainer(run_of(layers=layers, **LARGER))
        trainer.step(trainer.batch(0))
        with Held() as held:
            trainer.step(trainer.batch(1))
        found.append((held.peak, sum(x.numel() for x in trainer.model.parameters())))
    return found


LARGER = dict(tokens=1024, width=64, heads=2, key_heads=1, head_width=16, mlp_width=256,
              piece=128, full_every=100, half="fast")  # fmt: skip


def test_the_formula_counts_parameters_and_inputs_of_layers_and_is_near_the_peak_on_a_cpu():
    """It is at most a third above. On a GPU, attention has other parts, and parameters are also in
    bfloat16.
    """
    peaks, parameters = zip(*process_groups.processes(held_bytes, 1)[0], strict=True)
    formulas = [long_training.Formula(run_of(layers=layers, **LARGER), 1) for layers in (2, 4)]
    assert [*parameters] == [formula.parameters for formula in formulas]
    kept = ("parameters and states of AdamW, float32", "whole layers and head")
    for peak, formula in zip(peaks, formulas, strict=True):
        sizes = formula.tensors()
        assert peak <= formula.peak_bytes - sum(sizes[name] for name in kept) <= 4 / 3 * peak
    few, many = (formula.tensors()["inputs of all layers"] for formula in formulas)
    assert many - few == 2 * 1024 * 64 * 4
    assert peaks[1] - peaks[0] == pytest.approx(many - few, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(ranks):
    formula = long_training.Formula(long_training.Run(), ranks)
    longest = formula.longest(140e9)
    fits, more = (
        long_training.Formula(long_training.Run(tokens), ranks).peak_bytes
        for tokens in (longest, longest + 256 * ranks)
    )
    assert fits <= 140e9 < more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attention="torch"), "--full-every 1"),
        (dict(attention="torch", full_every=1, mean=64), "no --mean"),
        (dict(steps=0), "steps must be at least 1"),
    ],
)
def test_options_that_contradict_each_other_raise(options, message):
    with pytest.raises(ValueError, match=message):
        run_of(**options)


def test_context_parallel_of_torch_needs_gpus():
    program = partial(long_training.Trainer, run_of(attention="torch", full_every=1))
    with pytest.raises(RuntimeError, match="'torch' on 2 ranks needs a GPU for each"):
        process_groups.threads(program, 2)
