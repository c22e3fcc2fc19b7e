"""Train a byte-level transformer on packed documents. Its attention is that of one rank, of
several, or of a peer.

    torchrun --nproc-per-node 2 swap_it_in.py --function magi --half reference
    torchrun --nproc-per-node 2 swap_it_in.py --function magi --half fast  # the same, swapped

    --function   calls                      layout of the tokens
    attention    attn.attention             one rank
    reordered    attn.ring_attention        one rank, which holds the second half of each pack
                                            before the first
    zigzag       attn.zigzag_attention      Layout.zigzag
    strided      attn.strided_attention     Layout.zigzag
    magi         attn.magi_attention        attn.dispatch, planned for each pack
    sdpa         torch's SDPA               one rank; only with --causal
    torch        torch's context_parallel   head and tail pieces; only with --causal, on two GPUs or
                                            more

All of these see the same tokens and begin with the same weights. So their losses and gradients are
equal up to rounding. Text: this repository, and docstrings of Python's standard library. A token is
a byte. Runs on CPUs (gloo), or with one GPU for each rank (NCCL), there in bfloat16 with float32
weights. `--record FILE` writes times, memory and losses as JSON."""

import argparse
import ast
import hashlib
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Any

import fixed_order
import torch
import torch._dynamo  # before a process group is made: see `leave_group`
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import canon
from canon import Layout, Mask
from canon.check.documents import Documents
from canon.testing import record

MODULES = (
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "locale",
    "os",
    "pathlib",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "tokenize",
    "traceback",
    "typing",
)
ONE_RANK = ("attention", "reordered", "sdpa")
FUNCTIONS = (*ONE_RANK, "zigzag", "strided", "magi", "torch")


@dataclass(frozen=True)
class Run:
    """One training run. The command line has the same options."""

    function: str = "attention"
    half: str = "reference"
    steps: int = 100
    tokens: int = 512  # of each pack
    layers: int = 2
    width: int = 128
    heads: int = 4
    key_heads: int = 2
    learning_rate: float = 3e-3
    dtype: str = "float32"
    # One document of all tokens, not a pack of documents.
    causal: bool = False
    # Attention has the same bits on any number of ranks.
    rank_invariant: bool = False
    # All sums of a training step have one order: see `fixed_order.py`.
    fixed_order: bool = False

    def __post_init__(self):
        if self.function in ("sdpa", "torch") and not self.causal:
            raise ValueError(f"function={self.function!r} has no packed documents: add --causal")
        if self.rank_invariant and self.function not in ("attention", "strided", "magi"):
            raise ValueError(
                f"function={self.function!r} has no rank_invariant: use attention, strided or magi"
            )
        if self.fixed_order and not (self.rank_invariant and self.tokens % fixed_order.BLOCK == 0):
            raise ValueError(
                f"fixed_order needs rank_invariant, and tokens in multiples of {fixed_order.BLOCK}"
            )


# --- the text


@cache
def texts() -> tuple[bytes, ...]:
    """Return the text files of this repository, and docstrings of some modules of the standard
    library.
    """
    # not imported
    trees = [ast.parse((Path(os.__file__).parent / f"{name}.py").read_bytes()) for name in MODULES]
    nodes = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = [text.encode() for node in nodes if (text := ast.get_docstring(node))]
    return (*Documents.of().texts, *docstrings)


@cache
def corpus(longest: int) -> tuple[Tensor, Tensor]:
    """Return shuffled documents of up to ``longest`` bytes as one sequence of bytes, and the end of
    each document.
    """
    pieces = [
        text[start : start + longest] for text in texts() for start in range(0, len(text), longest)
    ]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    text = torch.frombuffer(bytearray(b"".join(pieces[i] for i in order)), dtype=torch.uint8)
    return text, torch.tensor([len(pieces[i]) for i in order]).cumsum(0)


