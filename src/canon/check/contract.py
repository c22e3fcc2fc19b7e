"""The calling conventions of `canon check MODULE`, and the limits of a module."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from canon.check.cases import ATTEND, MASKS, REPLICATED, Case

CONVENTIONS = """\
How to write MODULE. It is a Python module with one or more of the functions below. Functions that
it lacks, or imports from canon, are skipped. NotImplementedError declines a case, and in float64
ValueError and TypeError do, too.

  attention(q, k, v, mask)                  on one rank: the whole sequence
  ring_attention(q, k, v, mask, layout)     on all ranks; also strided_attention and magi_attention
  zigzag_attention(q, k, v, mask)           on all ranks, with the layout
                                            canon.Layout.zigzag(mask.queries, ranks)
  striped_attention(q, k, v, mask)          on all ranks, with the layout
                                            canon.Layout.striped(mask.queries, ranks)
  latent_attention(q, latent, k_rope, up_weight, mask, layout)    on all ranks, with the tensors of
  canon.reference
  decode_attention(q, k, v, mask)           on all ranks: each has all queries and its own keys, and
                                            returns the same bits

  tensors   q (b, t, h, d), k (b, t, g, d) and v (b, t, g, dv), or packed, without b. A rank passes
            its own t tokens. h is a multiple of g. Some cases have dv != d, and tensors that are
            not contiguous.
  mask      a canon.Mask over the whole sequence. mask.dense() returns it as booleans [queries,
            keys]. Without a mask, or with None, attention is causal. All of these functions also
            get a tuple of b Masks, one for each sequence. decode_attention gets the columns of its
            own keys; None means that all of them are seen.
  layout    a canon.Layout. layout.positions(r) returns the tokens of rank r: row i of its q, k and
            v is token positions(r)[i] of the sequence.
  ranks     the default process group of torch.distributed. All ranks make the same call.
  result    out (b, t, h, dv) in the dtype of q. With return_lse=True: (out, lse), where lse (b, h,
            t) is the natural logarithm of the softmax denominator, in float32 (float64 for
            float64). out and lse are differentiable.
  NaN       q, k, v and the gradient of out hold NaN for queries that see no key and for keys that
            no query sees. These NaN must not change other results. A query that sees no key gets
            out 0, lse -inf and zero gradients. In some cases one element of a visible token is NaN
            or infinite. It must reach all results that depend on it. It may reach more of its
            sequence and key head, as 0 * NaN does, but in merge no other element, and from q and
            dout no other query.
  keywords  return_lse; scale (default 1 / sqrt(d)); backward ("split", "fused" or "head_parallel",
            default "auto"); reduce_dtype, the dtype in which dk and dv travel; and the options of
            strided_attention and magi_attention in canon.reference. A keyword is passed only if a
            case does not use its default. Functions with a parameter sink also get a logit (h,) of
            each query head: out has the factor sigmoid(lse - sink), and lse stays the same.
            Functions with a parameter softcap also get one: scores s become softcap * tanh(s /
            softcap). Functions with a parameter group also get a DeviceMesh of all ranks with the
            dimensions ("tokens", "heads"), in cases named columns.

Parts of the algorithms are compared, too. Their arguments and results are those of canon.reference;
for example, python -c "import canon; help(canon.reference.merge)" shows them:

  attention_forward(q, k, v, mask, scale=, out_dtype=)
      returns out, lse
  attention_backward(dout, q, k, v, out, lse, mask, scale=, method=, dlse=, ...)
      returns dq, dk, dv
  merge(out, lse, other_out, other_lse)
      returns out, lse; a row with lse -inf has the weight 0, and its out holds NaN here
  dispatch(mask, ranks, ...), cast_plan(mask, layout, casts=, own_keys_first=)
  group_cast(x, plan, stage), group_reduce(y, plan, stage, into)
  prepare(function, mask, layout, rank=, batch=, heads=, widths=, dtype=, device=)
      returns plans with load()

--features takes a list of words, separated by commas. Each word states a limit of MODULE. Cases
beyond the limits are changed to fit them, or left out:

  full, causal, window, documents, block_causal, tree    supports only the masks that are named;
                                                         default: all
  no-mask            supports causal attention only; mask is None or not passed
  one-mask           supports one mask for all sequences, and no tuple of masks
  no-lse             returns out only
  no-options         takes no options: default backward pass and default scale
  forward            is not differentiable: only out and lse are compared
  batched, packed    supports only (b, t, h, d), or only (t, h, d)
  equal-heads        needs h == g
  equal-widths       needs d == dv
  contiguous         needs contiguous tensors
  finite             is not tried with a NaN or an infinity in a visible token
"""

TEMPLATE = '''\
"""My own attention, for `canon check my_attention`.

