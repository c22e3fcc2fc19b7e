"""The options of a run of `long_training.py`; its memory and its time before it runs, by a formula.

For n tokens on W ranks, L layers with P parameters each, a vocabulary V of vectors of width D, h
query heads of width d, and masks with A visible cells over all layers, a step takes in seconds

    (10 L P n + 6 V D n + 18 h d A) / W / (FLOP/s of a GPU)

A layer's products run forward once, and twice more in the backward pass: 3 * 2 FLOPs, and 4 for
gradients. Attention takes 4 h d A FLOPs forward, twice, and 2.5 times as many for gradients.
The peak is the sum of `Formula.tensors`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canon import Mask
from canon.bench.shapes import documents

GPU = torch.cuda.is_available()
CHUNK = 2048  # tokens of `linear_sequence_loss` whose logits exist at one time


@dataclass(frozen=True)
class Run:
    """One training run. The command line has the same options."""

    tokens: int = 131072
    layers: int = 16
    width: int = 2048
    heads: int = 8
    key_heads: int = 2
    head_width: int = 128
    mlp_width: int = 8192
    vocabulary: int = 32768
    full_every: int = 8  # 1: all layers see the whole sequence
    window: int = 1024
    mean: int = 0  # tokens of a document; 0: one document
    attention: str = "zigzag"
    half: str = "fast" if GPU else "reference"
    piece: int = 16384  # tokens of norms, projections and MLP that are computed at one time
    steps: int = 2  # after one that warms up
    learning_rate: float = 3e-4
    tflops: float = 600.0  # of a GPU, assumed by the formula
    peak_tflops: float = 989.0  # of a GPU, by its data sheet: bfloat16, dense

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, after one that warms up: got {self.steps}")
        if self.attention == "torch" and (self.full_every > 1 or self.mean):
            raise ValueError(
                "attention='torch' has one causal mask for all layers: add --full-every 1, and no "
                "--mean"
            )

    def masks(self) -> tuple[Tensor, list[Mask]]:
        """Return cu_seqlens, and the mask of each layer."""
        n = self.tokens
        ends = torch.tensor(documents(n, self.mean) if self.mean else [0, n])
        full = Mask.documents(ends)
        narrow = full.windowed(self.window - 1)
        return ends, [narrow if (i + 1) % self.full_every else full for i in range(self.layers)]


@dataclass(frozen=True)
class Formula:
    """The memory and the time of a training step, before it runs. Sizes are bytes of a GPU."""

    run: Run
    ranks: int

    @property
    def layer_parameters(self) -> int:
        """The parameters of the matrix products of a layer."""
        run = self.run
        heads = (2 * run.heads + 2 * run.key_heads) * run.head_width
        return run.width * (heads + 3 * run.mlp_width)

    @property
    def parameters(self) -> int:
        run = self.run
        layer = self.layer_parameters + 2 * run.width
        return run.layers * layer + 2 * run.vocabulary * run.width + run.width

    def tensors(self) -> dict[str, float]:
        """Return the tensors at the peak, when the last layer's backward pass begins."""
        run, size = self.run, 2 if GPU else 4  # bytes of an element
        t, several = run.tokens / self.ranks, self.ranks > 1
        q, kv = (run.head_width * heads for heads in (run.heads, 2 * run.key_heads))
        head = run.vocabulary * run.width
        return {
            "inputs of all layers": run.layers * t * run.width * size,
            "attention, backward: q, k, v, out and gradients": t
            * ((3 * q + kv) * size + (8 if several else 6) * q + 6 * kv),
            "attention, backward: messages": several * t * kv * (2 * size + 8),
            "gradient of the layer's output": t * run.width * size,
            "parameters and states of AdamW, float32": 12 * self.parameters / self.ranks,
            "gradient of the head": (size + 4 / self.ranks) * head,
            "whole layers and head": size * (2 * head + 3 * self.layer_parameters),
            "MLP of a piece": 8 * min(t, run.piece) * run.mlp_width * size,
            "logits of a chunk, sum for the head": 5 * CHUNK * run.vocabulary + 4 * head,
        }

    @property
    def peak_bytes(self) -> float:
        return sum(self.tensors().values())

    def flops(self, recomputed: bool) -> float:
        """Return the FLOPs of a step on all GPUs, with or without what the backward pass computes
        again: attention once, other products of layers twice.
        """
        run = self.run
        area = sum(mask.area for mask in run.masks()[1])
        layers = (10 if recomputed else 6) * run.layers * self.layer_parameters * run.tokens
        head = 6 * run.vocabulary * run.width * run.tokens
        passes = 4.5 if recomputed else 3
        return layers + head + passes * 4 * run.heads * run.head_width * area

    @property
    def seconds(self) -> float:
        return self.flops(recomputed=True) / self.ranks / self.run.tflops / 1e12

    def longest(self, memory: float) -> int:
        """Return the most tokens whose peak fits ``memory`` bytes of each GPU."""
        step = 256 * self.ranks
        low, high = 0, 1 << 24  # in steps
        while high - low > 1:
            middle = (low + high) // 2
            one = replace(self, run=replace(self.run, tokens=middle * step))
            low, high = (middle, high) if one.peak_bytes <= memory else (low, middle)
        return low * step

    def __str__(self) -> str:
        sizes = (f"{size / 1e9:9.2f} GB  {name}" for name, size in self.tensors().items())
        return "\n".join(
            [
                f"{self.run.tokens} tokens, {self.run.attention}, {self.parameters} parameters, "
                f"{self.ranks} ranks",
                *sizes,
                f"predicted: {self.peak_bytes / 1e9:.1f} GB, {self.seconds:.2f} s a step",
            ]
        )
