"""The program `notebooks/long_training.py`: its loss is that of one rank, its formula counts what
the model has and saves.
"""

import importlib
import json
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from held_memory import Held
from programs import on_forked_ranks

from canon.testing import process_groups

FOLDER = Path(__file__).parents[2] / "notebooks"
SMALL = dict(
    tokens=384, layers=2, width=32, heads=4, key_heads=2, head_width=8, mlp_width=64,
    vocabulary=64, full_every=2, window=40, piece=100, steps=2,
)  # fmt: skip
# float32: 4.3 has a spacing of 5e-7; AdamW enlarges roundings of gradients near 0
ROUNDING = 5e-6


def script():
    return importlib.import_module("long_training")


def run_of(**options):
    return script().Run(**SMALL | options)


RUNS = {
    "zigzag": dict(attention="zigzag"),
    "strided, fast": dict(attention="strided", half="fast"),
    "magi, documents": dict(attention="magi", mean=90),
}


def own_positions(batch, trainer, step):
    part = batch(trainer, step)
    return part | {"position_ids": torch.arange(part["ids"].shape[1])[None]}


def own_labels(batch, trainer, step):
    part = batch(trainer, step)
    return part | {"shift_labels": part["ids"].roll(-1, 1)}


FAULTS = {"positions of a shard": own_positions, "labels shifted in a shard": own_labels}


def all_losses():
    """Return the losses of all runs, and of `zigzag` with each fault."""
    training = script()
    found = {name: training.measured(run_of(**run))["loss"] for name, run in RUNS.items()}
    batch = training.Trainer.batch
    for name, fault in FAULTS.items():
        with mock.patch.object(training.Trainer, "batch", lambda *x, f=fault: f(batch, *x)):
            found[name] = training.measured(run_of())["loss"]
    return found


@pytest.fixture(scope="module")
def losses():
    """Return `all_losses` of one rank and of two."""
    return [process_groups.processes(all_losses, ranks)[0] for ranks in (1, 2)]


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_does_not_depend_on_the_number_of_ranks(losses, name):
    one, two = (found[name] for found in losses)
    assert len(one) == 3
    assert two == pytest.approx(one, abs=ROUNDING)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_loss_of_two_ranks(losses, fault):
    one, two = (found[fault] for found in losses)
    assert max(abs(x - y) for x, y in zip(one, two, strict=True)) > 50 * ROUNDING


def first_losses(runs):
    training = script()
    trainers = [training.Trainer(run_of(**run)) for run in runs]
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
    options = SMALL | {"tokens": "128 256", "steps": 1}
    pairs = [(f"--{name.replace('_', '-')}", *str(x).split()) for name, x in options.items()]
    path = tmp_path / "long.json"
    output = on_forked_ranks(FOLDER / "long_training.py", 2, *chain(*pairs), "--record", str(path))
    record = json.loads(path.read_text())
    assert record["command"].startswith("long_training.py")
    assert [entry["tokens"] for entry in record["results"]] == [128, 256]
    for entry in record["results"]:
        formula = script().Formula(run_of(tokens=entry["tokens"], steps=1), 2)
        assert str(formula) in output
        assert len(entry["loss"]) == len(entry["seconds"]) == entry["ranks"] == 2
        assert entry["predicted"]["tensors"] == formula.tensors()


def held_bytes():
    """Return the parameters, and the most bytes of a step after the first beside the model and the
    states of AdamW.
    """
    found = []
    for layers in (2, 4):
        trainer = script().Trainer(run_of(layers=layers, **LARGER))
        trainer.step(trainer.batch(0))
        with Held() as held:
            trainer.step(trainer.batch(1))
        found.append((sum(x.numel() for x in trainer.model.parameters()), held.peak))
    return found


LARGER = dict(tokens=1024, width=64, heads=2, key_heads=1, head_width=16, mlp_width=256,
              piece=128, full_every=100, half="fast")  # fmt: skip


def test_the_formula_is_at_most_a_third_above_the_peak_on_a_cpu():
    """On a GPU, attention has other parts, and parameters are also in bfloat16."""
    parameters, peaks = zip(*process_groups.processes(held_bytes, 1)[0], strict=True)
    formulas = [script().Formula(run_of(layers=layers, **LARGER), 1) for layers in (2, 4)]
    assert [formula.parameters for formula in formulas] == [*parameters]
    kept = ("parameters and states of AdamW, float32", "whole layers and head")
    for peak, formula in zip(peaks, formulas, strict=True):
        sizes = formula.tensors()
        assert peak <= formula.peak_bytes - sum(sizes[name] for name in kept) <= 4 / 3 * peak
    assert peaks[1] - peaks[0] == pytest.approx(2 * 1024 * 64 * 4, rel=0.01)
