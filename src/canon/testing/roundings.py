"""Bound the effect of one rounding of every intermediate result on each element of attention and its gradients.

    u (float32)      A_ij = |scale| sum_d |q_id k_jd|        W_ij = P_ij (1 + A_ij + |lse_i|)        |.| entry by entry
        out   W |v|                           lse  |lse| + sum_j P_ij (1 + A_ij)
        dv    W^T |dout|                      dq   |scale| D |k|                dk   |scale| D^T |q|
        with  D_ij = W_ij (sum_e |dout_ie v_je| + sum_e |dout_ie| (W |v|)_ie + |dlse_i|)

    u (16 bits)      P, out and dS are each rounded once. Independent errors add as root of the sum of squares (rss). The
                     error of delta is common to a row, so it adds linearly.
        out   rss_j P v                       delta_i = rss_e dout (|out| + rss_j P v)
        dv    rss_i P dout                    dq   |scale| (rss_j dS k + delta |P k|)
                                              dk   |scale| rss_i (dS + P delta) q

To first order, a rounding changes a score by u A, and P by u P (A + |lse|). The measured errors of honest evaluations
show the same if there are many elements. With few elements an honest evaluation may be exact by chance. If terms cancel,
the size of a sum gives no scale for its error: dq of a query with one key is 0.

Source: Nicholas Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.3, running error analysis.
"""

import torch
from torch import Tensor

from canon.reference import Mask
from canon.testing.judge import EXACT, UNIT, Attended, visible_blocks


def roundings(q, k, v, dout, mask: Mask, scale: float | None = None, dlse=None) -> Attended:
    """Return the distances in float64, in the shapes of the results. Arguments are those of `judge.oracle`.

    The whole score matrix must fit into memory.
    """
    if q.dim() == 3:
        packed, dlse = (x[None] for x in (q, k, v, dout)), None if dlse is None else dlse[None]
        return Attended(*(x[0] for x in roundings(*packed, mask, scale, dlse)))
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[2] // k.shape[2]
    narrow_dtype, narrow = q.dtype, torch.finfo(q.dtype).eps / 2 if q.dtype.itemsize == 2 else 0.0
    blocks = [rows for _, rows in visible_blocks(mask, q.device)]
    visible = torch.cat(blocks) if blocks else torch.zeros(0, mask.keys, dtype=torch.bool, device=q.device)
    wide = EXACT if q.dtype == torch.float64 else UNIT
    q, dout = (_heads_first(x, visible.any(1)) for x in (q, dout))
    k, v = (_heads_first(x, visible.any(0)).repeat_interleave(group, 1) for x in (k, v))
    dlse = torch.zeros_like(q[..., 0]) if dlse is None else dlse.double().masked_fill(~visible.any(1), 0)
    scores = (scale * q @ k.mT).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1) if mask.keys else scores.sum(-1)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    p = torch.exp(scores - lse[..., None])
    scale = abs(scale)
    in_float32 = _wide(q.abs(), k.abs(), v.abs(), dout.abs(), p, lse.abs(), dlse.abs(), scale)
    sizes = [wide * x for x in in_float32]
    if narrow:
        least = (
            torch.finfo(narrow_dtype).smallest_normal * visible
        )  # below it the spacing is constant: float16 underflows
        in_16_bits = _narrow(q, k, v, dout, p, dlse, scale, least)
        sizes = [x if y is None else x + narrow * y for x, y in zip(sizes, in_16_bits, strict=True)]
    out, lse, dq, dk, dv = sizes
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    out, dq, dk, dv = (x.transpose(1, 2) for x in (out, dq, dk, dv))
    return Attended(out, lse, dq, dk, dv)


def _wide(q, k, v, dout, p, lse, dlse, scale: float) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv by the first table. All arguments are absolute values."""
    scores = scale * q @ k.mT
    weights = p * (1 + scores + lse[..., None])
    out = weights @ v
    ds = weights * (dout @ v.mT + (dout * out).sum(-1, keepdim=True) + dlse[..., None])
    return out, lse + (p * (1 + scores)).sum(-1), scale * ds @ k, scale * ds.mT @ q, weights.mT @ dout


def _narrow(q, k, v, dout, p, dlse, scale: float, least: Tensor) -> tuple[Tensor | None, ...]:
    """Return the same by the second table. lse is None, because it is not rounded.

    The rounding error of p and ds is at least that of numbers of size ``least``.
    """
    out, out_error = p @ v, _rss(p + least, v)
    delta = (dout * (out.abs() + out_error)).norm(dim=-1, keepdim=True)
    ds = (p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True) + dlse[..., None])).abs() + least
    dq = _rss(ds, k) + delta * (p @ k).abs()
    return out_error, None, scale * dq, scale * _rss((ds + p * delta).mT, q), _rss((p + least).mT, dout)


def _rss(a: Tensor, b: Tensor) -> Tensor:
    return (a.square() @ b.square()).sqrt()


def _heads_first(x: Tensor, seen: Tensor) -> Tensor:
    return x.detach().double().masked_fill(~seen[:, None, None], 0).transpose(1, 2)
