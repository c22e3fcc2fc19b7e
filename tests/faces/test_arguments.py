"""A wrong argument of a public function is named on every rank, also if only one rank has it, and
so is a disagreement.

`test_mask_arguments` has the constructors of masks and layouts.
"""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, reference, training
from canon.testing import process_groups

pytestmark = pytest.mark.usefixtures("own_errors")
LOCAL = "attention attention_forward attention_backward"
PLACED = "ring_attention strided_attention magi_attention"
DISTRIBUTED = f"{PLACED} zigzag_attention striped_attention"
ATTEND = f"attention {DISTRIBUTED}"
INVARIANT = "strided_attention magi_attention"
LOSSES = "sequence_loss linear_sequence_loss"
LINEAR = "linear_sequence_loss"
MOVES = "unshard redistribute"
GROUPS = "group_cast group_reduce"
CALLED_ALONE = f"{LOCAL} merge dispatch cast_plan plan_report prepare"
EVERY = f"{ATTEND} {CALLED_ALONE} {MOVES} {LOSSES} {GROUPS} latent_attention decode_attention"
RANKS, T = 3, 8
CAUSAL, CONTIGUOUS = Mask.causal(T * RANKS), Layout.contiguous(T * RANKS, RANKS)
zeros = torch.zeros
WEIGHT = zeros(4 * (12 + 16), 6)
X, KV, LSE = zeros(1, T, 4, 16), zeros(1, T, 2, 16), zeros(1, 4, T)
SHAPES = {"heads": (4, 2), "widths": (16, 16), "dtype": torch.float32}


def right(half, function):
    """Return right arguments of a function on one of RANKS ranks. A list holds positional ones."""
    plan = half.cast_plan(CAUSAL, CONTIGUOUS)
    qkv = {"q": X, "k": KV, "v": KV}
    return {
        "attention_forward": {**qkv, "mask": Mask.causal(T)},
        "latent_attention": {
            "q": X,
            "latent": zeros(1, T, 6),
            "k_rope": zeros(1, T, 4),
            "up_weight": WEIGHT,
        },
        "attention_backward": {"dout": X, **qkv, "out": X, "lse": LSE, "mask": Mask.causal(T)},
        "merge": {"out": X, "lse": LSE, "other_out": X, "other_lse": LSE},
        "decode_attention": {"q": X[:, :3], "k": KV, "v": KV},
        "group_cast": {"x": KV[0], "plan": plan, "stage": 0},
        "group_reduce": {
            "y": zeros(sum(plan.receive_sizes(0, rank())), 2, 16),
            "plan": plan,
            "stage": 0,
            "into": KV[0],
        },
        "dispatch": {"mask": CAUSAL, "ranks": RANKS},
        "cast_plan": {"mask": CAUSAL, "layout": CONTIGUOUS},
        "plan_report": {"mask": CAUSAL, "layout": CONTIGUOUS},
        "prepare": {
            "function": "ring_attention",
            "mask": CAUSAL,
            "layout": CONTIGUOUS,
            "rank": 0,
            "device": "cpu",
            **SHAPES,
        },
        "unshard": {"x": X},
        "redistribute": {"x": X, "to": Layout.zigzag(T * RANKS, RANKS)},
        "sequence_loss": {"logits": zeros(1, T, 5), "shift_labels": zeros(1, T, dtype=torch.int64)},
        "linear_sequence_loss": {
            "hidden": zeros(1, T, 3),
            "linear_weight": zeros(5, 3),
            "shift_labels": zeros(1, T, dtype=torch.int64),
        },
    }.get(function, qkv)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def call(half, function, change):
    """Call a function with some of its arguments changed."""
    given = right(half, function) | change
    if function in LOSSES.split():
        return getattr(training, function)(**given)
    if function in MOVES.split():
        return getattr(CONTIGUOUS, function)(**given)
    return getattr(half, function)(**given)


def masks_of(*lengths):
    return [Mask.causal(n) for n in lengths]


