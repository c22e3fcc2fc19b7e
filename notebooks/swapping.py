"""Runs, planted faults and figures of notebook 05. The training itself is in `swap_it_in.py`."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import swap_it_in
import torch
import torch.distributed as dist
from drawing import INK, PALE, RANKS
from swap_it_in import Run, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy

import canon
from canon import Layout
from canon.testing import process_groups

# --- runs


def train(runs: Sequence[Run], ranks: int = 1) -> list[dict[str, Any]]:
    """Return the results of the runs, one after the other: in this process, or on processes over
    gloo.
    """
    return on_ranks(ranks, [partial(swap_it_in.train, run) for run in runs])


def train_with_faults(run: Run, ranks: int) -> dict[str, dict[str, Any]]:
    """Return the results of the run with each of the `FAULTS`, by name."""
    return dict(
        zip(
            FAULTS,
            on_ranks(ranks, [partial(_train_with, fault, run) for fault in FAULTS]),
            strict=True,
        )
    )


def first_steps(runs: Sequence[Run], ranks: int = 1) -> list[dict[str, Tensor]]:
    """Return parts of the first training step of each run: full tensors, in the order of their
    computation.
    """
    return on_ranks(ranks, [partial(_first_step, run) for run in runs])


def on_ranks(ranks: int, programs: list[Callable[[], Any]]) -> list[Any]:
    """Return the results of the programs on rank 0. Each rank has the text of this process, also if
    a file changed.
    """
    program = partial(_results, programs, swap_it_in.texts())
    return program() if ranks == 1 else process_groups.processes(program, ranks, timeout=600)[0]


def _results(programs: list[Callable[[], Any]], texts: tuple[bytes, ...]) -> list[Any]:
    torch.set_num_threads(1)  # the number of threads can change bits, too
    with mock.patch.object(swap_it_in, "texts", return_value=texts):
        return [program() for program in programs]


def _train_with(fault: str, run: Run) -> dict[str, Any]:
    with FAULTS[fault](), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the layout that a fault plants
        return swap_it_in.train(run)


def _first_step(run: Run) -> dict[str, Tensor]:
    trainer, found = Trainer(run), {}
    batch = trainer.batch(0)

    def watched(*qkv: Tensor) -> Tensor:
        layer = len(found) // 2
        out = batch.attend(*qkv)
        found[f"q, k, v of layer {layer}"] = batch.layout.unshard(
            torch.cat([x.detach() for x in qkv], dim=2)
        )
        found[f"attention of layer {layer}"] = batch.layout.unshard(out.detach())
        return out

    found["loss"] = trainer.backward(replace(batch, attend=watched))
    found["gradients"] = torch.cat([parameter.grad.flatten() for parameter in trainer.parameters])
    return found


# --- planted faults


@contextmanager
def wrong_layout() -> Iterator[None]:
    """Within the block, each rank holds contiguous tokens, and attention takes them for those of
    the right layout.
    """
    right = swap_it_in.canon_attention

    def wrong(run, mask, ranks):
        return Layout.contiguous(mask.queries, ranks), right(run, mask, ranks)[1]

    with mock.patch.object(swap_it_in, "canon_attention", wrong):
        yield


@contextmanager
def no_scale() -> Iterator[None]:
    """Within the block, a rank's loss is its sum over all valid tokens, without the factor W. DDP
    divides by W.
    """
    right = canon.training.sequence_loss

    def wrong(logits, labels):
        loss = right(logits, labels)
        part = loss / dist.get_world_size()
        return part + (loss - part).detach()

    with mock.patch.object(canon.training, "sequence_loss", wrong):
        yield


@contextmanager
def own_mean() -> Iterator[None]:
    """Within the block, a rank's loss is the mean over its own tokens. DDP averages them, as if all
    had equally many.
    """

    def wrong(logits, labels):
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return loss + (mean / dist.get_world_size() - loss).detach()

    with mock.patch.object(canon.training, "sequence_loss", wrong):
        yield


FAULTS = {
    "wrong layout": wrong_layout,
    "no gradient scale": no_scale,
    "mean of own tokens": own_mean,
}


# --- figures


def losses(curves: dict[str, list[float]]) -> None:
    """Draw the loss by step, one curve for each name."""
    _, ax = plt.subplots(figsize=(5, 2.6))
    for number, (name, loss) in enumerate(curves.items()):
        ax.plot(
            loss,
            color=RANKS[number],
            linewidth=1.2,
            linestyle=("-", (0, (4, 2)), (0, (1, 1)))[number % 3],
            label=name,
        )
    ax.set(xlabel="step", ylabel="loss, nats per byte")
    ax.legend()
    plt.show()


def differences(panels: dict[str, dict[str, list[float]]], floor: float) -> None:
    """Draw the largest size of the differences up to each step, one panel for each title. The first
    curve is the control.

    The axis is logarithmic. Values below the floor are drawn at the floor.
    """
    sizes = {
        title: {
            name: list(accumulate(map(abs, values), max, initial=floor))[1:]
            for name, values in curves.items()
        }
        for title, curves in panels.items()
    }
    top = max(values[-1] for curves in sizes.values() for values in curves.values())
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3), sharey=True, squeeze=False
    )
    for ax, (title, curves) in zip(axes.flat, sizes.items(), strict=True):
        for number, (name, values) in enumerate(curves.items()):
            control = (
                {"color": INK, "linewidth": 3, "alpha": 0.35, "zorder": 0} if not number else {}
            )
            ax.plot(
                values,
                label=name,
                **{"color": RANKS[(number - 1) % len(RANKS)], "linewidth": 1.2} | control,
            )
        ax.set_yscale("log")
        ax.set(title=title, xlabel="step", ylim=(floor / 2, 5000 * top))
        ax.grid(color=PALE, linewidth=0.5)
        ax.legend(fontsize=8, loc="upper left")
    axes[0, 0].set_ylabel("largest difference so far")
    figure.tight_layout()
    plt.show()
