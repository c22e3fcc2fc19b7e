"""The contract of `canon check MODULE`: which functions are called, how, and how a module limits what is asked of it.

CONVENTIONS    calling conventions, for ``canon check --help``
TEMPLATE       a module to start from, for ``canon check --template``: it passes, and declines what it leaves open
limited        the cases that a module with ``--features`` can run
"""

from collections.abc import Sequence
from dataclasses import replace

from canon.testing.cases import MASKS, Case

CONVENTIONS = """\
MODULE may have any of these functions; those that it lacks are skipped. NotImplementedError declines a case.

  attention(q, k, v, mask)                              one rank, the whole sequence
  ring_attention(q, k, v, mask, layout)                 a collective; also strided_attention and magi_attention
  zigzag_attention(q, k, v, mask)                       a collective with a layout of its own; also striped_attention
  attention_forward, attention_backward, merge, dispatch, cast_plan, plan_report, group_cast, group_reduce, Layout
                                                        as in canon.reference

q (b, t, h, d), k (b, t, g, d), v (b, t, g, dv), or packed without b; t are this rank's tokens, h is a multiple of g.
mask is a canon.Mask over the whole sequence; layout is a canon.Layout and says which rank holds which tokens. The
ranks form the default process group of torch.distributed. The functions return out (b, t, h, dv) in the dtype of q;
asked for return_lse=True they return (out, lse) with lse (b, h, t), natural logarithm, float32. Both are
differentiable. Keyword arguments are passed only where a case needs them: scale, backward, return_lse, reduce_dtype,
and the options of canon.reference. Tokens that nothing sees hold NaN.

--features takes words, separated by commas, each one a limit of MODULE. Cases are adapted to it, or left out:

  full, causal, window, documents, block_causal    the masks that it takes; without such a word, all of them
  no-mask            it takes no mask: attention is causal, and mask is None or not passed
  no-lse             it returns out alone
  no-options         it takes no options: default scale, default backward pass
  forward            it is not differentiable: only out and lse are compared
  batched, packed    its tensors are (b, t, h, d) alone, or (t, h, d) alone
  equal-heads        h == g        equal-widths    d == dv        contiguous    tensors are contiguous
"""

TEMPLATE = '''\
"""Attention of my own, for `canon check my_attention`. Replace the bodies; delete the functions that you do not offer."""

import torch


def attention(q, k, v, mask=None, *, scale=None, backward="auto", return_lse=False):
    """Return out (b, t, h, dv), and lse (b, h, t) on request, of q (b, t, h, d), k (b, s, g, d) and v (b, s, g, dv).

    All tensors may come packed, without b. ``mask.dense()`` is the boolean matrix [queries, keys]; None is causal.
    """
    if q.ndim == 3:
        out, lse = attention(q[None], k[None], v[None], mask, scale=scale, return_lse=True)
        return (out[0], lse[0]) if return_lse else out[0]
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril() if mask is None else mask.dense()
    seen = seen.to(q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_seen, k_seen = seen.any(1)[:, None, None], seen.any(0)[:, None, None]
    queries = q.to(wide).masked_fill(~q_seen, 0).transpose(1, 2)  # tokens that nothing sees may hold NaN
    keys, values = (
        x.to(wide).masked_fill(~k_seen, 0).transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (k, v)
    )
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * queries @ keys.mT
    scores = torch.where(seen, scores, -torch.inf)
    blind = ~seen.any(1, keepdim=True)
    p = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    lse = torch.logsumexp(scores.masked_fill(blind, 0), -1).masked_fill(blind[:, 0], -torch.inf)
    out = (p @ values).masked_fill(blind, 0).transpose(1, 2).to(q.dtype)  # so their gradients are 0
    return (out, lse) if return_lse else out


def ring_attention(q, k, v, mask=None, layout=None, *, scale=None, backward="auto", reduce_dtype=None, return_lse=False):
    """The same over the ranks of torch.distributed's default group; ``layout.positions(rank)`` are a rank's tokens."""
    raise NotImplementedError("ring_attention is not written yet")
'''

SHAPES = ("batched", "packed", "equal-heads", "equal-widths", "contiguous")
WORDS = (*MASKS, "no-mask", "no-lse", "no-options", "forward", *SHAPES)
_ATTEND = (
    "attention",
    "ring_attention",
    "zigzag_attention",
    "striped_attention",
    "strided_attention",
    "magi_attention",
)


def features(text: str) -> frozenset[str]:
    """The words of ``--features``. Raises ValueError for unknown ones, and for two that exclude one another."""
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - set(WORDS)):
        raise ValueError(f"--features {', '.join(unknown)}: expected words of {', '.join(WORDS)}")
    if {"batched", "packed"} <= words:
        raise ValueError("--features batched,packed: each excludes the other; leave both out if the module takes both")
    if "no-mask" in words and words & set(MASKS) - {"causal"}:
        raise ValueError("--features no-mask: attention is causal then, so no other mask can be named")
    return words


def limited(cases: Sequence[Case], words: frozenset[str], even: bool) -> list[Case]:
    """The cases under the limits ``words``, adapted; each name once. ``even``: the ranks' shards are of one length."""
    adapted = [_adapted(case, words) for case in cases]
    if "no-mask" in words and not even:  # a function that makes its layout takes all shards to be as long as its own
        adapted = [case for case in adapted if case and case.function not in ("zigzag_attention", "striped_attention")]
    return list({case.name: case for case in adapted if case is not None}.values())


def _adapted(case: Case, words: frozenset[str]) -> Case | None:
    masks = {"causal"} if "no-mask" in words else words & set(MASKS)
    attends = case.function in _ATTEND
    if (masks and case.mask not in masks) or ("forward" in words and case.function == "attention_backward"):
        return None
    shape = case.shape
    shape = replace(shape, batch=max(1, shape.batch)) if "batched" in words else shape
    shape = replace(shape, batch=0) if "packed" in words else shape
    shape = replace(shape, heads=(shape.heads[0],) * 2) if "equal-heads" in words else shape
    shape = replace(shape, widths=(shape.widths[0],) * 2) if "equal-widths" in words else shape
    shape = replace(shape, contiguous=True) if "contiguous" in words else shape
    if not attends:
        return replace(case, shape=shape)
    if "no-options" in words:
        if case.options or case.method != "auto":
            return None
        shape = replace(shape, scale=None)
    if "no-mask" in words:
        if case.options or case.method != "auto":
            return None
        shape, case = replace(shape, scale=None), replace(case, variant="plain")
    used = "no lse" if words & {"no-lse", "no-mask"} else case.used
    used = {"both": "forward", "no lse": "forward, no lse"}[used] if "forward" in words else used
    return replace(case, shape=shape, used=used)
