"""A wrong argument of a public function is named on every rank, also if only one rank has it, and
so is a disagreement.

`test_mask_arguments` has the constructors of masks and layouts.
"""

import functools
import time

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, fast, reference, training
from canon.testing import process_groups

pytestmark = pytest.mark.usefixtures("own_errors")
HALVES = {"reference": reference, "fast": fast}
LOCAL = ("attention", "attention_forward", "attention_backward")
RINGS = ("ring_attention", "zigzag_attention", "striped_attention")
PLACED = ("ring_attention", "strided_attention", "magi_attention")
DISTRIBUTED = (*RINGS, "strided_attention", "magi_attention")
ATTEND = ("attention", *DISTRIBUTED)
CASTING = ("magi_attention", "cast_plan")
LOSSES = ("sequence_loss", "linear_sequence_loss")
MOVES = ("unshard", "redistribute", *LOSSES)
# one function
LATENT = ("latent_attention",)
STRIDED = ("strided_attention",)
MAGI = ("magi_attention",)
DISPATCH = ("dispatch",)
PREPARE = ("prepare",)
LINEAR = ("linear_sequence_loss",)
LOGITS = ("sequence_loss",)
DECODE = ("decode_attention",)
BACKWARD = ("attention_backward",)
ATTENTION = ("attention",)
REDISTRIBUTE = ("redistribute",)
GROUPS = ("group_cast", "group_reduce")
PLANS = ("dispatch", "cast_plan", "plan_report", "prepare")
OTHERS = (*LATENT, "merge", *DECODE, *GROUPS, *PLANS)
CALLED_ALONE = (*LOCAL, "merge", *PLANS)
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
    if function in LOSSES:
        return getattr(training, function)(**given)
    if function in ("unshard", "redistribute"):
        return getattr(CONTIGUOUS, function)(**given)
    return getattr(half, function)(**given)


def masks_of(*lengths):
    return [Mask.causal(n) for n in lengths]


