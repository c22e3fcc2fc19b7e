"""Faults of real implementations of attention, planted in the source of the reference.

    faulty = with_fault(*FAULTS["a hop is dropped"][1:])
    faulty.ring_attention(q, k, v)

`tests/testing/test_judge.py` and `tests/detection.py` run such modules.
"""

import importlib
import inspect
import re
import sys
import types

from canon.reference import Band, Mask
from canon.route.algorithm import ALGORITHMS

LOCAL = "attention/documents"
RING = "ring_attention/zigzag/causal"
FULL = "ring_attention/contiguous/full"
CASTS = "group_collectives"
CAST, REDUCE = "group_cast/planned/documents/two_casts", "group_reduce/striped/documents/one_cast"
SHARED = dict.fromkeys(("checks", "call", "attend"), "canon.route")
SHARED |= dict.fromkeys(("public_attention", "public_parts", "public_ring"), "canon.faces")
# of a faulty module, in order of imports
FILES = (*SHARED, "tiles", "backward", "local", "group_collectives", "ring", "magi")

# kind: fault: (case of the check, file, text, replacement of the first occurrence)
FAULTS_BY_KIND = {
    "mask": {
        "causal is off by one, a key too few": (
            LOCAL,
            "tiles",
            "tiles = [",
            "mask = moved(mask, hi=-1)\n    tiles = [",
        ),
        "causal is off by one, a key too many": (
            LOCAL,
            "tiles",
            "tiles = [",
            "mask = moved(mask, hi=1)\n    tiles = [",
        ),
        "a document leaks into the next": (
            LOCAL,
            "tiles",
            "tiles = [",
            "mask = moved(mask, k_start=-1)\n    tiles = [",
        ),
        "no mask means full attention": (
            "attention/causal/plain",
            "checks",
            "Mask.causal, q.shape[-3]",
            "Mask.full, q.shape[-3]",
        ),
    },
    "exchange": {
        "a hop is dropped": (RING, "ring", "range(call.ranks)):", "range(call.ranks - 1)):"),
        "K is stale: the first hop's is used in every hop": (
            RING,
            "ring",
            "held = hop.wait() if hop else held",
            "hop and hop.wait()",
        ),
        "two tokens change places on their way": (
            CAST,
            CASTS,
            "return self.received\n",
            "return self.received[[1, 0, *range(2, len(self.received))]]\n",
        ),
        "the tokens of one source are stale": (
            CAST,
            CASTS,
            "self.sent = x[",
            "self.sent = (x if rank != 1 else x.roll(1, 0))[",
        ),
        "every cast sends the rows of the first": (
            CAST,
            CASTS,
            "x[plan.send_rows(stage, rank).to(x.device)]",
            "x[plan.send_rows(0, rank)[: sum(sizes.sent)]]",
        ),
        "the gradients of one rank are left out": (
            REDUCE,
            CASTS,
            "self.sizes.sent), parts, ",
            "self.sizes.sent)[1:], parts[1:], ",
        ),
        "gradients are added, but not in place": (
            REDUCE,
            CASTS,
            "total = self.into",
            "self.into = self.into.clone()\n        total = self.into",
        ),
        "a plan forgets a token": (
            "cast_plan/planned/documents",
            CASTS,
            "common := owned[first:last]",
            "common := owned[first : last - 1]",
        ),
    },
    "softmax": {
        "the merge skips a rescale": (
            RING,
            "local",
            "weighted(out, lse) + weighted",
            "out.to(lse.dtype) + weighted",
        ),
        "the online softmax skips a rescale": (
            LOCAL,
            "local",
            "shrink[..., None] * weighted",
            "weighted",
        ),
        "the scale is off by 1 %": (
            LOCAL,
            "checks",
            "q.shape[-1] ** -0.5",
            "1.01 * q.shape[-1] ** -0.5",
        ),
        "query heads use the wrong key head": (
            LOCAL,
            "tiles",
            ".repeat_interleave(share, dim=1)",
            ".repeat(1, share, 1, 1)",
        ),
        "lse is in base 2": (
            LOCAL,
            "local",
            "highest + torch.log(",
            "1.4427 * highest + torch.log2(",
        ),
        "one token's row is zero": (
            LOCAL,
            "local",
            "out = out.transpose(1, 2).to(out_dtype)",
            "out = out.transpose(1, 2).to(out_dtype); out[:, -9] = 0",
        ),
    },
    "gradient": {
        "dk and dv are swapped": (
            LOCAL,
            "backward",
            "of_keys() if keys_need_grad",
            "of_keys()[::-1] if keys_need_grad",
        ),
        "dlse is ignored": (LOCAL, "backward", "delta if dlse is None else delta - dlse", "delta"),
        "delta is computed in every hop from its own part": (
            RING,
            "ring",
            "            delta,\n            mask,",
            "            delta / call.ranks,\n            mask,",
        ),
        "a given delta is computed again": (
            "attention_backward/causal/split/part",
            "backward",
            "if delta is None:",
            "if True:",
        ),
    },
    "precision": {
        "out is accumulated in bfloat16": (
            FULL,
            "local",
            "weighted + product",
            "weighted.bfloat16() + product.bfloat16()",
        ),
        "parts are merged in bfloat16": (
            FULL,
            "ring",
            "merged(out, lse, *part)",
            "merged(out.bfloat16(), lse, *part)",
        ),
        "dk and dv are accumulated in bfloat16": (
            FULL,
            "backward",
            "torch.zeros_like(x[:, :: self.share])",
            "torch.zeros_like(x[:, :: self.share], dtype=torch.bfloat16)",
        ),
        "the ring sums gradients in bfloat16": (
            FULL,
            "ring",
            "x.to(call.reduce_dtype)",
            "x.bfloat16()",
        ),
        "gradients are added in bfloat16": (
            REDUCE,
            CASTS,
            "total[rows] += part",
            "total[rows] = (total[rows].bfloat16() + part).to(part.dtype)",
        ),
        "grad_dtype is ignored": (
            "attention_backward/causal/split/part",
            "public_parts",
            'checked_dtype("grad_dtype", grad_dtype, q.dtype)',
            "torch.bfloat16",
        ),
    },
    "NaN": {
        "a NaN on another rank is hidden": (
            "ring_attention/contiguous/documents/nan in k",
            "local",
            "some = total != 0",
            "some = total > 0",
        ),
        "a merge drops a NaN": (
            "ring_attention/contiguous/documents/nan in k",
            "local",
            "part_lse != -torch.inf",
            "part_lse > -torch.inf",
        ),
        "a query that sees a NaN gets 0": (
            "attention/sequences/inf in v",
            "local",
            "return out[:, :tokens, :, :width]",
            "return out[:, :tokens, :, :width].nan_to_num()",
        ),
    },
}
FAULTS = {name: fault for faults in FAULTS_BY_KIND.values() for name, fault in faults.items()}


