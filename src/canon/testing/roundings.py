"""Bound the effect of one rounding of every intermediate result on each element of attention and
its gradients.

    u (float32), with |.| entry by entry
        A_ij = |scale| w sum_d |q_id k_jd|    W_ij = P_ij (1 + A_ij + |lse_i|)
        out   W |v|                           lse  2 |lse| + sum_j P_ij (1 + A_ij)
        dv    W^T |dout|                      dq   |scale| D |k|       dk   |scale| D^T |q|
        with  D_ij = W_ij (sum_e |dout_ie v_je| + sum_e |dout_ie| (W |v|)_ie + |dlse_i|)
              w = max(1, sqrt(d / 3)): root of the sum of squares (rss) of the d growing partial
              sums of a score
        lse rounds once in base 2, and once when it becomes natural

    u (16 bits)
        P, out and dS are each rounded once. Independent errors add as rss; the error of delta,
        common to a row, adds linearly.

        out   rss_j P v                       delta_i = rss_e dout (|out| + rss_j P v)
        dv    rss_i P dout                    dq   |scale| (rss_j dS k + delta |P k|)
                                              dk   |scale| rss_i (dS + P delta) q

Under a sink z, P has the factor a = sigmoid(lse - z), and with r = rowsum(dout * out), out still
without a,

    dsink    u sum_i a (1 - a) (sum_e |dout| W |v| + |r| (2 + |lse| + |z| + sum_j P_ij (1 + A_ij)))
             u (16 bits) rss_i a (1 - a) rss_e dout (|out| + rss_j P v)

Under a soft-cap c, a score s has the ratio t = s / c and the slope 1 - t^2. A becomes slope A + 4
|s|, dS gets the factor slope, and D becomes slope D + W (...) (4 t^2 + 2 |t| A / c).

A kernel under a sink rounds out and dout a second time, which doubles the distances of 16 bits.

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
    heads_first,
    results_of,
    row_blocks,
    seen_tokens,
)


@by_sequence
def roundings(
    q, k, v, dout, mask: Masks, scale: Scale | None = None, dlse=None, sink=None
) -> Results:
    """Return the distances in float64. The arguments are those of `judge.oracle`."""
    group = q.shape[2] // k.shape[2]
    scale, softcap = split_scale(q.shape[-1] ** -0.5 if scale is None else scale)
    kind, is_narrow = torch.finfo(q.dtype), q.dtype.itemsize == 2
    wide = EXACT if q.dtype == torch.float64 else UNIT
    narrow = (1 if sink is None else 2) * kind.eps / 2 if is_narrow else 0.0
    q_seen, k_seen = seen_tokens(mask, q.device)
    q, dout = (heads_first(x, q_seen, torch.float64) for x in (q, dout))
    k, v = (heads_first(x, k_seen, torch.float64) for x in (k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    dlse = torch.zeros_like(q[..., 0]) if dlse is None else dlse.double().masked_fill(~q_seen, 0)
    finite_q, finite_k, v, dout = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v, dout))
    out, lse, dq = torch.empty_like(dout), torch.empty_like(dlse), torch.empty_like(q)
    dk, dv, dk_squares, dv_squares = (torch.zeros_like(x) for x in (k, v, k, v))
    sink = None if sink is None else sink.detach().double()[:, None]
    dsink, dsink_squares = q.new_zeros(q.shape[1]), q.new_zeros(q.shape[1])
    growing = abs(scale) * max(1.0, (q.shape[-1] / 3) ** 0.5)
    all_equal = scale == 0 and not is_narrow and dout.unique().numel() < 3  # 0 if nothing is seen
    equal_sums, number = torch.zeros_like(v), k_seen.new_zeros(mask.keys, dtype=torch.int64)
    for rows, visible in row_blocks(mask, q):
        cap, scores = _capped(_scores(scale * q[:, :, rows], k, visible), softcap)
        q_row, dy, dlse_row = (x[:, :, rows] for x in (finite_q, dout, dlse))
        sizes = cap.sizes(growing * q_row.abs() @ finite_k.abs().mT)
        lse_row = scores.logsumexp(-1) if mask.keys else scores.sum(-1)
        seen = lse_row > -torch.inf
        lse_row = lse_row.masked_fill(~seen, 0)
        p = torch.exp(scores - lse_row[..., None])
        sizes_of_lse, share = lse_row.abs(), torch.ones_like(lse_row)
        if sink is not None:
            share = torch.sigmoid(lse_row - sink)
            through = seen * share * torch.sigmoid(sink - lse_row)  # a (1 - a)
            linear, of_rss = _of_sink(p, v, dy, sizes, lse_row, sink)
            dsink += (through * linear).sum((0, 2))
            dsink_squares += (through * of_rss).square().sum((0, 2))
            sizes_of_lse = sizes_of_lse + sink.abs()
            dlse_row = dlse_row / share  # only P has the factor: dlse reaches scores without it
        p = share[..., None] * p
        of_out, of_lse, of_dq, of_dk, of_dv = _wide(
            q_row.abs(), finite_k.abs(), v.abs(), dy.abs(), p, sizes_of_lse, dlse_row.abs(), share,
            abs(scale), sizes, cap.of_ds(sizes),
        )  # fmt: skip
        out[:, :, rows], lse[:, :, rows], dq[:, :, rows] = (
            wide * x for x in (of_out, of_lse, of_dq)
        )
        dk, dv = dk + wide * of_dk, dv + wide * of_dv
        if all_equal:
            equal_sums, number = equal_sums + p.mT @ dy, number + visible.sum(0)
        if is_narrow:
            # below it the spacing is constant: float16 underflows
            least = kind.smallest_normal * visible
            of_out, of_dq, of_dk, of_dv = _narrow(
                q_row, finite_k, v, dy, p, dlse_row, abs(scale), least, cap.slope
            )
            out[:, :, rows] += narrow * of_out
            dq[:, :, rows] += narrow * of_dq
            dk_squares, dv_squares = dk_squares + of_dk.square(), dv_squares + of_dv.square()
    dk, dv = dk + narrow * dk_squares.sqrt(), dv + narrow * dv_squares.sqrt()
    dv = dv + wide / 2 * group * number[:, None] * equal_sums.abs()
    dsink = wide * dsink + narrow / 2 * dsink_squares.sqrt()  # from out and dout as they are
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    out, dq, dk, dv = (x.transpose(1, 2) for x in (out, dq, dk, dv))
    return results_of((out, lse, dq, dk, dv), None if sink is None else dsink)


def _of_sink(p, v, dy, sizes, lse, sink) -> tuple[Tensor, Tensor]:
    """Return the sum and the rss of dsink by rows, without a (1 - a)."""
    out, sizes = p @ v, 1 + sizes
    weights = p * (sizes + lse.abs()[..., None])
    through_weight = (dy * out).sum(-1).abs()
    through_weight = through_weight * (2 + lse.abs() + sink.abs() + (p * sizes).sum(-1))
    linear = (dy.abs() * (weights @ v.abs())).sum(-1) + through_weight
    return linear, (dy * (out.abs() + rss(p, v))).norm(dim=-1)


def _wide(
    q, k, v, dout, p, lse, dlse, share, scale: float, scores: Tensor, of_ds: Tensor | float
) -> tuple[Tensor, ...]:
    weights = p * (1 + scores + lse[..., None])
    out = weights @ v
    ds = weights * (dout @ v.mT + (dout * out).sum(-1, keepdim=True) + dlse[..., None])
    ds = ds * of_ds
    return (
        out,
        2 * lse + (p * (1 + scores)).sum(-1) / share,
        scale * ds @ k,
        scale * ds.mT @ q,
        weights.mT @ dout,
    )


def _narrow(
    q, k, v, dout, p, dlse, scale: float, least: Tensor, slope: Tensor | float
) -> tuple[Tensor, ...]:
    """Return the second table. ``least``: the least size of p and ds in it."""
    out, out_error = p @ v, rss(p + least, v)
    delta = (dout * (out.abs() + out_error)).norm(dim=-1, keepdim=True)
    ds = (
        slope * (p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True) + dlse[..., None])).abs()
        + least
    )
    p_ds = slope * p
    dq = rss(ds, k) + delta * (p_ds @ k).abs()
    return (
        out_error,
        scale * dq,
        scale * rss((ds + p_ds * delta).mT, q),
        rss((p + least).mT, dout),
    )


class _Cap(NamedTuple):
    """The ratios t and the slopes of a soft-cap; without one 0 and 1."""

    softcap: float
    ratio: Tensor | float
    slope: Tensor | float

    def sizes(self, x: Tensor) -> Tensor:
        return self.slope * x + 4 * self.softcap * self.ratio

    def of_ds(self, sizes: Tensor) -> Tensor | float:
        """Return the factor of D. ``sizes``: A of capped scores."""
        return self.slope + self.ratio * (4 * self.ratio + 2 / self.softcap * sizes)


def _capped(scores: Tensor, softcap: float | None) -> tuple[_Cap, Tensor]:
    if softcap is None:
        return _Cap(1.0, 0.0, 1.0), scores
    ratio = torch.tanh(scores / softcap)
    capped = torch.where(scores == -torch.inf, scores, softcap * ratio)
    return _Cap(softcap, ratio.abs(), 1 - ratio.square()), capped


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~visible, -torch.inf).nan_to_num(0.0, 0.0, -torch.inf)


def rss(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with the root of the sum of squares in place of the sum."""
    return (a.square() @ b.square()).sqrt()