# sequences
TWO = dict(q=X.expand(2, -1, -1, -1), k=KV.expand(2, -1, -1, -1), v=KV.expand(2, -1, -1, -1))
WRONG = {  # functions: a part of the error: changed arguments, or several such changes
    f"{ATTEND} attention_forward decode_attention": {
        "mask must be a can": dict(mask=zeros(24, 24))
    },
    f"{ATTEND} {LOCAL} decode_attention dispatch prepare": {
        "for packed documents pass Mask.documents(cu_seqlens)": [
            dict(mask=ends) for ends in ([0, 10, 24], torch.tensor([0, 10, 24]))
        ],
    },
    ATTEND: {
        "q is on the meta device": dict(q=X.to("meta")),
        "q, k, v must share one dtype": dict(v=KV.half()),
        "q must be a dense tensor": dict(q=X.to_sparse()),
        "3 query heads are not a multiple of 2": dict(q=X[:, :, :3]),
        "one width": dict(k=KV[..., :4]),
        "share the batch": dict(v=KV[:, :5]),
        "(b, t, heads, width)": dict(q=X[0]),
        "scale must be finite": dict(scale=float("nan")),
        "scale must be a number without a gr": [
            dict(scale=x) for x in (torch.ones((), requires_grad=True), [1.0], True, 1j)
        ],
        "a tensor on meta, for which each call wou": dict(scale=torch.ones((), device="meta")),
        "softcap must be None or a number from 1e-30 to 1e30, got 0.0": dict(softcap=0),
        "backward='fast': expected one of": dict(backward="fast"),
        "sink must be (4,), a logit for each query head, got (3,)": dict(sink=zeros(3)),
        "sink must be float32, got torch.float16: cast it": dict(sink=zeros(4).half()),
    },
    f"{ATTEND} decode_attention": {"k must be a torch.Tensor": dict(k=None)},
    DISTRIBUTED: {
        "reduce_dtype must be": dict(reduce_dtype="float32"),
        "pass one Mask": dict(q=X[0], k=KV[0], v=KV[0], mask=masks_of(24)),
        "mask[1] is 9 x 9, the layout has 24 tokens": TWO | dict(mask=masks_of(24, 9)),
    },
    f"attention {DISTRIBUTED} latent_attention decode_attention": {
        "return_lse must be True or False, got 'yes'": dict(return_lse="yes"),
    },
    f"{DISTRIBUTED} {LOCAL}": {"mask holds 2 Masks for a batch of 1": dict(mask=masks_of(24, 24))},
    INVARIANT: {
        "rank_invariant=True takes different masks for sequences of a multiple of 128 tokens, got "
        "24": TWO | dict(mask=[CAUSAL, Mask.full(24)], layout=CONTIGUOUS, rank_invariant=True),
        "reduce_dtype=torch.f": dict(rank_invariant=True, reduce_dtype=torch.float32),
    },
    PLACED: {
        "the mask is 9 x 9, the layout has 24": dict(mask=Mask.causal(9), layout=CONTIGUOUS),
        "layout must be a canon.Layout": dict(layout="zigzag"),
        "the layout is for 5 ranks, the group has 3": dict(layout=Layout.contiguous(24, 5)),
        "tokens, q holds 8: divide q, k and v by this layout": dict(
            layout=Layout([[range(7)], [range(7, 15)], [range(15, 24)]], 24)
        ),
        "q holds 8: pass the layout that divided the tokens": dict(mask=Mask.causal(27)),
        "got 4 and 2: pass x.transpose(1, 2)": dict(
            q=X.transpose(1, 2), k=KV.transpose(1, 2), v=KV.transpose(1, 2)
        ),
    },
    "latent_attention": {
        "expected q (b, t, h, d), latent (b, t, rank) and k_rope (b, t, rope)": dict(latent=KV),
        "the tokens, got q (1, 8, 4, 16), latent (1, 8, 6), k_rope (1, 5, 4), up": dict(
            k_rope=zeros(1, 5, 4)
        ),
        "q must be wider than k_rope": dict(k_rope=zeros(1, T, 16)),
        "up_weight must be (h * (d - rope + dv), rank)": dict(up_weight=WEIGHT.mT),
        "must share one dtype of float64, float32": dict(up_weight=WEIGHT.half()),
    },
    "attention decode_attention": {"mask is 5 queries x 5 keys": dict(mask=Mask.causal(5))},
    "attention": {
        "as many queries as keys, got 8, 5": dict(k=KV[:, :5], v=KV[:, :5]),
        "rank_invariant must be True or False": dict(rank_invariant=1),
    },
    LOCAL: {
        "mask[0] is 9 queries x 9 keys, q holds 8 tokens": dict(mask=masks_of(9)),
        "mask[0] must be one canon.Mask": dict(mask=[masks_of(8)]),
    },
    "attention_backward": {
        "method='fast': expected one of": dict(method="fast"),
        "needs_grad must be three booleans, got": [
            dict(needs_grad=x) for x in (True, "qkv", (1, 0, 0))
        ],
        "dout must be (1, 8, 4, 16), got (1, 5": dict(dout=X[:, :5]),
        "not both": dict(dlse=LSE, delta=LSE),
        "grad_dtype must be None or one": dict(grad_dtype=torch.int64),
        "lse must be torch.float32 beside": dict(lse=LSE.int()),
    },
    "attention_forward": {"out_dtype must be None or one": dict(out_dtype=torch.int32)},
    "merge": {
        "parts differ in shape": [
            dict(other_out=X[:, :5], other_lse=LSE[..., :5]),
            dict(lse=LSE.mT, other_lse=LSE.mT),
        ],
        "out must share one dtype": dict(out=X.int()),
    },
    "strided_attention": {
        "head_stride=3 does not": dict(
            k=KV.repeat(1, 1, 2, 1), v=KV.repeat(1, 1, 2, 1), head_stride=3
        ),
        "forward_first_stride=2: expected 0 < first < head": dict(
            head_stride=2, forward_first_stride=2
        ),
        "split two head groups": dict(
            head_stride=2, backward_first_stride=1, backward_last_stride=1
        ),
        "backward_schedule='rign': expected one o": dict(backward_schedule="rign"),
        "backward_schedule=['ring']: expected": dict(backward_schedule=["ring"]),
        "head_stride must be a whole number": [dict(head_stride=x) for x in (True, 1.0, [1])],
        "forward_first_stride must be a whole": dict(head_stride=2, forward_first_stride=True),
        "has no effect with": dict(
            head_stride=2, backward_first_stride=1, backward_schedule="ring"
        ),
        "backward_schedule='ring'": dict(rank_invariant=True, backward_schedule="ring"),
    },
    "magi_attention cast_plan": {
        "casts must be a whole number >= 1, got 0": dict(casts=0),
        "casts=2 needs own_keys_first=True or None": dict(casts=2, own_keys_first=False),
        "own_keys_first must be True or False, got": dict(own_keys_first=1),
    },
    "magi_attention": {
        "keep_kv must be True or False, got [1]": dict(keep_kv=[1]),
        "with own_keys_first=False or None": dict(rank_invariant=True, own_keys_first=True),
    },
    GROUPS: {
        "stage 1 is not one of the plan's 1 casts": dict(stage=1),
        "stage must be a whole number": [dict(stage=x) for x in ("0", False)],
    },
    "group_cast": {"group_cast: x has 7 rows": dict(x=KV[0, 1:])},
    "group_reduce": {"into must be": dict(into=KV[0, :3])},
    "dispatch": {
        **{
            f"{name} must be a whole number": [
                {name: wrong} for wrong in ("4", True, -(name == "swaps_per_chunk"))
            ]
            for name in ("ranks", "chunk", "cells_per_us", "tokens_per_us", "swaps_per_chunk")
        },
        "at least 1; got 0.9": dict(imbalance=0.9),
        "imbalance must be a number >= 1, got": dict(imbalance="1.05"),
        "are too large for 300 cells in 64 bits": dict(imbalance=1e30),
        "mask is 3 x 4, not square": dict(mask=Mask([], 3, 4)),
        "masks of one size: mask[0] has 24 tokens, m": dict(mask=[CAUSAL, Mask.causal(9)]),
        "mask holds no Mask": dict(mask=[]),
        ": pass Mask.causal(tokens)": dict(mask=None),
        "rank_invariant must be True or False, got None": dict(rank_invariant=None),
        "multiple of 128 tokens, got 200: call dispatch(..., chunk=256": dict(
            rank_invariant=True, chunk=200
        ),
    },
    "plan_report": {"chunk must be a whole number >= 1": dict(chunk=0)},
    "cast_plan plan_report": {"layout must be a Layout, got": dict(layout=[[range(24)]])},
    "cast_plan prepare": {"the layout has 41 tokens": dict(layout=Layout.zigzag(41, 3))},
    "prepare": {
        "function='merge'": dict(function="merge"),
        "runs on one rank": dict(function="attention"),
        "a layout of its own": dict(function="zigzag_attention"),
        "head_stride=3 does not divide": dict(function="strided_attention", head_stride=3),
        "layout must be a canon.Layout": dict(group=None, layout=None),
        "plans do not depend on a group: pass rank=, and mesh_heads=": dict(group="a group"),
        "rank 3 is not one of the layout's 3": dict(rank=3),
        "no option stage: expected": dict(stage=0),
        "heads must be two whole numbers": dict(heads=4),
        "not a multiple": dict(heads=(4, 3)),
        "a key head for each query head: heads must be": dict(function="latent_attention"),
        "dtype must be": dict(dtype="bfloat16"),
        "requires_grad must be True or False": dict(requires_grad=None),
    },
    MOVES: {
        "x of shape (1, 8, 4, 16) has no dim 4": dict(dim=4),
        "tokens along dim 1; the layout is for 3 ranks": dict(x=X[:, :5]),
    },
    "redistribute": {
        "to has 9 tokens on 3 ranks, the layout 24 on 3": dict(to=Layout.zigzag(9, 3)),
        "redistribute: to must be a Layout, got 'zigzag'": dict(to="zigzag"),
    },
    "sequence_loss": {"got (1, 3, 5) and (1, 8)": dict(logits=zeros(1, 3, 5))},
    LOSSES: {
        "shift_labels must be int64": dict(shift_labels=zeros(1, T)),
        "shift_labels must be in 0..4 or ignore_index=-100, got 5": dict(
            shift_labels=torch.full((1, T), 5)
        ),
        "ignore_index must be a whole number": dict(ignore_index=0.5),
        "weights must be constants of the shape of shift_labels, (1, 8), got (1, 3)": dict(
            weights=zeros(1, 3)
        ),
        "a gradient: pass weights.detach()": dict(weights=zeros(1, T, requires_grad=True)),
        "weights must be floating-point": dict(weights=zeros(1, T).int()),
        "weights must be finite, and 0 or at least 1.2e-38": dict(weights=zeros(1, T) - 1),
        "num_items_in_batch must be a finite number >= 0, got -1": dict(num_items_in_batch=-1),
        "a number >= 0, got a tensor of shape (2,)": dict(num_items_in_batch=torch.ones(2)),
    },
    LINEAR: {
        "hidden must be (b, t, width) and shift_labels (b, t), or": dict(hidden=zeros(1, 3, 3)),
        "must be (vocabulary, 3) and not empty, got (5, 4)": dict(linear_weight=zeros(5, 4)),
        "hidden, linear_weight must share one dtype": dict(linear_weight=zeros(5, 3).double()),
        "linear_bias must be (5,), a row for each of linear_weight": dict(linear_bias=zeros(4)),
        "softcap must be None or a number from 1e-30 to 1e30, got 0.0": dict(softcap=0.0),
        "z_loss must be a finite number >= 0, got nan": dict(z_loss=float("nan")),
        "label_smoothing must be a number >= 0 and <= 1, got True": dict(label_smoothing=True),
        "chunk must be a whole number >= 1, got 0": dict(chunk=0),
    },
    "attention strided_attention": {
        "backward='fused'": dict(rank_invariant=True, backward="fused")
    },
    "attention ring_attention": {
        "return_max_logits must be True or False, got 1": dict(return_max_logits=1)
    },
}
BUILT = ": build it from the same arguments on every rank"
# arguments of one rank that are right in themselves, and the field that the error names
DIFFERENT = {
    DISTRIBUTED: {
        BUILT: dict(mask=Mask.window(24, 2, 0)),
        "dtype": {x: right(reference, "ring_attention")[x].double() for x in "qkv"},
        "heads and width of q": dict(q=X.repeat(1, 1, 2, 1)),
        "mask": {x: right(reference, "ring_attention")[x][:, :5] for x in "qkv"},
        "requires_grad": dict(q=zeros(1, T, 4, 16, requires_grad=True)),
        "return_max_logits": dict(return_max_logits=True),
        "reduce_dtype": dict(reduce_dtype=torch.bfloat16),
        "backward": dict(backward="split"),
    },
    PLACED: {BUILT: dict(layout=Layout.striped(24, 3))},
    f"{DISTRIBUTED} decode_attention": {
        "and width of k": dict(k=KV[:, :, :1], v=KV[:, :, :1]),
        "width of v": dict(v=KV[..., :3]),
        "scale": dict(scale=0.5),
        "softcap: rank 0, 2: None; rank 1: 5.0": dict(softcap=5.0),
        "sink": dict(sink=zeros(4)),
    },
    "magi_attention": {"casts": dict(casts=2)},
    "latent_attention": {
        "heads and width of k_rope": dict(k_rope=zeros(1, T, 2)),
        "shape of up_weight": dict(up_weight=zeros(4 * 20, 6)),
        "requires_grad of q, latent, k_rope, up_weight": dict(
            up_weight=WEIGHT.clone().requires_grad_()
        ),
    },
    "decode_attention": {"shape of q": dict(q=X[:, :2])},
    "redistribute": {
        "dtype: rank 0, 2: torch.float32; rank 1: torch.float64": dict(x=X.double()),
        "to: rank 0, 2: Layout(": dict(to=Layout.striped(24, 3)),
        "requires_grad": dict(x=zeros(1, T, 4, 16, requires_grad=True)),
    },
    "sequence_loss": {
        "vocabulary: rank 0, 2: 5; rank 1: 6": dict(logits=zeros(1, T, 6)),
        "dtype: rank 0, 2: torch.float32; ran": dict(logits=zeros(1, T, 5).double()),
    },
    LOSSES: {
        "ignore_index: rank 0, 2: -100; rank 1: 4": dict(ignore_index=4),
        "num_items_in_batch: rank 0, 2: None; rank 1: 4.0": dict(num_items_in_batch=4),
        "weights: rank 0, 2: ": dict(weights=zeros(1, T)),
    },
    LINEAR: {
        "softcap, z_loss and label_smoothing: rank 0, 2: (None, 0.0, 0.0)": dict(softcap=4),
        "vocabulary: rank 0, 2: 5; rank 1: 6": dict(linear_weight=zeros(6, 3)),
    },
}