Replace the bodies. Delete the functions that you do not need.
"""

import torch


def attention(q, k, v, mask=None, *, scale=None, backward="auto", return_lse=False):
    """Return out (b, t, h, dv), or (out, lse) with lse (b, h, t).

    q (b, t, h, d), k (b, s, g, d) and v (b, s, g, dv) may be packed, without b. ``mask.dense()``
    returns the booleans [queries, keys]. None is causal. A tuple holds a mask for each sequence.
    """
    if isinstance(mask, tuple):
        sequences = zip(q, k, v, mask, strict=True)
        parts = [attention(*one, scale=scale, return_lse=True) for one in sequences]
        out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        return (out, lse) if return_lse else out
    if q.ndim == 3:
        out, lse = attention(q[None], k[None], v[None], mask, scale=scale, return_lse=True)
        return (out[0], lse[0]) if return_lse else out[0]
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    visible = (visible if mask is None else mask.dense()).to(q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_seen, k_seen = visible.any(1)[:, None, None], visible.any(0)[:, None, None]
    # queries that see no key, and keys that no query sees, may hold NaN
    queries = q.to(wide).masked_fill(~q_seen, 0).transpose(1, 2)
    keys, values = (x.to(wide).masked_fill(~k_seen, 0).transpose(1, 2) for x in (k, v))
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (keys, values))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * queries @ keys.mT
    scores = torch.where(visible, scores, -torch.inf)
    fully_masked = ~visible.any(1, keepdim=True)  # rows that would give NaN in a softmax
    finite = scores.masked_fill(fully_masked, 0)
    p = torch.softmax(finite, -1).masked_fill(fully_masked, 0)
    lse = torch.logsumexp(finite, -1).masked_fill(fully_masked[:, 0], -torch.inf)
    # their gradients are 0, too
    out = (p @ values).masked_fill(fully_masked, 0).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def ring_attention(
    q, k, v, mask=None, layout=None, *,
    scale=None, backward="auto", reduce_dtype=None, return_lse=False,
):
    """Return the same for this rank's queries over the keys of all ranks.

    The ranks are those of torch.distributed's default group. ``layout.positions(rank)`` returns the
    tokens of a rank. A tuple holds a mask for each sequence, as above.
    """
    raise NotImplementedError("ring_attention is not written yet")


def zigzag_attention(
    q, k, v, mask=None, *, scale=None, backward="auto", reduce_dtype=None, return_lse=False
):
    """Return the same where rank r of W holds the pieces r and 2 W - 1 - r of 2 W pieces."""
    raise NotImplementedError("zigzag_attention is not written yet")
'''

SHAPES = ("batched", "packed", "equal-heads", "equal-widths", "contiguous")
WORDS = (*MASKS, "no-mask", "one-mask", "no-lse", "no-options", "forward", "finite", *SHAPES)


def features(text: str) -> frozenset[str]:
    """Return the words of ``--features``. Raises ValueError."""
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - set(WORDS)):
        raise ValueError(
            f"--features {', '.join(unknown)}: expected one or more of {', '.join(WORDS)}"
        )
    if {"batched", "packed"} <= words:
        raise ValueError(
            "--features batched,packed: expected one of them; leave both out if the "
            "module supports both"
        )
    if "no-mask" in words and words & set(MASKS) - {"causal"}:
        raise ValueError("--features no-mask allows causal only: leave the other masks out")
    return words


def limited(cases: Sequence[Case], words: frozenset[str], even: bool) -> list[Case]:
    """Return the cases, changed to fit the limits. ``even``: shards have equal length."""
    changed = [adapted(case, words) for case in cases]
    # without a mask, these compute the number of tokens from their own shard
    if "no-mask" in words and not even:
        changed = [
            case
            for case in changed
            if case and case.function not in ("zigzag_attention", "striped_attention")
        ]
    return list({case.name: case for case in changed if case is not None}.values())


def adapted(case: Any, words: frozenset[str]) -> Any:
    """Return the case, changed to fit the limits, or None if it cannot."""
    masks = {"causal"} if "no-mask" in words else words & set(MASKS)
    attends = case.function in {*ATTEND, "prepare"} | REPLICATED
    if (masks and case.kind not in masks) or (
        "forward" in words and case.function == "attention_backward"
    ):
        return None
    if "finite" in words and case.planted:
        return None
    if words & {"one-mask", "packed"} and "sequences" in case.kind:
        return None
    shape = case.shape
    changes = {
        "batched": {"batch": max(1, shape.batch)},
        "packed": {"batch": 0},
        "equal-heads": {"heads": (shape.heads[0],) * 2},
        "equal-widths": {"widths": (shape.widths[0],) * 2},
        "contiguous": {"strides": None},
    }
    for word in words & changes.keys():
        shape = replace(shape, **changes[word])
    if not attends:
        return replace(case, shape=shape)
    if "no-mask" in words and case.function in {"prepare"} | REPLICATED:
        return None
    if words & {"no-options", "no-mask"}:
        if case.options or case.method != "auto":
            return None
        shape = replace(shape, scale=None)
        case = replace(case, variant="plain") if "no-mask" in words else case
    used = case.used
    if words & {"no-lse", "no-mask"}:
        used = "forward, no lse" if used.startswith("forward") else "no lse"
    if "forward" in words and not used.startswith("forward"):
        used = "forward" if used in ("both", "out", "lse") else "forward, no lse"
    return replace(case, shape=shape, used=used)
