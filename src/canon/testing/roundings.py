"""Bound the effect of one rounding of every intermediate result on each element of attention and
its gradients.

    u (float32), with |.| entry by entry
        A_ij = |scale| w sum_d |q_id k_jd|    W_ij = P_ij (1 + A_ij + |lse_i|)
        out   W |v|                           lse  2 |lse| + sum_j P_ij (1 + A_ij)
        dv    W^T |dout|                      dq   |scale| D |k|       dk   |scale| D^T |q|
        with  D_ij = W_ij (sum_e |dout_ie v_je| + sum_e |dout_ie| (W |v|)_ie + |dlse_i|)
              w = max(1, sqrt(d / 3)): the d partial sums of a score round once each, and grow to
              the whole; rss of them
        lse rounds once in base 2, and once when it becomes natural

    u (16 bits)
        P, out and dS are each rounded once. Independent errors add as root of the sum of squares
        (rss).
        The error of delta is common to a row, so it adds linearly.

        out   rss_j P v                       delta_i = rss_e dout (|out| + rss_j P v)
        dv    rss_i P dout                    dq   |scale| (rss_j dS k + delta |P k|)
                                              dk   |scale| rss_i (dS + P delta) q

Under a sink z, P has the factor a = sigmoid(lse - z), and with r = rowsum(dout * out), out still
without a,

    dsink    u sum_i a (1 - a) (sum_e |dout| W |v| + |r| (2 + |lse| + |z| + sum_j P_ij (1 + A_ij)))
             u (16 bits) rss_i a (1 - a) rss_e dout (|out| + rss_j P v)

Under a soft-cap c, a score s has the ratio t = s / c and the slope 1 - t^2. A becomes slope A + 4
|s|, for the error of tanh. dS gets the factor slope. D becomes slope D + W (...) (4 t^2 + 2 |t| A /
c), for the error of the slope.

A kernel rounds both out and dout a second time, which doubles the distances of 16 bits.

With scale 0, dv of a plain sum adds n almost equal numbers, all rounded in one direction: partial
sums grow evenly, so the n roundings in float32 add up to n / 2 of the whole sum.

Source: Nicholas Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.3, running
error analysis."""

from typing import NamedTuple

import torch
from torch import Tensor

from canon.route.checks import Scale, split_scale
from canon.testing.judge import (
    EXACT,
    UNIT,
    Masks,
    Results,
    by_sequence,
    results_of,
    row_blocks,
    visible_blocks,
)


@by_sequence
def roundings(
    q, k, v, dout, mask: Masks, scale: Scale | None = None, dlse=None, sink=None
) -> Results:
    """Return the distances in float64, if the score matrix fits into memory."""
    dsink = None if sink is None else sink_roundings(q, k, v, dout, mask, scale, sink)
    group = q.shape[2] // k.shape[2]
    scale, softcap = split_scale(q.shape[-1] ** -0.5 if scale is None else scale)
    narrow_dtype, narrow = q.dtype, torch.finfo(q.dtype).eps / 2 if q.dtype.itemsize == 2 else 0.0
    blocks = [rows for _, rows in visible_blocks(mask, q.device)]
    visible = (
        torch.cat(blocks)
        if blocks
        else torch.zeros(0, mask.keys, dtype=torch.bool, device=q.device)
    )
    wide = EXACT if q.dtype == torch.float64 else UNIT
    q, dout = (_heads_first(x, visible.any(1)) for x in (q, dout))
    k, v = (_heads_first(x, visible.any(0)).repeat_interleave(group, 1) for x in (k, v))
    dlse = (
        torch.zeros_like(q[..., 0])
        if dlse is None
        else dlse.double().masked_fill(~visible.any(1), 0)
    )
    cap, scores = _capped(_scores(scale * q, k, visible), softcap)
    q, k, v, dout = map(_finite, (q, k, v, dout))
    lse = scores.logsumexp(-1) if mask.keys else scores.sum(-1)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    p = torch.exp(scores - lse[..., None])
    sizes_of_lse, share = lse.abs(), torch.ones_like(lse)
    if sink is not None:
        sink, narrow = sink.detach().double()[:, None], 2 * narrow
        sizes_of_lse, share = lse.abs() + sink.abs(), torch.sigmoid(lse - sink)
        dlse = dlse / share  # only P has the factor: dlse reaches the scores without it
    p = share[..., None] * p
    scale = abs(scale)
    in_float32 = _wide(
        q.abs(), k.abs(), v.abs(), dout.abs(), p, sizes_of_lse, dlse.abs(), share, scale, cap
    )
    sizes = [wide * x for x in in_float32]
    if narrow:
        least = (
            torch.finfo(narrow_dtype).smallest_normal * visible
        )  # below it the spacing is constant: float16 underflows
        in_16_bits = _narrow(q, k, v, dout, p, dlse, scale, least, cap.slope)
        sizes = [x if y is None else x + narrow * y for x, y in zip(sizes, in_16_bits, strict=True)]
    out, lse, dq, dk, dv = sizes
    if scale == 0 and not narrow and dout.unique().numel() < 3:  # 0 if nothing is seen
        number = group * visible.sum(0)[:, None]  # of equal products
        dv = dv + wide / 2 * number * (p.mT @ dout).abs()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    out, dq, dk, dv = (x.transpose(1, 2) for x in (out, dq, dk, dv))
    return results_of((out, lse, dq, dk, dv), dsink)