# sequences
TWO = dict(q=X.expand(2, -1, -1, -1), k=KV.expand(2, -1, -1, -1), v=KV.expand(2, -1, -1, -1))
SPARSE, META = X.to_sparse(), X.to("meta")
WRONG = [  # functions, changed arguments, and a part of the error
    ((*ATTEND, "attention_forward"), dict(mask=zeros(24, 24)), "mask must be a canon.Mask"),
    ((*ATTEND, "decode_attention"), dict(mask="causal"), "mask must be a canon.Mask"),
    *(
        (
            (
                *ATTEND,
                "attention_forward",
                "attention_backward",
                "decode_attention",
                "dispatch",
                "prepare",
            ),
            dict(mask=ends),
            "for packed documents pass Mask.documents(cu_seqlens)",
        )
        for ends in ([0, 10, 24], torch.tensor([0, 10, 24]))
    ),
    (ATTEND, dict(q=META), "q is on the meta device"),
    ((*ATTEND, "decode_attention"), dict(k=None), "k must be a torch.Tensor"),
    (ATTEND, dict(v=KV.half()), "q, k, v must share one dtype"),
    (ATTEND, dict(q=SPARSE), "q must be a dense tensor"),
    (ATTEND, dict(q=X[:, :, :3]), "3 query heads are not a multiple of 2"),
    (ATTEND, dict(k=KV[..., :4]), "one width"),
    (ATTEND, dict(v=KV[:, :5]), "share the batch"),
    (ATTEND, dict(q=X[0]), "(b, t, heads, width)"),
    (ATTEND, dict(scale=float("nan")), "scale must be finite"),
    (
        ATTEND,
        dict(scale=torch.ones((), requires_grad=True)),
        "scale must be a number without a gradient",
    ),
    (ATTEND, dict(softcap=0), "softcap must be None or a number from 1e-30 to 1e30, got 0.0"),
    (ATTEND, dict(softcap=float("nan")), "softcap must be finite"),
    (ATTEND, dict(softcap="30"), "softcap must be a number without a gradient"),
    (
        ATTEND,
        dict(scale=torch.ones((), device="meta")),
        "scale is a tensor on meta, for which each call would wait",
    ),
    (ATTEND, dict(backward="fast"), "backward='fast': expected one of"),
    (ATTEND, dict(sink=zeros(3)), "sink must be (4,), a logit for each query head, got (3,)"),
    (ATTEND, dict(sink=zeros(4).half()), "sink must be float32, got torch.float16: cast it"),
    (ATTEND, dict(sink=[0.0] * 4), "sink must be a torch.Tensor, got list"),
    (ATTEND, dict(sink=zeros(4, device="meta")), "sink is on the meta device"),
    (DISTRIBUTED, dict(reduce_dtype="float32"), "reduce_dtype must be"),
    (
        DISTRIBUTED,
        dict(mask=masks_of(24, 24)),
        "mask holds 2 Masks for a batch of 1: pass one for each sequence",
    ),
    (DISTRIBUTED, dict(q=X[0], k=KV[0], v=KV[0], mask=masks_of(24)), "pass one Mask"),
    (DISTRIBUTED, TWO | dict(mask=masks_of(24, 9)), "mask[1] is 9 x 9, the layout has 24 tokens"),
    (DISTRIBUTED, TWO | dict(mask=[CAUSAL, None]), "mask[1] must be a canon.Mask, got NoneType"),
    (
        ("strided_attention", "magi_attention"),
        TWO | dict(mask=[CAUSAL, Mask.full(24)], layout=CONTIGUOUS, rank_invariant=True),
        "rank_invariant=True takes different masks for sequences of a multiple of 128 tokens, got "
        "24",
    ),
    (
        PLACED,
        dict(mask=Mask.causal(9), layout=CONTIGUOUS),
        "the mask is 9 x 9, the layout has 24 tokens",
    ),
    (PLACED, dict(layout="zigzag"), "layout must be a canon.Layout"),
    (PLACED, dict(layout=Layout.contiguous(24, 5)), "the layout is for 5 ranks, the group has 3"),
    (
        PLACED,
        dict(layout=Layout([[range(7)], [range(7, 15)], [range(15, 24)]], 24)),
        "tokens, q holds 8",
    ),
    (LATENT, dict(latent=None), "latent must be a torch.Tensor, got NoneType"),
    (
        LATENT,
        dict(latent=KV),
        "expected q (b, t, h, d), latent (b, t, rank) and k_rope (b, t, rope)",
    ),
    (
        LATENT,
        dict(k_rope=zeros(1, 5, 4)),
        "the tokens, got q (1, 8, 4, 16), latent (1, 8, 6), k_rope (1, 5, 4), up",
    ),
    (LATENT, dict(k_rope=zeros(1, T, 16)), "q must be wider than k_rope"),
    (LATENT, dict(up_weight=WEIGHT.mT), "up_weight must be (h * (d - rope + dv), rank)"),
    (
        LATENT,
        dict(up_weight=WEIGHT.half()),
        "must share one dtype of float64, float32, float16, bfloat16, got torch.float32",
    ),
    (ATTENTION, dict(mask=Mask.causal(5)), "mask is 5 queries x 5 keys"),
    (ATTENTION, dict(k=KV[:, :5], v=KV[:, :5]), "as many queries as keys, got 8, 5"),
    (
        LOCAL,
        dict(mask=masks_of(8, 8)),
        "mask holds 2 Masks for a batch of 1: pass one for each sequence",
    ),
    (
        PLACED,
        dict(q=X.transpose(1, 2), k=KV.transpose(1, 2), v=KV.transpose(1, 2)),
        "got 4 and 2: pass x.transpose(1, 2)",
    ),
    (LOCAL, dict(mask=masks_of(9)), "mask[0] is 9 queries x 9 keys, q holds 8 tokens"),
    (LOCAL, dict(mask=[masks_of(8)]), "mask[0] must be one canon.Mask"),
    (BACKWARD, dict(method="fast"), "method='fast': expected one of"),
    (BACKWARD, dict(dout=X[:, :5]), "dout must be (1, 8, 4, 16), got (1, 5"),
    (BACKWARD, dict(lse=LSE[:, :3]), "lse must be"),
    (BACKWARD, dict(dlse=LSE, delta=LSE), "not both"),
    (("merge",), dict(other_out=X[:, :5], other_lse=LSE[..., :5]), "parts differ in shape"),
    (
        DECODE,
        dict(mask=Mask.causal(5)),
        "mask is 5 queries x 5 keys, q holds 3 tokens and k 8",
    ),
    (
        STRIDED,
        dict(k=KV.repeat(1, 1, 2, 1), v=KV.repeat(1, 1, 2, 1), head_stride=3),
        "head_stride=3 does not",
    ),
    (
        STRIDED,
        dict(head_stride=2, forward_first_stride=2),
        "forward_first_stride=2: expected 0 < first < head",
    ),
    (
        STRIDED,
        dict(head_stride=2, backward_first_stride=0),
        "backward_first_stride=0: expected 0 < first",
    ),
    (
        STRIDED,
        dict(head_stride=2, backward_first_stride=1, backward_last_stride=1),
        "split two head groups",
    ),
    (
        STRIDED,
        dict(backward_schedule="rign"),
        "backward_schedule='rign': expected one of 'scatter', 'ring'",
    ),
    (
        STRIDED,
        dict(head_stride=2, backward_first_stride=1, backward_schedule="ring"),
        "has no effect with",
    ),
    (CASTING, dict(casts=1.0), "casts must be a whole number"),
    (CASTING, dict(casts=0), "casts must be a whole number >= 1, got 0"),
    (
        CASTING,
        dict(casts=2, own_keys_first=False),
        "casts=2 needs own_keys_first=True or None",
    ),
    (
        CASTING,
        dict(own_keys_first=1),
        "own_keys_first must be True or False, got 1",
    ),
    (MAGI, dict(keep_kv=[1]), "unhashable"),
    (GROUPS, dict(stage=1), "stage 1 is not one of the plan's 1 casts"),
    (("group_cast",), dict(x=KV[0, 1:]), "group_cast: x has 7 rows"),
    (("group_reduce",), dict(into=KV[0, :3]), "into must be"),
    (DISPATCH, dict(ranks=0), "ranks must be a whole number >= 1"),
    (("dispatch", "plan_report"), dict(chunk=0), "chunk must be a whole number >= 1"),
    (DISPATCH, dict(imbalance=0.9), "at least 1; got 0.9"),
    (DISPATCH, dict(imbalance="1.05"), "imbalance must be a number >= 1, got"),
    (DISPATCH, dict(imbalance=1e30), "are too large for 300 cells in 64 bits"),
    (DISPATCH, dict(tokens_per_us=0), "tokens_per_us must be"),
    (DISPATCH, dict(tokens_per_us=2**58), "only the ratio of the two rates matters"),
    (
        DISPATCH,
        dict(swaps_per_chunk=-1),
        "swaps_per_chunk must be a whole number >= 0, got -1",
    ),
    (DISPATCH, dict(mask=Mask([], 3, 4)), "mask is 3 x 4, not square"),
    (
        DISPATCH,
        dict(mask=[CAUSAL, Mask.causal(9)]),
        "masks of one size: mask[0] has 24 tokens, mask[1] 9",
    ),
    (DISPATCH, dict(mask=[]), "mask holds no Mask"),
    (PREPARE, dict(mask=masks_of(24)), "one Mask serves the whole batch here, so pack"),
    (DISPATCH, dict(rank_invariant=None), "rank_invariant must be True or False, got None"),
    (
        DISPATCH,
        dict(rank_invariant=True, chunk=200),
        "multiple of 128 tokens, got 200: call dispatch(..., chunk=256",
    ),
    *(
        (DISPATCH, {name: wrong}, f"{name} must be a whole number")
        for wrong in ("4", True)
        for name in ("ranks", "chunk", "cells_per_us", "tokens_per_us", "swaps_per_chunk")
    ),
    (("dispatch", "cast_plan"), dict(mask=CAUSAL.dense()), "mask must be a Mask, got"),
    (("cast_plan", "plan_report"), dict(layout=[[range(24)]]), "layout must be a Layout, got"),
    (
        ("cast_plan",),
        dict(layout=Layout.contiguous(9, 2)),
        "the mask is 24 x 24, the layout has 9 tokens",
    ),
    (PREPARE, dict(function="merge"), "function='merge'"),
    (PREPARE, dict(function="attention"), "runs on one rank"),
    (PREPARE, dict(layout=None), "layout must be a canon.Layout"),
    (PREPARE, dict(rank=3), "rank 3 is not one of the layout's 3"),
    (PREPARE, dict(layout=Layout.zigzag(41, 3)), "the layout has 41 tokens"),
    (PREPARE, dict(stage=0), "no option stage: expected"),
    (PREPARE, dict(heads=4), "heads must be two whole numbers"),
    (PREPARE, dict(heads=(4, 3)), "not a multiple"),
    (
        PREPARE,
        dict(function="latent_attention"),
        "a key head for each query head: heads must be (4, 4)",
    ),
    (PREPARE, dict(dtype="bfloat16"), "dtype must be"),
    (PREPARE, dict(requires_grad=None), "requires_grad must be True or False"),
    (("unshard", "redistribute"), dict(dim=4), "x of shape (1, 8, 4, 16) has no dim 4"),
    (
        ("unshard", "redistribute"),
        dict(x=X[:, :5]),
        "tokens along dim 1; the layout is for 3 ranks",
    ),
    (
        REDISTRIBUTE,
        dict(to=Layout.zigzag(9, 3)),
        "to has 9 tokens on 3 ranks, the layout 24 on 3",
    ),
    (REDISTRIBUTE, dict(to="zigzag"), "redistribute: to must be a Layout, got 'zigzag'"),
    (LOGITS, dict(logits=zeros(1, 3, 5)), "got (1, 3, 5) and (1, 8)"),
    (LOSSES, dict(shift_labels=zeros(1, T)), "shift_labels must be int64"),
    (
        LOSSES,
        dict(shift_labels=torch.full((1, T), 5)),
        "shift_labels must be in 0..4 or ignore_index=-100, got 5",
    ),
    (LOSSES, dict(ignore_index=0.5), "ignore_index must be a whole number"),
    (
        LOSSES,
        dict(weights=zeros(1, 3)),
        "weights must be constants of the shape of shift_labels, (1, 8), got (1, 3)",
    ),
    (
        LOSSES,
        dict(weights=zeros(1, T, requires_grad=True)),
        "got a tensor with a gradient: pass weights.detach()",
    ),
    (LOSSES, dict(weights=zeros(1, T).int()), "weights must be floating-point"),
    (
        LOSSES,
        dict(weights=zeros(1, T) - 1),
        "weights must be finite, and 0 or at least 1.2e-38, because the mean divides",
    ),
    (
        LOSSES,
        dict(num_items_in_batch=-1),
        "num_items_in_batch must be a finite number >= 0, got -1",
    ),
    (
        LOSSES,
        dict(num_items_in_batch=torch.ones(2)),
        "num_items_in_batch must be a number >= 0, got a tensor of shape (2,)",
    ),
    (
        LINEAR,
        dict(hidden=zeros(1, 3, 3)),
        "hidden must be (b, t, width) and shift_labels (b, t), or both",
    ),
    (
        LINEAR,
        dict(linear_weight=zeros(5, 4)),
        "must be (vocabulary, 3) and not empty, got (5, 4)",
    ),
    (
        LINEAR,
        dict(linear_weight=zeros(5, 3).double()),
        "hidden, linear_weight must share one dtype",
    ),
    (
        LINEAR,
        dict(linear_bias=zeros(4)),
        "linear_bias must be (5,), a row for each of linear_weight",
    ),
    (LINEAR, dict(softcap=0.0), "softcap must be None or a number from 1e-30 to 1e30, got 0.0"),
    (
        LINEAR,
        dict(z_loss=float("nan")),
        "z_loss must be a finite number >= 0, got nan",
    ),
    (
        LINEAR,
        dict(label_smoothing=True),
        "label_smoothing must be a number >= 0 and <= 1, got True",
    ),
    (LINEAR, dict(chunk=0), "chunk must be a whole number >= 1, got 0"),
    (
        ("attention", "strided_attention"),
        dict(rank_invariant=True, backward="fused"),
        "backward='fused'",
    ),
    (ATTENTION, dict(rank_invariant=1), "rank_invariant must be True or False"),
    (
        ("attention", "ring_attention"),
        dict(return_max_logits=1),
        "return_max_logits must be True or False, got 1",
    ),
    (
        ("strided_attention", "magi_attention"),
        dict(rank_invariant=True, reduce_dtype=torch.float32),
        "reduce_dtype=torch.f",
    ),
    (
        STRIDED,
        dict(rank_invariant=True, backward_schedule="ring"),
        "backward_schedule='ring'",
    ),
    (
        MAGI,
        dict(rank_invariant=True, own_keys_first=True),
        "with own_keys_first=False or None",
    ),
]
# arguments of one rank that are right in themselves, and the field that the error names
DIFFERENT = [
    (DISTRIBUTED, dict(mask=Mask.window(24, 2, 0)), "mask"),
    (PLACED, dict(layout=Layout.striped(24, 3)), "layout"),
    (DISTRIBUTED, {x: right(reference, "ring_attention")[x].double() for x in "qkv"}, "dtype"),
    (DISTRIBUTED, dict(q=X.repeat(1, 1, 2, 1)), "heads and width of q"),
    (DISTRIBUTED, dict(k=KV[:, :, :1], v=KV[:, :, :1]), "heads and width of k"),
    (DISTRIBUTED, dict(v=KV[..., :3]), "v"),
    (DISTRIBUTED, {x: right(reference, "ring_attention")[x][:, :5] for x in "qkv"}, "mask"),
    (DISTRIBUTED, dict(q=zeros(1, T, 4, 16, requires_grad=True)), "requires_grad"),
    (DISTRIBUTED, dict(scale=0.5), "scale"),
    (DISTRIBUTED, dict(return_max_logits=True), "return_max_logits"),
    (DISTRIBUTED, dict(softcap=5.0), "softcap: rank 0, 2: None; rank 1: 5.0"),
    (DISTRIBUTED, dict(reduce_dtype=torch.bfloat16), "reduce_dtype"),
    (DISTRIBUTED, dict(backward="split"), "backward"),
    (DISTRIBUTED, dict(sink=zeros(4)), "sink"),
    (STRIDED, dict(head_stride=1), "head_stride"),
    (STRIDED, dict(backward_schedule="ring"), "backward_schedule"),
    (MAGI, dict(casts=2), "casts"),
    (MAGI, dict(own_keys_first=True), "own_keys_first"),
    (MAGI, dict(keep_kv=True), "keep_kv"),
    (LATENT, dict(k_rope=zeros(1, T, 2)), "heads and width of k_rope"),
    (LATENT, dict(up_weight=zeros(4 * 20, 6)), "shape of up_weight"),
    (
        LATENT,
        dict(up_weight=WEIGHT.clone().requires_grad_()),
        "requires_grad of q, latent, k_rope, up_weight",
    ),
    (DECODE, dict(q=X[:, :2]), "shape of q"),
    (DECODE, dict(scale=0.5), "scale"),
    (DECODE, dict(softcap=5.0), "softcap"),
    (DECODE, dict(k=KV[:, :, :1], v=KV[:, :, :1]), "heads and width of k"),
    (DECODE, dict(v=KV[..., :3]), "heads and width of v"),
    (DECODE, dict(sink=zeros(4)), "sink"),
    (
        REDISTRIBUTE,
        dict(x=X.double()),
        "dtype: rank 0, 2: torch.float32; rank 1: torch.float64",
    ),
    (REDISTRIBUTE, dict(to=Layout.striped(24, 3)), "to: rank 0, 2: Layout("),
    (REDISTRIBUTE, dict(x=zeros(1, T, 4, 16, requires_grad=True)), "requires_grad"),
    (LOGITS, dict(logits=zeros(1, T, 6)), "vocabulary: rank 0, 2: 5; rank 1: 6"),
    (
        LOGITS,
        dict(logits=zeros(1, T, 5).double()),
        "dtype: rank 0, 2: torch.float32; rank 1: torch.float64",
    ),
    (LOSSES, dict(ignore_index=4), "ignore_index: rank 0, 2: -100; rank 1: 4"),
    (LOSSES, dict(num_items_in_batch=4), "num_items_in_batch: rank 0, 2: None; rank 1: 4.0"),
    (LOSSES, dict(weights=zeros(1, T)), "weights: rank 0, 2: "),
    (
        LINEAR,
        dict(softcap=4),
        "softcap, z_loss and label_smoothing: rank 0, 2: (None, 0.0, 0.0)",
    ),
    (
        LINEAR,
        dict(linear_weight=zeros(6, 3)),
        "vocabulary: rank 0, 2: 5; rank 1: 6",
    ),
]