def of(table, function):
    """Return (changed arguments, a part of the error) of a function."""
    return [
        (change, message)
        for functions, rows in table.items()
        if function in functions.split()
        for message, changes in rows.items()
        for change in (changes if isinstance(changes, list) else [changes])
    ]


def refused(half, function, change):
    try:
        call(half, function, change)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("function", sorted({*EVERY.split()}))
def test_a_wrong_argument_is_named_on_every_rank(half, function):
    """First all ranks have it, then rank 1 alone: then the ranks may disagree about the argument
    before it is checked.
    """

    def program():
        faults = []
        call(half, function, {})  # a known call hides no wrong argument
        for only in (range(RANKS), [1]):
            for change, message in of(WRONG, function):
                text = refused(half, function, change if dist.get_rank() in only else {})
                differs = "the ranks disagree" in text and any(name in text for name in change)
                named = message in text or (only == [1] and differs)
                faults += [] if named else [(message, text)]
        return faults

    if function in CALLED_ALONE.split():
        assert not [(change, text) for change, message in of(WRONG, function)
                    if message not in (text := refused(half, function, change))]  # fmt: skip
    else:
        assert process_groups.threads(program, RANKS) == [[]] * RANKS


def disagreements(half, functions):
    """Return the disagreements that the error of this rank does not name, in first calls and after
    a known call.
    """
    faults = []
    for function in functions:
        for change, message in of(DIFFERENT, function):
            start = time.monotonic()
            text = refused(half, function, change if dist.get_rank() == 1 else {})
            named = all(word in text for word in (message, "rank 0, 2: ", "rank 1: "))
            faults += [] if named and time.monotonic() - start < 5 else [(function, message, text)]
        # nothing was sent before the error, so the group can still be used
        call(half, function, {})
    return faults


def test_a_disagreement_of_the_ranks_is_named(half):
    """In threads for each function, and in processes over gloo for two of them."""
    functions = f"{DISTRIBUTED} latent_attention decode_attention redistribute {LOSSES}"
    for run, some in (
        (process_groups.threads, functions),
        (process_groups.processes, "ring_attention magi_attention"),
    ):
        program = partial(disagreements, half, some.split())
        assert run(program, RANKS) == [[]] * RANKS


def test_a_rank_outside_the_group_raises_alone(half):
    """`dist.new_group` returns a number, not a group, on ranks that are not its members."""

    def program():
        group = dist.new_group([0, 1])
        return refused(half, "ring_attention", {"group": group})

    *members, other = process_groups.threads(program, RANKS)
    assert members == ["nothing was raised"] * 2
    assert "is not a member of" in other
    assert "group must be a ProcessGroup, a DeviceMesh" in refused(
        half, "ring_attention", {"group": "a group"}
    )
