"""`canon bench trees`: measure both passes over branches that share a trunk, on one GPU, with
peers.

    canon auto                      one call with `Mask.tree`
    FlexAttention                   compiled, with the BlockMask of the same mask; also with the
                                    kernels of flash-attn-4
    flash-attn-4 separate           each branch with a trunk of its own: the separate sequences
    flash-attn-4 gathered           each query once; keys and values are gathered for each branch,
                                    their gradients added
    flash-attn-4 gathered, summed   the same; one sum adds the gradients of all copies of the trunk,
                                    without index_add

Gathering and adding are timed. The separate sequences are made before. Each copy of the trunk has 1
/ branches of its dout, so sums over the copies are the results of the tree. TFLOP/s count the cells
of the tree, 14 h d area for both passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from canon.bench import peers
from canon.bench.peers import FLASH4, Attend, Contender
from canon.bench.shapes import Shape, asked_for, tree
from canon.bench.timing import Run, clocks, shown_mb, table
from canon.testing.judge import Attended, dense, oracle

SHAPES = ["1,40960,32,8,128,tree:8192+32x1024"]
CANON, SEPARATE = "canon auto", f"{FLASH4} separate"


@dataclass(frozen=True)
class Star:
    """A trunk, and branches of equal length behind it."""

    trunk: int
    branches: int
    tokens: int  # of a branch

    def paths(self) -> Tensor:
        """Return the positions (branches, trunk + tokens) of each separate sequence."""
        trunk = torch.arange(self.trunk).expand(self.branches, -1)
        return torch.cat(
            [trunk, self.trunk + torch.arange(self.branches * self.tokens).view(self.branches, -1)],
            1,
        )


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int, only: str
) -> list[dict[str, Any]]:
    """Return a row for each contender. An absent one has its reason."""
    star, tensors = Star(*tree(shape.n, shape.mask_name) or ()), shape.inputs(dtype, device)
    last = peers.last_head(shape, *tensors)

    def made(contender: Contender) -> tuple[Run, Attended]:
        passes = separate_passes if contender.name == SEPARATE else packed_passes
        return passes(contender, star, tensors, shape)

    judged_by = oracle(*last, shape.mask), dense(*last, shape.mask)
    found = contenders(shape, star, device, only)
    rows = peers.measured_both(found, made, *judged_by, rounds, device, shape=str(shape))
    add_ratios(rows, shape)
    return rows


def contenders(shape: Shape, star: Star, device: torch.device, only: str) -> list[Contender]:
    """Return Canon and the peers. Making one that is not installed raises ModuleNotFoundError."""
    flash = {"BACKEND": "FLASH"}
    makes: dict[str, Callable[[], Attend]] = {
        CANON: partial(peers.attention, shape, "auto"),
        "FlexAttention": partial(peers.flex, shape, device),
        "FlexAttention FLASH": partial(peers.flex, shape, device, flash),
        SEPARATE: partial(_separate, star, shape.b, device),
        f"{FLASH4} gathered": partial(_gathered, star, shape.b, device, False),
        f"{FLASH4} gathered, summed": partial(_gathered, star, shape.b, device, True),
    }
    found = [
        Contender(name, make, name, declines=name.startswith(FLASH4))
        for name, make in makes.items()
    ]
    return [contender for contender in found if asked_for(contender.name, only)]


def packed_passes(
    contender: Contender, star: Star, tensors: Sequence[Tensor], shape: Shape
) -> tuple[Run, Attended]:
    """Return both passes of a function of the packed tensors,
    and the results of the last key head.
    """
    leaves, dout, attend = (
        [x.detach().requires_grad_() for x in tensors[:3]],
        tensors[3],
        contender.make(),
    )
    got = peers.attended(attend, leaves, dout)
    return partial(peers.both_passes, attend, leaves, dout), peers.of_last_head(
        shape, got.out, got.dq, got.dk, got.dv
    )


def separate_passes(
    contender: Contender, star: Star, tensors: Sequence[Tensor], shape: Shape
) -> tuple[Run, Attended]:
    """Return both passes of a function of the separate sequences, and the results of the tree."""
    attend, rows = contender.make(), star.paths().flatten().to(tensors[0].device)
    q, k, v, dout = (x.index_select(1, rows) for x in tensors)
    leaves, dout = (
        [x.requires_grad_() for x in (q, k, v)],
        dout / torch.where(rows < star.trunk, star.branches, 1)[:, None, None],
    )
    got = peers.attended(attend, leaves, dout)
    out = got.out.unflatten(1, (star.branches, -1))
    out = torch.cat([out[:, -1, : star.trunk], out[:, :, star.trunk :].flatten(1, 2)], 1)
    gradients = (added(x, star) for x in (got.dq, got.dk, got.dv))
    return partial(peers.both_passes, attend, leaves, dout), peers.of_last_head(
        shape, out, *gradients
    )


def added(x: Tensor, star: Star, own: Tensor | None = None) -> Tensor:
    """Return the gradients (b, n, ...) of the tree from those of its paths, and of the trunk alone.
    Sums are float32.
    """
    x = x.unflatten(1, (star.branches, -1))
    trunk = x[:, :, : star.trunk].sum(1, dtype=torch.float32)
    trunk = trunk if own is None else trunk + own
    return torch.cat([trunk.to(x.dtype), x[:, :, star.trunk :].flatten(1, 2)], 1)


def _separate(star: Star, batch: int, device: torch.device) -> Attend:
    lengths = [star.trunk + star.tokens] * (star.branches * batch)
    return peers.flash4_varlen(lengths, lengths, device)


def _gathered(star: Star, batch: int, device: torch.device, summed: bool) -> Attend:
    rows = torch.cat([torch.arange(star.trunk), star.paths().flatten()]).to(device)
    queries = [star.trunk] + [star.tokens] * star.branches
    keys = [star.trunk] + [star.trunk + star.tokens] * star.branches
    attend = peers.flash4_varlen(queries * batch, keys * batch, device)
    return lambda q, k, v: attend(q, *(_Gathered.apply(x, rows, star, summed) for x in (k, v)))


class _Gathered(torch.autograd.Function):
    """The rows of the trunk, then those of each path. The backward adds them in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, star: Star, summed: bool) -> Tensor:
        ctx.given = x.shape, rows, star, summed
        return x.index_select(1, rows)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (shape, rows, star, summed) = grads, ctx.given
        if summed:
            total = added(grad[:, star.trunk :], star, grad[:, : star.trunk])
        else:
            total = (
                grad.new_zeros(shape, dtype=torch.float32)
                .index_add_(1, rows, grad.float())
                .to(grad.dtype)
            )
        return total, None, None, None