def of(table, function):
    return [(change, message) for functions, change, message in table if function in functions]


def refused(half, function, change):
    try:
        call(half, function, change)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("function", [*ATTEND, *LOCAL[1:], *MOVES, *OTHERS])
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
                differs = (
                    only == [1] and "the ranks disagree" in text and next(iter(change)) in text
                )
                faults += [] if message in text or differs else [(message, text)]
        return faults

    if function in CALLED_ALONE:
        assert not [(change, text) for change, message in of(WRONG, function)
                    if message not in (text := refused(half, function, change))]  # fmt: skip
    else:
        assert process_groups.threads(program, RANKS) == [[]] * RANKS


def disagreements(name, functions):
    """Return the disagreements that the error of this rank does not name, in first calls and after
    a known call.
    """
    half, faults = HALVES[name], []
    for function in functions:
        for change, message in of(DIFFERENT, function):
            start = time.monotonic()
            text = refused(half, function, change if dist.get_rank() == 1 else {})
            named = all(word in text for word in (message, "rank 0, 2: ", "rank 1: "))
            faults += [] if named and time.monotonic() - start < 5 else [(function, message, text)]
        # nothing was sent before the error, so the group can still be used
        call(half, function, {})
    return faults


@pytest.mark.parametrize("name", HALVES)
def test_a_disagreement_of_the_ranks_is_named(name):
    """In threads for each function, and in processes over gloo for two of them."""
    functions = (*DISTRIBUTED, *LATENT, "decode_attention", "redistribute", *LOSSES)
    assert (
        process_groups.threads(functools.partial(disagreements, name, functions), RANKS)
        == [[]] * RANKS
    )
    program = functools.partial(disagreements, name, ("ring_attention", "magi_attention"))
    assert process_groups.processes(program, RANKS) == [[]] * RANKS


def test_a_rank_outside_the_group_raises_alone(half):
    """`dist.new_group` returns a number, not a group, on ranks that are not its members."""

    def program():
        group = dist.new_group([0, 1])
        return refused(half, "ring_attention", {"group": group})

    assert process_groups.threads(program, RANKS)[:2] == ["nothing was raised"] * 2
    assert "is not a member of" in process_groups.threads(program, RANKS)[2]
    assert "group must be a ProcessGroup, a DeviceMesh" in refused(
        half, "ring_attention", {"group": "a group"}
    )
