"""A wrong argument of a public function is named on every rank, also if only one rank has it, and
so is a disagreement.

`test_mask_arguments` has the constructors of masks and layouts.
"""

import functools
import time

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
WRONG = [  # functions, changed arguments, and a part of the error
    (
        f"{ATTEND} attention_forward decode_attention",
        dict(mask=zeros(24, 24)),
        "mask must be a can",
    ),
    *(
        (
            f"{ATTEND} {LOCAL} decode_attention dispatch prepare",
            dict(mask=ends),
            "for packed documents pass Mask.documents(cu_seqlens)",
        )
        for ends in ([0, 10, 24], torch.tensor([0, 10, 24]))
    ),
    (ATTEND, dict(q=X.to("meta")), "q is on the meta device"),
    (f"{ATTEND} decode_attention", dict(k=None), "k must be a torch.Tensor"),
    (ATTEND, dict(v=KV.half()), "q, k, v must share one dtype"),
    (ATTEND, dict(q=X.to_sparse()), "q must be a dense tensor"),
    (ATTEND, dict(q=X[:, :, :3]), "3 query heads are not a multiple of 2"),
    (ATTEND, dict(k=KV[..., :4]), "one width"),
    (ATTEND, dict(v=KV[:, :5]), "share the batch"),
    (ATTEND, dict(q=X[0]), "(b, t, heads, width)"),
    (ATTEND, dict(scale=float("nan")), "scale must be finite"),
    (ATTEND, dict(scale=torch.ones((), requires_grad=True)), "scale must be a number without a gr"),
    (
        ATTEND,
        dict(scale=torch.ones((), device="meta")),
        "a tensor on meta, for which each call wou",
    ),
    (ATTEND, dict(softcap=0), "softcap must be None or a number from 1e-30 to 1e30, got 0.0"),
    (ATTEND, dict(backward="fast"), "backward='fast': expected one of"),
    (ATTEND, dict(sink=zeros(3)), "sink must be (4,), a logit for each query head, got (3,)"),
    (ATTEND, dict(sink=zeros(4).half()), "sink must be float32, got torch.float16: cast it"),
    (DISTRIBUTED, dict(reduce_dtype="float32"), "reduce_dtype must be"),
    (f"{DISTRIBUTED} {LOCAL}", dict(mask=masks_of(24, 24)), "mask holds 2 Masks for a batch of 1"),
    (DISTRIBUTED, dict(q=X[0], k=KV[0], v=KV[0], mask=masks_of(24)), "pass one Mask"),
    (DISTRIBUTED, TWO | dict(mask=masks_of(24, 9)), "mask[1] is 9 x 9, the layout has 24 tokens"),
    (
        INVARIANT,
        TWO | dict(mask=[CAUSAL, Mask.full(24)], layout=CONTIGUOUS, rank_invariant=True),
        "rank_invariant=True takes different masks for sequences of a multiple of 128 tokens, got "
        "24",
    ),
    (PLACED, dict(mask=Mask.causal(9), layout=CONTIGUOUS), "the mask is 9 x 9, the layout has 24"),
    (PLACED, dict(layout="zigzag"), "layout must be a canon.Layout"),
    (PLACED, dict(layout=Layout.contiguous(24, 5)), "the layout is for 5 ranks, the group has 3"),
    (
        PLACED,
        dict(layout=Layout([[range(7)], [range(7, 15)], [range(15, 24)]], 24)),
        "tokens, q holds 8: divide q, k and v by this layout",
    ),
    (PLACED, dict(mask=Mask.causal(27)), "q holds 8: pass the layout that divided the tokens"),
    (
        PLACED,
        dict(q=X.transpose(1, 2), k=KV.transpose(1, 2), v=KV.transpose(1, 2)),
        "got 4 and 2: pass x.transpose(1, 2)",
    ),
    (
        "latent_attention",
        dict(latent=KV),
        "expected q (b, t, h, d), latent (b, t, rank) and k_rope (b, t, rope)",
    ),
    (
        "latent_attention",
        dict(k_rope=zeros(1, 5, 4)),
        "the tokens, got q (1, 8, 4, 16), latent (1, 8, 6), k_rope (1, 5, 4), up",
    ),
    ("latent_attention", dict(k_rope=zeros(1, T, 16)), "q must be wider than k_rope"),
    (
        "latent_attention",
        dict(up_weight=WEIGHT.mT),
        "up_weight must be (h * (d - rope + dv), rank)",
    ),
    ("latent_attention", dict(up_weight=WEIGHT.half()), "must share one dtype of float64, float32"),
    ("attention decode_attention", dict(mask=Mask.causal(5)), "mask is 5 queries x 5 keys"),
    ("attention", dict(k=KV[:, :5], v=KV[:, :5]), "as many queries as keys, got 8, 5"),
    (LOCAL, dict(mask=masks_of(9)), "mask[0] is 9 queries x 9 keys, q holds 8 tokens"),
    (LOCAL, dict(mask=[masks_of(8)]), "mask[0] must be one canon.Mask"),
    ("attention_backward", dict(method="fast"), "method='fast': expected one of"),
    ("attention_backward", dict(dout=X[:, :5]), "dout must be (1, 8, 4, 16), got (1, 5"),
    ("attention_backward", dict(dlse=LSE, delta=LSE), "not both"),
    ("merge", dict(other_out=X[:, :5], other_lse=LSE[..., :5]), "parts differ in shape"),
    (
        "strided_attention",
        dict(k=KV.repeat(1, 1, 2, 1), v=KV.repeat(1, 1, 2, 1), head_stride=3),
        "head_stride=3 does not",
    ),
    (
        "strided_attention",
        dict(head_stride=2, forward_first_stride=2),
        "forward_first_stride=2: expected 0 < first < head",
    ),
    (
        "strided_attention",
        dict(head_stride=2, backward_first_stride=1, backward_last_stride=1),
        "split two head groups",
    ),
    (
        "strided_attention",
        dict(backward_schedule="rign"),
        "backward_schedule='rign': expected one o",
    ),
    (
        "strided_attention",
        dict(head_stride=2, backward_first_stride=1, backward_schedule="ring"),
        "has no effect with",
    ),
    ("magi_attention cast_plan", dict(casts=0), "casts must be a whole number >= 1, got 0"),
    (
        "magi_attention cast_plan",
        dict(casts=2, own_keys_first=False),
        "casts=2 needs own_keys_first=True or None",
    ),
    (
        "magi_attention cast_plan",
        dict(own_keys_first=1),
        "own_keys_first must be True or False, got",
    ),
    ("magi_attention", dict(keep_kv=[1]), "keep_kv must be True or False, got [1]"),
    (
        f"attention {DISTRIBUTED} latent_attention decode_attention",
        dict(return_lse="yes"),
        "return_lse must be True or False, got 'yes'",
    ),
    (GROUPS, dict(stage=1), "stage 1 is not one of the plan's 1 casts"),
    ("group_cast", dict(x=KV[0, 1:]), "group_cast: x has 7 rows"),
    ("group_reduce", dict(into=KV[0, :3]), "into must be"),
    *(
        ("dispatch", {name: wrong}, f"{name} must be a whole number")
        for name in ("ranks", "chunk", "cells_per_us", "tokens_per_us", "swaps_per_chunk")
        for wrong in ("4", True, -(name == "swaps_per_chunk"))
    ),
    ("dispatch", dict(imbalance=0.9), "at least 1; got 0.9"),
    ("dispatch", dict(imbalance="1.05"), "imbalance must be a number >= 1, got"),
    ("dispatch", dict(imbalance=1e30), "are too large for 300 cells in 64 bits"),
    ("dispatch", dict(mask=Mask([], 3, 4)), "mask is 3 x 4, not square"),
    (
        "dispatch",
        dict(mask=[CAUSAL, Mask.causal(9)]),
        "masks of one size: mask[0] has 24 tokens, m",
    ),
    ("dispatch", dict(mask=[]), "mask holds no Mask"),
    ("dispatch", dict(mask=None), ": pass Mask.causal(tokens)"),
    ("dispatch", dict(rank_invariant=None), "rank_invariant must be True or False, got None"),
    (
        "dispatch",
        dict(rank_invariant=True, chunk=200),
        "multiple of 128 tokens, got 200: call dispatch(..., chunk=256",
    ),
    ("plan_report", dict(chunk=0), "chunk must be a whole number >= 1"),
    ("cast_plan plan_report", dict(layout=[[range(24)]]), "layout must be a Layout, got"),
    ("cast_plan prepare", dict(layout=Layout.zigzag(41, 3)), "the layout has 41 tokens"),
    ("prepare", dict(function="merge"), "function='merge'"),
    ("prepare", dict(function="attention"), "runs on one rank"),
    ("prepare", dict(function="zigzag_attention"), "a layout of its own"),
    ("prepare", dict(function="strided_attention", head_stride=3), "head_stride=3 does not divide"),
    ("prepare", dict(group=None, layout=None), "layout must be a canon.Layout"),
    (
        "prepare",
        dict(group="a group"),
        "plans do not depend on a group: pass rank=, and mesh_heads=",
    ),
    ("prepare", dict(rank=3), "rank 3 is not one of the layout's 3"),
    ("prepare", dict(stage=0), "no option stage: expected"),
    ("prepare", dict(heads=4), "heads must be two whole numbers"),
    ("prepare", dict(heads=(4, 3)), "not a multiple"),
    ("prepare", dict(function="latent_attention"), "a key head for each query head: heads must be"),
    ("prepare", dict(dtype="bfloat16"), "dtype must be"),
    ("prepare", dict(requires_grad=None), "requires_grad must be True or False"),
    (MOVES, dict(dim=4), "x of shape (1, 8, 4, 16) has no dim 4"),
    (MOVES, dict(x=X[:, :5]), "tokens along dim 1; the layout is for 3 ranks"),
    (
        "redistribute",
        dict(to=Layout.zigzag(9, 3)),
        "to has 9 tokens on 3 ranks, the layout 24 on 3",
    ),
    ("redistribute", dict(to="zigzag"), "redistribute: to must be a Layout, got 'zigzag'"),
    ("sequence_loss", dict(logits=zeros(1, 3, 5)), "got (1, 3, 5) and (1, 8)"),
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
    (LOSSES, dict(weights=zeros(1, T, requires_grad=True)), "a gradient: pass weights.detach()"),
    (LOSSES, dict(weights=zeros(1, T).int()), "weights must be floating-point"),
    (LOSSES, dict(weights=zeros(1, T) - 1), "weights must be finite, and 0 or at least 1.2e-38"),
    (
        LOSSES,
        dict(num_items_in_batch=-1),
        "num_items_in_batch must be a finite number >= 0, got -1",
    ),
    (LOSSES, dict(num_items_in_batch=torch.ones(2)), "a number >= 0, got a tensor of shape (2,)"),
    (
        LINEAR,
        dict(hidden=zeros(1, 3, 3)),
        "hidden must be (b, t, width) and shift_labels (b, t), or",
    ),
    (LINEAR, dict(linear_weight=zeros(5, 4)), "must be (vocabulary, 3) and not empty, got (5, 4)"),
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
    (LINEAR, dict(z_loss=float("nan")), "z_loss must be a finite number >= 0, got nan"),
    (
        LINEAR,
        dict(label_smoothing=True),
        "label_smoothing must be a number >= 0 and <= 1, got True",
    ),
    (LINEAR, dict(chunk=0), "chunk must be a whole number >= 1, got 0"),
    (
        "attention strided_attention",
        dict(rank_invariant=True, backward="fused"),
        "backward='fused'",
    ),
    ("attention", dict(rank_invariant=1), "rank_invariant must be True or False"),
    (
        "attention ring_attention",
        dict(return_max_logits=1),
        "return_max_logits must be True or False, got 1",
    ),
    (
        INVARIANT,
        dict(rank_invariant=True, reduce_dtype=torch.float32),
        "reduce_dtype=torch.f",
    ),
    (
        "strided_attention",
        dict(rank_invariant=True, backward_schedule="ring"),
        "backward_schedule='ring'",
    ),
    (
        "magi_attention",
        dict(rank_invariant=True, own_keys_first=True),
        "with own_keys_first=False or None",
    ),
]
BUILT = ": build it from the same arguments on every rank"
# arguments of one rank that are right in themselves, and the field that the error names
DIFFERENT = [
    (DISTRIBUTED, dict(mask=Mask.window(24, 2, 0)), BUILT),
    (PLACED, dict(layout=Layout.striped(24, 3)), BUILT),
    (DISTRIBUTED, {x: right(reference, "ring_attention")[x].double() for x in "qkv"}, "dtype"),
    (DISTRIBUTED, dict(q=X.repeat(1, 1, 2, 1)), "heads and width of q"),
    (f"{DISTRIBUTED} decode_attention", dict(k=KV[:, :, :1], v=KV[:, :, :1]), "and width of k"),
    (f"{DISTRIBUTED} decode_attention", dict(v=KV[..., :3]), "width of v"),
    (DISTRIBUTED, {x: right(reference, "ring_attention")[x][:, :5] for x in "qkv"}, "mask"),
    (DISTRIBUTED, dict(q=zeros(1, T, 4, 16, requires_grad=True)), "requires_grad"),
    (f"{DISTRIBUTED} decode_attention", dict(scale=0.5), "scale"),
    (f"{DISTRIBUTED} decode_attention", dict(softcap=5.0), "softcap: rank 0, 2: None; rank 1: 5.0"),
    (f"{DISTRIBUTED} decode_attention", dict(sink=zeros(4)), "sink"),
    (DISTRIBUTED, dict(return_max_logits=True), "return_max_logits"),
    (DISTRIBUTED, dict(reduce_dtype=torch.bfloat16), "reduce_dtype"),
    (DISTRIBUTED, dict(backward="split"), "backward"),
    ("magi_attention", dict(casts=2), "casts"),
    ("latent_attention", dict(k_rope=zeros(1, T, 2)), "heads and width of k_rope"),
    ("latent_attention", dict(up_weight=zeros(4 * 20, 6)), "shape of up_weight"),
    (
        "latent_attention",
        dict(up_weight=WEIGHT.clone().requires_grad_()),
        "requires_grad of q, latent, k_rope, up_weight",
    ),
    ("decode_attention", dict(q=X[:, :2]), "shape of q"),
    ("redistribute", dict(x=X.double()), "dtype: rank 0, 2: torch.float32; rank 1: torch.float64"),
    ("redistribute", dict(to=Layout.striped(24, 3)), "to: rank 0, 2: Layout("),
    ("redistribute", dict(x=zeros(1, T, 4, 16, requires_grad=True)), "requires_grad"),
    ("sequence_loss", dict(logits=zeros(1, T, 6)), "vocabulary: rank 0, 2: 5; rank 1: 6"),
    ("sequence_loss", dict(logits=zeros(1, T, 5).double()), "dtype: rank 0, 2: torch.float32; ran"),
    (LOSSES, dict(ignore_index=4), "ignore_index: rank 0, 2: -100; rank 1: 4"),
    (LOSSES, dict(num_items_in_batch=4), "num_items_in_batch: rank 0, 2: None; rank 1: 4.0"),
    (LOSSES, dict(weights=zeros(1, T)), "weights: rank 0, 2: "),
    (LINEAR, dict(softcap=4), "softcap, z_loss and label_smoothing: rank 0, 2: (None, 0.0, 0.0)"),
    (LINEAR, dict(linear_weight=zeros(6, 3)), "vocabulary: rank 0, 2: 5; rank 1: 6"),
]


def of(table, function):
    return [
        (change, message) for functions, change, message in table if function in functions.split()
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
        program = functools.partial(disagreements, half, some.split())
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