def add_ratios(rows: Sequence[dict[str, Any]], shape: Shape) -> None:
    """Write the TFLOP/s of each timed row, and the speed of Canon relative to it, by GPU time and
    by wall time.
    """
    timed = [row for row in rows if row.get("both_ms")]
    canon = next((row for row in timed if row["canon"]), None)
    for row in timed:
        row["both_tflops"] = 3.5 * shape.operations / median(row["both_ms"]) / 1e9
        for clock in ("both_ms", "both_wall_ms") if canon else ():
            row[f"canon_by_{clock.removesuffix('_ms')}"] = median(row[clock]) / median(canon[clock])


def tables(rows: Sequence[dict]) -> list:
    """Return a table of medians."""
    columns, lines = (
        (
            "contender",
            "agrees",
            "wall (host) ms",
            "GPU ms",
            "TFLOP/s",
            "Canon: wall",
            "GPU",
            "peak MB",
        ),
        [],
    )
    for row in rows:
        cells = [peers.verdict_of(row)]
        if "both_tflops" in row:
            cells += [
                clocks(row, "both"),
                f"{median(row['both_ms']):.3f}",
                f"{row['both_tflops']:.0f}",
            ]
            cells += [
                f"{row[x]:.2f} x" if x in row else "-"
                for x in ("canon_by_both_wall", "canon_by_both")
            ]
            cells.append(shown_mb(row))
        lines.append((row["contender"], *cells))
    return (
        [
            table(
                f"{rows[0]['shape']}: both passes, and how many times as fast Canon is",
                columns,
                lines,
            )
        ]
        if rows
        else []
    )