def pack(step: int, tokens: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes (1, tokens) of a training step, and cu_seqlens of its documents, or of one
    document if causal.
    """
    text, ends = corpus(max(1, 3 * tokens // 8))
    start = step * tokens % (len(text) - tokens)
    inside = ends[(ends > start) & (ends < start + tokens)] - start
    ids = text[start : start + tokens].long()[None]
    return ids, torch.cat(
        [torch.tensor([0]), inside[: 0 if causal else None], torch.tensor([tokens])]
    )


# --- the model


class Block(nn.Module):
    """A layer of the transformer. Only attention mixes tokens. It is computed between `before` and
    `after`.
    """

    def __init__(self, width: int, heads: int, key_heads: int):
        super().__init__()
        self.heads = (heads, key_heads, key_heads)
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * (width // heads), bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def before(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (b, t, heads, width of a head)."""
        q, k, v = (
            self.qkv(self.norm(x)).unflatten(2, (sum(self.heads), -1)).split(self.heads, dim=2)
        )
        return rotated(q, positions), rotated(k, positions), v

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the input of the next layer from the input of this layer and the result of
        attention.
        """
        x = x + self.project(out.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """A causal byte-level transformer. ``attend(q, k, v)`` is its attention."""

    def __init__(self, run: Run):
        super().__init__()
        self.text = nn.Embedding(256, run.width)
        self.blocks = nn.ModuleList(
            Block(run.width, run.heads, run.key_heads) for _ in range(run.layers)
        )
        self.norm, self.head = nn.RMSNorm(run.width), nn.Linear(run.width, 256, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.text(ids)
        for block in self.blocks:
            x = block.after(x, attend(*block.before(x, positions)))
        return self.head(self.norm(x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return x (b, t, h, d) with a rotary embedding of the positions (b, t)."""
    angles = positions[..., None, None] * 10000 ** -torch.linspace(
        0, 1, x.shape[3] // 2, device=x.device
    )
    cos, sin = angles.cos(), angles.sin()  # float32
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=3).to(x.dtype)


# --- the attention