def sink_roundings(q, k, v, dout, mask: Masks, scale: Scale | None, sink) -> Tensor:
    """Return the distances of dsink (h,), for some rows of the mask at a time."""
    if q.dim() == 3:
        return sink_roundings(*(x[None] for x in (q, k, v, dout)), mask, scale, sink)
    if isinstance(mask, tuple):
        tensors = zip(*(x.split(1) for x in (q, k, v, dout)), mask, strict=True)
        return sum(sink_roundings(*one, scale, sink) for one in tensors)
    narrow = torch.finfo(q.dtype).eps / 2 if q.dtype.itemsize == 2 else 0.0
    wide = EXACT if q.dtype == torch.float64 else UNIT
    group = q.shape[2] // k.shape[2]
    scale, softcap = split_scale(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v, dout = (x.detach().double().transpose(1, 2) for x in (q, k, v, dout))
    k, v = k.repeat_interleave(group, 1), _finite(v).repeat_interleave(group, 1)
    sink = sink.detach().double()[:, None]
    sums, squares = torch.zeros_like(sink[:, 0]), torch.zeros_like(sink[:, 0])
    for rows, visible in row_blocks(mask, q):
        cap, scores = _capped(_scores(scale * q[:, :, rows], k, visible), softcap)
        lse = scores.logsumexp(-1) if mask.keys else scores.sum(-1)
        seen = lse > -torch.inf
        lse = lse.masked_fill(~seen, 0)
        p = torch.exp(scores - lse[..., None])
        size = cap.sizes(abs(scale) * _partial_sums(_finite(q[:, :, rows]).abs(), _finite(k).abs()))
        through = seen * torch.sigmoid(lse - sink) * torch.sigmoid(sink - lse)  # a (1 - a)
        out, dy = p @ v, _finite(dout[:, :, rows])
        weights = p * (1 + size + lse.abs()[..., None])
        of_weight = (dy * out).sum(-1).abs() * (
            2 + lse.abs() + sink.abs() + (p * (1 + size)).sum(-1)
        )
        sums += (through * ((dy.abs() * (weights @ v.abs())).sum(-1) + of_weight)).sum((0, 2))
        squares += (through * (dy * (out.abs() + _rss(p, v))).norm(dim=-1)).square().sum((0, 2))
    return wide * sums + narrow * squares.sqrt()


def _wide(q, k, v, dout, p, lse, dlse, share, scale: float, cap: "_Cap") -> tuple[Tensor, ...]:
    scores = cap.sizes(scale * _partial_sums(q, k))
    weights = p * (1 + scores + lse[..., None])
    out = weights @ v
    ds = weights * (dout @ v.mT + (dout * out).sum(-1, keepdim=True) + dlse[..., None])
    ds = ds * cap.of_ds(scores)
    return (
        out,
        2 * lse + (p * (1 + scores)).sum(-1) / share,
        scale * ds @ k,
        scale * ds.mT @ q,
        weights.mT @ dout,
    )


def _narrow(
    q, k, v, dout, p, dlse, scale: float, least: Tensor, slope: Tensor | float
) -> tuple[Tensor | None, ...]:
    """Return the second table. ``least``: the least size of p and ds in it."""
    out, out_error = p @ v, _rss(p + least, v)
    delta = (dout * (out.abs() + out_error)).norm(dim=-1, keepdim=True)
    ds = (
        slope * (p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True) + dlse[..., None])).abs()
        + least
    )
    p_ds = slope * p
    dq = _rss(ds, k) + delta * (p_ds @ k).abs()
    return (
        out_error,
        None,
        scale * dq,
        scale * _rss((ds + p_ds * delta).mT, q),
        _rss((p + least).mT, dout),
    )


class _Cap(NamedTuple):
    """The ratios t of scores to a soft-cap and the slopes of tanh; without one 0 and 1."""

    softcap: float
    ratio: Tensor | float
    slope: Tensor | float

    def sizes(self, x: Tensor) -> Tensor:
        return self.slope * x + 4 * self.softcap * self.ratio

    def of_ds(self, sizes: Tensor) -> Tensor | float:
        """Return the factor of D. ``sizes``: A of capped scores."""
        return self.slope + self.ratio * (4 * self.ratio + 2 / self.softcap * sizes)


def _capped(scores: Tensor, softcap: float | None) -> tuple[_Cap, Tensor]:
    """Return the soft-cap of scores, and the capped ones: -inf stays."""
    if softcap is None:
        return _Cap(1.0, 0.0, 1.0), scores
    ratio = torch.tanh(scores / softcap)
    capped = torch.where(scores == -torch.inf, scores, softcap * ratio)
    return _Cap(softcap, ratio.abs(), 1 - ratio.square()), capped


def _partial_sums(q: Tensor, k: Tensor) -> Tensor:
    return max(1.0, (q.shape[-1] / 3) ** 0.5) * q @ k.mT


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Return q k^T, -inf in hidden cells. The judge reads no distance that depends on a NaN."""
    return (q @ k.mT).masked_fill(~visible, -torch.inf).nan_to_num(0.0, 0.0, -torch.inf)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _rss(a: Tensor, b: Tensor) -> Tensor:
    return (a.square() @ b.square()).sqrt()


def _heads_first(x: Tensor, seen: Tensor) -> Tensor:
    return x.detach().double().masked_fill(~seen[:, None, None], 0).transpose(1, 2)
