"""Policy-gradient steps of a byte model with several answers to each prompt: as a tree, and as
separate sequences.

    torchrun --nproc-per-node 2 notebooks/tree_training.py

    answers     the model draws them, 8 for each prompt by default; the reward is the fraction of
                bytes that are letters
    tree        `canon.trees.pack`: tokens that sequences share are computed once
    separate    one packed document for each sequence: each has a prompt of its own

Both have the same losses and gradients up to rounding, on any number of ranks. The model takes its
step with those of the tree. Runs on CPUs (gloo, `canon.reference`) in float64, or with one GPU for
each rank (NCCL, `canon.fast`), there in bfloat16 with float32 weights. The table has medians of all
steps but the first. Tokens per second count the tokens of the sequences."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import swap_it_in
import tables
import torch
import torch.distributed as dist
from torch import Tensor

import canon
from canon import Mask


@dataclass(frozen=True)
class Run:
    """One training run. The command line has the same options."""

    steps: int = 3
    prompts: int = 2  # in each step
    answers: int = 8  # to each prompt
    trunk: int = 96  # tokens of a prompt
    tokens: int = 16  # of an answer
    layers: int = 2
    width: int = 64
    heads: int = 4
    key_heads: int = 2
    learning_rate: float = 3e-2
    dtype: str = "float64"  # or bfloat16, with float32 weights

    def __post_init__(self):
        if self.dtype not in ("float64", "bfloat16"):
            raise ValueError(f"dtype must be float64 or bfloat16, got {self.dtype}")


class Packed(NamedTuple):
    """Sequences in one axis. ``weights``: the factor of each token's loss."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    mask: Mask


def as_tree(sequences: Sequence[Tensor], weights: Sequence[Tensor]) -> Packed:
    """Return the tree. A label's weight is the sum of the weights of the sequences that share
    it.
    """
    tree = canon.trees.pack(sequences)
    return Packed(
        tree.token_ids, tree.position_ids, tree.labels, tree.weights_of(weights), tree.mask
    )


def as_documents(sequences: Sequence[Tensor], weights: Sequence[Tensor]) -> Packed:
    """Return the separate sequences as packed documents."""
    lengths = torch.tensor([0, *map(len, sequences)])
    labels = torch.cat([torch.cat([ids[1:], ids.new_tensor([-100])]) for ids in sequences])
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return Packed(
        torch.cat([*sequences]),
        positions,
        labels,
        torch.cat([*weights]),
        Mask.documents(lengths.cumsum(0)),
    )


WAYS: dict[str, Callable[..., Packed]] = {"tree": as_tree, "separate": as_documents}


