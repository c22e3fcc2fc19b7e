"""Attention in plain PyTorch, tile by tile.

All sums are computed in the accumulation dtype, in a fixed order. Scores have no range. A NaN
reaches the tokens that the table of the Triton launches names, with tiles of at most 128 x 128
where a band ends.

Memory beyond inputs and results: q, k, v (and dout) with their heads first in the accumulation
dtype, and b h 128 x 1,024 scores. Source: Tri Dao, FlashAttention-2 (2023), algorithms 1 and 2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canon.fast.kernels.torch.rows import delta
from canon.fast.kernels.torch.tiles import Operands, row_tiles, visible
from canon.fast.tables.cells import Cells
from canon.route.checks import Scale, split_scale

RowStatistics = tuple[Tensor, Tensor]  # lse and delta (b, h, t)


def choose_method(*given: Any) -> str:
    """Return the method for "auto": "split" needs no sums of dq.

    Arguments: q, k, v, the mask, the number of SMs, then ``repeats`` and ``sends`` of
    `canon.fast.backward.Method`.
    """
    return "split"


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Cells,
    scale: Scale,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:
    """Write out (b, t, h, dv) and lse (b, h, t); raise ``max_logits`` (h,), float32, to the largest
    scores if the backend has that extra.
    """
    tiles, operands = row_tiles(cells, False), Operands(cells, q, k, k.shape[2])
    if q.is_meta or not out.shape[0]:
        return
    q, k, v = operands.of_inputs(q, k, v)
    for tile in tiles:
        q_tile = operands.rows(q, tile)
        m = q_tile.new_full((*q_tile.shape[:3], 1), -torch.inf)
        total, weighted = torch.zeros_like(m), q_tile.new_zeros(*q_tile.shape[:3], v.shape[-1])
        for step in tile.steps:
            band = visible(tile, step, q_tile.shape[2] // q.shape[2], q.device)
            s = _hidden(_scores(q_tile, operands.columns(k, step), scale), band, -torch.inf)
            above = torch.maximum(m, s.amax(-1, keepdim=True))
            # no visible key so far: exp(-inf - 0) is 0
            used = above.masked_fill(above == -torch.inf, 0.0)
            p, shrink = s.sub_(used).exp_(), torch.exp(m - used)
            total = total * shrink + p.sum(-1, keepdim=True)
            weighted = weighted * shrink + p @ operands.columns(v, step)
            m = above
        blind = total == 0
        total = total.masked_fill(blind, 1.0)
        rows = slice(tile.start, tile.stop)
        out[:, rows] = _by_head(weighted / total, q, tile, out.shape[3]).transpose(1, 2)
        lse[:, :, rows] = _by_head(
            (m + total.log()).masked_fill(blind, -torch.inf), q, tile
        ).squeeze(-1)
        if max_logits is not None:
            max_logits.copy_(torch.maximum(max_logits, _by_head(m, q, tile).amax((0, 2, 3))))


def _scores(q: Tensor, k: Tensor, scale: Scale) -> Tensor:
    number, softcap = split_scale(scale)
    s = (number * q) @ k.mT
    return s if softcap is None else s.div_(softcap).tanh_().mul_(softcap)


def _hidden(x: Tensor, cells: Tensor | None, value: float) -> Tensor:
    if cells is not None:
        x.unflatten(2, (-1, cells.shape[0])).masked_fill_(~cells, value)
    return x


@torch.no_grad()
def dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    statistics: RowStatistics,
    cells: Cells,
    scale: Scale,
    dq: Tensor,
) -> None:
    """Write dq (b, t, h, d)."""
    tiles, operands = row_tiles(cells, False), Operands(cells, q, k, k.shape[2])
    if q.is_meta:
        return
    q, k, v, dout = operands.of_inputs(q, k, v, dout)
    lse, delta = map(operands.heads_first, _as_columns(statistics))
    for tile in tiles:
        given = [operands.rows(x, tile) for x in (q, dout, lse, delta)]
        sums = torch.zeros_like(given[0])
        for step in tile.steps:
            band = visible(tile, step, sums.shape[2] // q.shape[2], q.device)
            keys = operands.columns(k, step)
            sums += _weights(*given, keys, operands.columns(v, step), band, scale)[1] @ keys
        dq[:, tile.start : tile.stop] = _by_head(sums, q, tile, dq.shape[3]).transpose(1, 2)


@torch.no_grad()
def dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    statistics: RowStatistics,
    cells: Cells,
    scale: Scale,
    dk: Tensor,
    dv: Tensor,
    dq: Tensor | None = None,
    ordered: bool = False,
) -> None:
    """Write dk (b, s, o, d) and dv (b, s, o, dv) of o owners, the key heads or the query heads.
    Fused: also add to ``dq`` (b, t, h, d), in the accumulation dtype, in a fixed order if
    ``ordered``.
    """
    tiles, operands = row_tiles(cells, True), Operands(cells, q, k, dk.shape[2])
    if q.is_meta:
        return
    q, k, v, dout = operands.of_inputs(q, k, v, dout)
    lse, delta = map(operands.heads_first, _as_columns(statistics))
    for tile in tiles:
        keys, values = operands.rows(k, tile), operands.rows(v, tile)
        sums = torch.zeros_like(keys), torch.zeros_like(values)
        for step in tile.steps:
            band = visible(tile, step, keys.shape[2], q.device)
            given = [operands.columns(x, step) for x in (q, dout, lse, delta)]
            p, ds = _weights(*given, keys, values, None if band is None else band.mT, scale)
            sums[0].add_(ds.mT @ given[0])
            sums[1].add_(p.mT @ given[1])
            if dq is not None:
                # keys that no query sees may hold NaN
                seen = keys if band is None else keys.masked_fill(~band.any(1)[:, None], 0.0)
                dq[:, step.begin : step.end] += _by_head(
                    ds @ seen, q, (step.begin, min(step.end, dq.shape[1]))
                ).transpose(1, 2)
        for total, written in zip(sums, (dk, dv), strict=True):
            by_owner = (
                total[:, :, : tile.stop - tile.start, : written.shape[3]]
                .unflatten(1, (written.shape[2], -1))
                .unbind(2)
            )
            written[:, tile.start : tile.stop] = sum(by_owner[1:], by_owner[0]).transpose(1, 2)


def _by_head(x: Tensor, q: Tensor, tokens: Sequence, width: int | None = None) -> Tensor:
    """Return x (b, g, share * rows, columns) as (b, h, tokens, width)."""
    return x.unflatten(2, (q.shape[2], -1)).flatten(1, 2)[:, :, : tokens[1] - tokens[0], :width]


def _weights(
    q, dout, lse, delta, k, v, cells: Tensor | None, scale: Scale
) -> tuple[Tensor, Tensor]:
    """Return P and dS times the slope of the scores; 0 in hidden cells."""
    number, softcap = split_scale(scale)
    s = _hidden(_scores(q, k, scale), cells, 0.0)
    slope = number if softcap is None else number * (1 - (s / softcap) ** 2)
    p = _hidden(torch.exp(s - lse), cells, 0.0)
    return p, _hidden((dout @ v.mT - delta) * p, cells, 0.0) * slope


def _as_columns(statistics: RowStatistics) -> list[Tensor]:
    """Return lse and delta as (b, t, h, 1). Rows that see no key get lse inf: then P is 0."""
    lse, delta = statistics
    return [
        x.transpose(1, 2)[..., None] for x in (lse.masked_fill(lse == -torch.inf, torch.inf), delta)
    ]


def empty_statistics(lse: Tensor) -> None:
    """Allocate what `row_statistics` writes, if it writes anything."""


def row_statistics(lse: Tensor, delta: Tensor, statistics: None = None) -> RowStatistics:
    """Return what `dq` and `dkdv` read."""
    return lse, delta


def make_row_statistics(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> RowStatistics:
    """Compute delta, and return `row_statistics`."""
    result = torch.empty_like(lse)
    delta(dout, out, lse, dlse, result)
    return lse, result
