"""Train a model of 1.0 billion parameters on long sequences, which all ranks hold together, and
measure it beside a formula.

    torchrun --nproc-per-node 2 notebooks/long_training.py --tokens 1048576

FSDP2 divides parameters, gradients and the states of AdamW, all float32; matrix products are
bfloat16. Of each layer only the input is saved. The backward pass computes the rest again, and
pieces of tokens once more, so no tensor of the MLP has all tokens of a rank.

Every `full_every`-th layer has causal attention over the whole sequence, or over documents of mean
length `mean`; others see `window` tokens. `--attention zigzag`, `strided` or `magi` is Canon's,
`torch` is SDPA, on several GPUs with torch's `context_parallel`. Tokens are drawn at random. The
loss does not depend on the number of ranks.

Runs alone or under torchrun, with one GPU for each rank (NCCL, `canon.fast`) or, with a small
model, on CPUs (gloo, float32). `--fits GB` also trains on the longest sequence that by the formula
fits so much memory. `--record FILE` writes times, memory and formula as JSON."""

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import swap_it_in
import torch
import torch.distributed as dist
from long_formula import CHUNK, GPU, Formula, Run
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import canon
from canon import Layout
from canon.testing import record

# nothing draws random numbers, and saving their state would wait for the GPU
checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def in_pieces(compute: Callable[..., tuple[Tensor, ...]], piece: int, *given: Tensor) -> list:
    """Return the results (b, t, ...) of ``compute``, for ``piece`` tokens at a time. The backward
    pass computes each piece again.
    """
    pieces = zip(*(x.split(piece, dim=1) for x in given), strict=True)
    found = [checkpointed(compute, *one) for one in pieces]
    return [torch.cat(x, dim=1) for x in zip(*found, strict=True)]