class Trainer:
    """A model on this rank of the default process group, or of this process alone, and its
    optimizer.
    """

    def __init__(self, run: Run):
        alone = not dist.is_initialized()
        self.run, self.rank, self.ranks = (
            run,
            0 if alone else dist.get_rank(),
            1 if alone else dist.get_world_size(),
        )
        gpu = torch.cuda.is_available() and not swap_it_in.interpreted()
        self.device = torch.device("cuda" if gpu else "cpu")
        self.attn = canon.fast if gpu else canon.reference
        self.narrow, wide = (
            run.dtype == "bfloat16",
            torch.float32 if run.dtype == "bfloat16" else torch.float64,
        )
        sizes = {name: getattr(run, name) for name in ("layers", "width", "heads", "key_heads")}
        self.model = swap_it_in.seeded_model(swap_it_in.Run(**sizes), self.device).to(wide)
        self.parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=run.learning_rate)

    def logits(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow):
            return self.model(ids, positions, attend)

    @torch.no_grad()
    def sampled(self, step: int) -> Tensor:
        """Return prompts with answers of the model, (prompts, answers, trunk + tokens) on the CPU.
        All ranks have the same.
        """
        run = self.run
        prompts, _ = swap_it_in.pack(step, run.prompts * run.trunk, causal=True)
        ids = prompts.view(run.prompts, run.trunk).repeat_interleave(run.answers, 0).to(self.device)
        generator = torch.Generator().manual_seed(step)
        for _ in range(run.tokens):
            positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
            chances = self.logits(ids, positions, self.attn.attention)[:, -1].double().softmax(-1)
            ids = torch.cat(
                [ids, chances.cpu().multinomial(1, generator=generator).to(self.device)], 1
            )
        if self.ranks > 1:
            dist.broadcast(ids, 0)
        return ids.view(run.prompts, run.answers, -1).cpu()

    def gradients(self, packed: Packed, items: int) -> tuple[float, list[Tensor]]:
        """Return the loss and its gradients. Each rank computes its part of the tokens."""
        layout = self.attn.dispatch(packed.mask, self.ranks)
        *tensors, mask = packed
        ids, positions, labels, weights = (
            layout.shard(x, self.rank, 0)[None].to(self.device) for x in tensors
        )
        logits = self.logits(
            ids, positions, partial(self.attn.magi_attention, mask=mask, layout=layout)
        )
        loss = canon.training.sequence_loss(
            logits, labels, weights=weights, num_items_in_batch=items
        )
        found = torch.autograd.grad(loss, self.parameters)
        for x in found if self.ranks > 1 else ():
            dist.all_reduce(x)
            x /= self.ranks  # DDP and FSDP2 average, too
        return loss.item(), [*found]

    def update(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def rewards_of(answers: Tensor) -> Tensor:
    """Return the fraction of letters in each answer (..., tokens)."""
    lower = answers | 32
    return ((lower >= ord("a")) & (lower <= ord("z"))).double().mean(-1)


def policy_weights(rewards: Tensor, trunk: int, length: int) -> Tensor:
    """Return the weights (prompts, answers, length) of the labels: the advantages on the tokens of
    the answers, 0 elsewhere.

    The advantage is the reward less the mean of the prompt's answers, over their standard
    deviation.
    """
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    weights = rewards.new_zeros(*rewards.shape, length)
    weights[..., trunk - 1 : length - 1] = advantages[..., None]
    return weights


def with_memory(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result and bytes: on a GPU the most that the call adds, on a CPU the tensors that
    its forward pass saves.
    """
    saved: dict[int, int] = {}

    def kept(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    if device.type == "cpu":
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
            return call(), sum(saved.values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return call(), torch.cuda.max_memory_allocated() - before


def train(run: Run) -> dict[str, Any]:
    """Return rewards, and for each of `WAYS` losses, computed tokens, seconds and bytes, by step.

    "difference" is the largest difference of a gradient of the two ways, relative to the largest
    gradient.
    """
    trainer = Trainer(run)
    found: dict[str, Any] = {"ranks": trainer.ranks, "reward": [], "difference": []}
    found |= {name: {"loss": [], "tokens": [], "seconds": [], "bytes": []} for name in WAYS}
    for step in range(run.steps):
        ids = trainer.sampled(step)
        rewards = rewards_of(ids[..., run.trunk :])
        weights = policy_weights(rewards, run.trunk, ids.shape[2]).flatten(0, 1)
        gradients = {}
        for name, pack in WAYS.items():
            packed = pack([*ids.flatten(0, 1)], weights)
            start = perf_counter()
            once = partial(trainer.gradients, packed, rewards.numel() * run.tokens)
            (loss, gradients[name]), size = with_memory(trainer.device, once)
            results = {
                "loss": loss,
                "tokens": len(packed.ids),
                "seconds": perf_counter() - start,
                "bytes": size,
            }
            for key, value in results.items():
                found[name][key].append(value)
        found["reward"].append(rewards.mean().item())
        found["difference"].append(difference(*gradients.values()))
        trainer.update(gradients["tree"])
    return found


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest element of ``theirs``."""
    largest = max(x.abs().max().item() for x in theirs)
    return max((x - y).abs().max().item() for x, y in zip(ours, theirs, strict=True)) / (
        largest or 1.0
    )


def show(run: Run, found: dict[str, Any]) -> None:
    """Print the losses of all steps, and a table of both ways."""
    for step, reward in enumerate(found["reward"]):
        losses = ", ".join(f"{name} {found[name]['loss'][step]:.12f}" for name in WAYS)
        print(
            f"step {step}: reward {reward:.3f}, loss {losses}, gradients differ by "
            f"{found['difference'][step]:.1e}"
        )
    tokens, rows = run.prompts * run.answers * (run.trunk + run.tokens), []
    for name in WAYS:
        seconds, computed, size = (
            median(found[name][key][1:] or found[name][key])
            for key in ("seconds", "tokens", "bytes")
        )
        rows.append(
            (
                name,
                f"{computed:.0f}",
                f"{seconds:.3f}",
                f"{tokens / seconds:.0f}",
                f"{size / 1e6:.1f}",
            )
        )
    tables.show(
        (f"ranks: {found['ranks']}", "computed tokens", "seconds", "tokens per second", "MB"), rows
    )


def main() -> None:
    """Train with the options of the command line, alone or under torchrun.
    Rank 0 prints the table.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    for field in fields(Run):
        default = "bfloat16" if gpu and field.name == "dtype" else field.default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=default
        )
    run = Run(**vars(parser.parse_args()))
    if "RANK" in os.environ:
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
    found = train(run)
    if not dist.is_initialized() or dist.get_rank() == 0:
        show(run, found)
    swap_it_in.leave_group()


if __name__ == "__main__":
    main()
