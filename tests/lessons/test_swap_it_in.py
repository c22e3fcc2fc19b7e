"""The script `notebooks/swap_it_in.py`: checkpoints and options. Notebook 05 asserts that every
schedule and both halves train as one rank does, in fixed order with its bits, and that planted
faults show.
"""

import dataclasses
import json
import re
from functools import partial
from unittest import mock

import pytest
import swap_it_in
import swapping
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from folders import NOTEBOOKS
from programs import on_forked_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

# four steps of Adam enlarge float64 roundings of 1e-16 to 1e-13; a fault is above 1e-4
ROUNDING = 1e-9


# --- a checkpoint


def new_trainer(run):
    """Return a trainer whose weights FSDP2 divides. In fixed order every rank holds all weights."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with mock.patch.object(swap_it_in, "DistributedDataParallel", partial(fully_shard, mesh=mesh)):
        trainer = swap_it_in.Trainer(run)
    trainer.optimizer.param_groups[0]["params"] = trainer.parameters = [*trainer.model.parameters()]
    return trainer


def state_of(trainer):
    return dict(
        zip(("model", "optimizer"), get_state_dict(trainer.model, trainer.optimizer), strict=True)
    )


def trained(trainer, *steps):
    """Return the losses of the steps and then all weights."""
    losses = [trainer.step(trainer.batch(step))[0].item() for step in steps]
    weights = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    return torch.tensor(losses, dtype=torch.float64), torch.cat(
        [x.flatten() for x in weights.values()]
    )


def save(run, folder):
    """Save after two steps, and train for two more."""
    trainer = new_trainer(run)
    trained(trainer, 0, 1)
    dcp.save(state_of(trainer), checkpoint_id=folder)
    return trained(trainer, 2, 3)


def resume(run, folder, forgotten=""):
    """Train for the last two steps on other ranks. ``forgotten``: a part of the checkpoint that is
    not loaded.
    """
    trainer = new_trainer(run)
    state = state_of(trainer)
    dcp.load(
        {name: part for name, part in state.items() if name != forgotten}, checkpoint_id=folder
    )
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return trained(trainer, 2, 3)


def test_a_checkpoint_of_four_ranks_resumes_on_two(tmp_path):
    usual = swapping.Run("magi", tokens=256, layers=1, width=64, dtype="float64")
    # float32
    fixed = swapping.Run("magi", layers=1, width=64, rank_invariant=True, fixed_order=True)
    any_order = dataclasses.replace(fixed, fixed_order=False)
    saved, saved_fixed = swapping.on_ranks(
        4, [partial(save, run, tmp_path / run.dtype) for run in (usual, fixed)]
    )
    again = [partial(resume, run, tmp_path / run.dtype) for run in (usual, fixed, any_order)]
    again += [partial(again[0], forgotten=part) for part in ("model", "optimizer")]
    resumed, resumed_fixed, in_any_order, *faulty = swapping.on_ranks(2, again)
    assert (resumed[0] - saved[0]).abs().max() < ROUNDING
    assert all(map(torch.equal, resumed_fixed, saved_fixed))
    assert not torch.equal(in_any_order[1], saved_fixed[1])
    for losses, _ in faulty:
        assert (losses - saved[0]).abs().max() > 1e-4


def test_it_runs_alone_with_the_variables_of_torchrun_and_writes_a_record(tmp_path):
    options = ["--steps", "2", "--tokens", "128", "--width", "32", "--function", "zigzag", "magi"]
    options += ["--record", str(tmp_path / "run.json")]
    output = on_forked_ranks(NOTEBOOKS / "swap_it_in.py", 2, *options)
    step = r"^step \d: loss \d\.\d{6}, gradient \d\.\d{4}$"
    assert len(re.findall(step, output, re.MULTILINE)) == 4
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"].startswith("swap_it_in.py --steps 2")
    assert [entry["function"] for entry in record["results"]] == ["zigzag", "magi"]
    assert all(len(entry["loss"]) == entry["ranks"] == 2 for entry in record["results"])


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("torch", {}, "add --causal"),
        ("zigzag", dict(rank_invariant=True), "has no rank_invariant"),
        ("magi", dict(fixed_order=True), "needs rank_invariant"),
        ("magi", dict(rank_invariant=True, fixed_order=True, tokens=200), "multiples of 128"),
    ],
)
def test_options_that_contradict_each_other_raise(function, options, message):
    with pytest.raises(ValueError, match=message):
        swapping.Run(function, **options)