class Block(nn.Module):
    """A layer of the transformer. Only attention mixes tokens. The input alone is saved."""

    def __init__(self, run: Run):
        super().__init__()
        self.heads, self.piece = (run.heads, run.key_heads, run.key_heads), run.piece
        self.norm, self.norm_mlp = nn.RMSNorm(run.width), nn.RMSNorm(run.width)
        self.qkv = nn.Linear(run.width, sum(self.heads) * run.head_width, bias=False)
        self.project = nn.Linear(run.heads * run.head_width, run.width, bias=False)
        self.gate_up = nn.Linear(run.width, 2 * run.mlp_width, bias=False)
        self.down = nn.Linear(run.mlp_width, run.width, bias=False)

    def before(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v (b, t, heads, width of a head)."""
        heads = self.qkv(self.norm(x)).unflatten(2, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        return swap_it_in.rotated(q, positions), swap_it_in.rotated(k, positions), v

    def after(self, x: Tensor, out: Tensor) -> tuple[Tensor]:
        x = x + self.project(out.flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=2)
        return (x + self.down(nn.functional.silu(gate) * up),)

    def layer(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        out = attend(*in_pieces(self.before, self.piece, x, positions))
        return in_pieces(self.after, self.piece, x, out)[0]

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return checkpointed(self.layer, x, positions, attend)


class Model(nn.Module):
    """A transformer that returns its loss. Each layer has its own ``attend(q, k, v)``."""

    def __init__(self, run: Run):
        super().__init__()
        self.text = nn.Embedding(run.vocabulary, run.width)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.norm = nn.RMSNorm(run.width)
        self.head = nn.Linear(run.width, run.vocabulary, bias=False)

    def forward(
        self, ids: Tensor, positions: Tensor, labels: Tensor, attends: Sequence[Callable]
    ) -> Tensor:
        x = self.text(ids)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, positions, attend)
        weight = self.head.weight  # whole inside of `forward` only
        return canon.training.linear_sequence_loss(self.norm(x), weight, labels, chunk=CHUNK)


class Trainer:
    """A model, which FSDP2 divides among the ranks of the default group, and its optimizer."""

    def __init__(self, run: Run):
        self.run, self.rank, self.ranks = run, dist.get_rank(), dist.get_world_size()
        self.divided_by_torch = run.attention == "torch" and self.ranks > 1
        if self.divided_by_torch and not GPU:
            raise ValueError(f"attention='torch' on {self.ranks} ranks needs a GPU for each")
        self.device = torch.device("cuda" if GPU else "cpu")
        with self.device:
            torch.manual_seed(0)  # all ranks begin with the same weights
            self.model = Model(run)
        # dtypes of parameters inside `forward`, and of sums of gradients
        policy = MixedPrecisionPolicy(*[torch.bfloat16, torch.float32] if GPU else [])
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=run.learning_rate, fused=GPU or None
        )
        self.ends, masks = run.masks()
        if run.attention == "torch":
            self.layout = Layout.contiguous(run.tokens, 1)
            self.attends = [swap_it_in.sdpa] * run.layers
        else:
            # planned for the layers that see most; the others use the same layout
            widest = max(masks, key=lambda mask: mask.area)
            like = swap_it_in.Run(run.attention, run.half)
            self.layout, attend = swap_it_in.canon_attention(like, widest, self.ranks)
            self.attends = [partial(attend, mask=mask) for mask in masks]

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return this rank's part of a batch: ids, position_ids and shift_labels (1, t)."""
        run, draw = self.run, torch.Generator().manual_seed(step)  # few tokens are frequent
        drawn = run.vocabulary ** torch.rand(1, run.tokens, generator=draw, dtype=torch.float64)
        ids = drawn.long().clamp(max=run.vocabulary - 1)
        rank = 0 if self.layout.ranks == 1 else self.rank
        part = self.layout.shard_batch({"ids": ids, "labels": ids}, rank, cu_seqlens=self.ends)
        return {x: part[x].to(self.device) for x in ("ids", "position_ids", "shift_labels")}

    def step(self, part: dict[str, Tensor]) -> float:
        """Train on a batch. Return its loss, after all work of this rank."""
        own, divided = [*part.values()], self.divided_by_torch
        with swap_it_in.torch_context(self.device, own) if divided else nullcontext():
            loss = self.model(*own, self.attends)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if GPU:
            torch.cuda.synchronize()
        return loss.item()


def largest(*numbers: float) -> list[float]:
    """Return the maximum of each number over all ranks."""
    found = torch.tensor(numbers, dtype=torch.float64, device="cuda" if GPU else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def measured(run: Run) -> dict[str, Any]:
    """Return the entry of a run in a record. Seconds are those of the slowest rank in each step,
    memory is that of the fullest.
    """
    gc.collect()  # cycles keep the model of the run before
    trainer = Trainer(run)
    formula, losses, seconds = Formula(run, trainer.ranks), [], []
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for step in range(1 + run.steps):
        part = trainer.batch(step)
        largest(0)  # a barrier
        start = perf_counter()
        losses.append(trainer.step(part))
        seconds += largest(perf_counter() - start)
    typical = median(seconds[1:])
    rate = formula.flops(recomputed=False) / trainer.ranks / typical / 1e12
    return {
        **asdict(run),
        "ranks": trainer.ranks,
        "parameters": formula.parameters,
        "loss": losses,
        "seconds": seconds,  # of all steps; the first one warms up
        "seconds_per_step": typical,
        "tokens_per_second": run.tokens / typical,
        "model_tflops_share": rate / run.peak_tflops,
        "peak_bytes": largest(torch.cuda.max_memory_allocated())[0] if GPU else None,
        "predicted": {
            "seconds": formula.seconds,
            "peak_bytes": formula.peak_bytes,
            "tensors": formula.tensors(),
        },
    }


def main() -> None:
    """Join the group of torchrun, or make a group of this process, train, and print the results on
    rank 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = {"attention": ("zigzag", "strided", "magi", "torch"), "half": ("reference", "fast")}
    for field in fields(Run):
        name = "--" + field.name.replace("_", "-")
        several = field.name in ("tokens", "attention")  # one run for each
        kind, default = type(field.default), [field.default] if several else field.default
        more = {"nargs": "+" if several else None, "choices": choices.get(field.name)}
        parser.add_argument(name, type=kind, default=default, **more)
    parser.add_argument("--fits", type=float, metavar="GB", help="memory of a GPU for the formula")
    parser.add_argument("--record", type=Path, help="write results to this file, on rank 0")
    given = vars(parser.parse_args())
    path, memory, lengths, attentions = (
        given.pop(name) for name in ("record", "fits", "tokens", "attention")
    )
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("nccl" if GPU else "gloo", **alone)
    ranks, first, entries = dist.get_world_size(), dist.get_rank() == 0, []
    if memory:
        lengths = [*lengths, Formula(Run(**given), ranks).longest(memory * 1e9)]
    for run in [Run(n, attention=some, **given) for n in lengths for some in attentions]:
        if first:
            print(Formula(run, ranks), flush=True)
        entries.append(entry := measured(run))
        peak = f"{entry['peak_bytes'] / 1e9:.1f} GB, " if GPU else ""
        line = (
            f"measured:  {peak}{entry['seconds_per_step']:.2f} s a step, "
            f"{entry['tokens_per_second']:.0f} tokens a second, "
            f"{entry['model_tflops_share']:.1%} of the peak, loss {entry['loss'][-1]:.6f}"
        )
        if first:
            print(line, flush=True)
        if first and path:
            record.write(path, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), entries)
    swap_it_in.leave_group()


if __name__ == "__main__":
    main()