def canon_attention(run: Run, mask: Mask, ranks: int) -> tuple[Layout, Callable[..., Tensor]]:
    """Return the layout of the tokens, and the attention of this rank's q, k and v."""
    if run.half == "fast":
        from canon import fast as attn  # the swap: nothing else changes
    else:
        from canon import reference as attn
    n, invariant = mask.queries, {"rank_invariant": True} if run.rank_invariant else {}
    zigzag = Layout.zigzag(n, ranks, multiple_of=fixed_order.BLOCK if run.rank_invariant else 1)
    if run.function == "attention":
        return zigzag, partial(attn.attention, mask=mask, **invariant)
    if run.function == "reordered":
        halves = Layout([[range(n // 2, n), range(n // 2)]], n)
        return halves, partial(attn.ring_attention, mask=mask, layout=halves)
    if run.function == "zigzag":
        return zigzag, partial(attn.zigzag_attention, mask=mask)
    if run.function == "strided":
        return zigzag, partial(attn.strided_attention, mask=mask, layout=zigzag, **invariant)
    planned = attn.dispatch(mask, ranks, **invariant)
    return planned, partial(
        attn.magi_attention, mask=mask, layout=planned, own_keys_first=False, **invariant
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's attention over one causal document, or over the shards of an open
    `context_parallel`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # By its name each time: `context_parallel` replaces it.
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def torch_context(device: torch.device, buffers: list[Tensor]) -> AbstractContextManager[Any]:
    """Return torch's own context parallelism, which divides the buffers and replaces SDPA."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, device.type)
    return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))


# --- the training step


@dataclass(frozen=True)
class Batch:
    """This rank's part of a pack, the attention over the ranks that hold it, and a context for both
    passes.
    """

    part: dict[str, Tensor]  # ids, positions and labels
    layout: Layout
    attend: Callable[..., Tensor]
    around: AbstractContextManager[Any]


_SEEDING = Lock()  # ranks may be threads, which share torch's generator


def seeded_model(run: Run, device: torch.device) -> Transformer:
    """Return the model with the parameters of seed 0."""
    with _SEEDING, device:
        torch.manual_seed(0)
        return Transformer(run)


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
        if run.function in ONE_RANK and self.ranks > 1:
            raise ValueError(
                f"function={run.function!r} is for one rank, this group has {self.ranks}"
            )
        self.device = torch.device(
            "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
        )
        self.model = seeded_model(run, self.device).to(getattr(torch, run.dtype))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=run.learning_rate, betas=(0.9, 0.95))
        if run.fixed_order:
            torch.set_num_threads(1)  # several threads divide sums among them
            self.backward = fixed_order.InBlocks(self.model, run.tokens, self.autocast).backward
        else:
            self.averaging = self.model if self.ranks == 1 else DistributedDataParallel(self.model)

    def batch(self, step: int) -> Batch:
        """Return the part of this rank in a training step. Every rank computes the same pack, mask
        and layout.
        """
        ids, ends = pack(step, self.run.tokens, self.run.causal)
        whole = Layout.contiguous(self.run.tokens, 1)
        if self.run.function in ("sdpa", "torch"):
            layout, attend = whole, sdpa
        else:
            layout, attend = canon_attention(self.run, Mask.documents(ends), self.ranks)
        batch, rank = {"ids": ids, "labels": ids}, 0 if layout.ranks == 1 else self.rank
        part = layout.shard_batch(batch, rank, cu_seqlens=ends)
        part = {
            name: part[name].to(self.device) for name in ("ids", "position_ids", "shift_labels")
        }
        around = (
            torch_context(self.device, list(part.values()))
            if self.run.function == "torch"
            else nullcontext()
        )
        return Batch(part, layout, attend, around)

    def backward(self, batch: Batch) -> Tensor:
        """Return the loss. Afterwards each parameter has the gradient of the mean over the tokens
        of all ranks.
        """
        part = batch.part
        with self.autocast():
            logits = self.averaging(part["ids"], part["position_ids"], batch.attend)
        loss = canon.training.sequence_loss(logits, part["shift_labels"])
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Train on a batch. Return the loss, and the norm of its gradient."""
        with batch.around:
            loss = self.backward(batch)
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def digest(self) -> str:
        """Return a digest of all bits of the weights."""
        total = hashlib.sha256()
        for parameter in self.parameters:
            total.update(parameter.detach().cpu().numpy().tobytes())
        return total.hexdigest()[:16]

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute matrix products in bfloat16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def train(run: Run) -> dict[str, Any]:
    """Return the loss, the norm of the gradient and the seconds of each step, and a digest of the
    trained weights.

    All ranks of the default group call it. Sums of the loss and of gradients have the same bits on
    all ranks."""
    trainer, found = Trainer(run), {"loss": [], "gradient_norm": [], "seconds": []}
    batch, start = trainer.batch(0), perf_counter()
    for step in range(run.steps):
        loss, norm = trainer.step(batch)
        batch = trainer.batch(step + 1)  # the CPU plans the next step while a GPU computes this one
        found["loss"].append(loss.item())
        found["gradient_norm"].append(norm.item())
        start, seconds = (now := perf_counter()), now - start
        found["seconds"].append(seconds)
    return {**found, "weights": trainer.digest()}


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# --- the command


def options() -> tuple[list[Run], Path | None]:
    """Return the runs that the command line describes, and the file of the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--function", choices=FUNCTIONS, nargs="+", default=["attention"], help="one run for each"
    )
    choices = {"half": ("reference", "fast"), "dtype": ("float32", "float64")}
    for field in fields(Run)[1:]:
        name, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        else:
            more = {"choices": choices.get(field.name), "help": "default: %(default)s"}
            parser.add_argument(name, type=type(default), default=default, **more)
    parser.add_argument(
        "--record", type=Path, help="write losses, times and peak memory to this file, on rank 0"
    )
    given = vars(parser.parse_args())
    path, functions = given.pop("record"), given.pop("function")
    return [Run(function, **given) for function in functions], path


def measured(run: Run) -> dict[str, Any]:
    """Return the entry of a run in a record: its options, results, tokens per second and peak
    memory of this rank.
    """
    gpu = torch.cuda.is_available() and not interpreted()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = train(run)
    # the first steps compile kernels
    speed = run.tokens / median(found["seconds"][run.steps // 2 :])
    peak = torch.cuda.max_memory_allocated() if gpu else None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {**asdict(run), "ranks": ranks, "tokens_per_second": speed, "peak_bytes": peak, **found}


def main() -> None:
    """Join the group of torchrun, if there is one, train, and print the results on rank 0."""
    runs, path = options()
    if "LOCAL_RANK" in os.environ:
        gpu = torch.cuda.is_available() and not interpreted()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
    entries, first = [], not dist.is_initialized() or dist.get_rank() == 0
    for run in runs:
        entries.append(entry := measured(run))
        if first:
            for step, (loss, norm) in enumerate(
                zip(entry["loss"], entry["gradient_norm"], strict=True)
            ):
                print(f"step {step}: loss {loss:.6f}, gradient {norm:.4f}")
            memory = (
                f", peak memory {entry['peak_bytes'] / 1e9:.1f} GB" if entry["peak_bytes"] else ""
            )
            print(
                f"{run.function} on {entry['ranks']} ranks: {entry['tokens_per_second']:.0f} "
                f"tokens per second{memory}"
            )
            print(f"digest of the weights: {entry['weights']}", flush=True)
        if first and path:
            record.write(path, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), entries)
    leave_group()


def leave_group() -> None:
    """End the default process group, if there is one.

    A thread of gloo that frees a tensor while Python ends aborts the process ("terminate called
    without an active exception"). So the group must end first. torch keeps it if torch._dynamo is
    imported later, as optimizers do. The barrier gives such a thread time.
    """
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