def moved(mask, k_start=0, hi=0):
    """Return the mask with the corners or the diagonals of its bands moved."""
    bands = [
        Band(b.q_start, b.q_stop, max(0, b.k_start + k_start), b.k_stop, b.lo + k_start, b.hi + hi)
        for b in mask.bands
    ]
    return Mask(bands, mask.queries, mask.keys)


def home(name):
    return SHARED.get(name, "canon.reference")


def with_fault(file, text, replacement):
    """Return a module with the reference's public functions, from its source with one text of one
    file replaced.
    """
    module, changed, known = types.ModuleType("faulty"), 0, dict(ALGORITHMS)
    for name in FILES:
        source = inspect.getsource(importlib.import_module(f"{home(name)}.{name}"))
        if name == file:
            changed += source.count(text)
            source = source.replace(text, replacement, 1)
        # no operators
        source = source.replace(
            "operators import declared", "algorithm import Declaration as declared"
        )
        scope = {"__name__": f"faulty_{name}", "moved": moved}
        sys.modules[f"faulty_{name}"] = types.ModuleType(f"faulty_{name}")
        for imported in FILES:
            source = source.replace(
                f"from {home(imported)}.{imported} import", f"from faulty_{imported} import"
            )
            source = re.sub(
                rf"^from {home(imported)} import (.*)\b{imported}\b(?:, )?(.*)\n",
                rf"import faulty_{imported} as {imported}\nfrom {home(imported)} import \1\2\n",
                source,
                flags=re.MULTILINE,
            )
        source = re.sub(r"^from \S+ import \n", "", source, flags=re.MULTILINE)
        exec(compile(source, f"faulty {name}", "exec"), scope)
        vars(sys.modules[f"faulty_{name}"]).update(scope)
        vars(module).update({public: scope[public] for public in scope.get("__all__", ())})
    ALGORITHMS.update(known)  # calls of the reference stay those of the reference
    assert changed, f"{file}.py does not contain {text!r}: adapt this fault to the source"
    return module
