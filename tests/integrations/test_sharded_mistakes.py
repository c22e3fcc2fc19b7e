"""Mistakes with models of transformers that no size contradicts warn on each rank that can see
them; correct programs do not.
"""

import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist

from canon import Layout, Mask, trees
from canon.testing import process_groups

pytest.importorskip("transformers", reason="the extra transformers is not installed")
from tiny_models import MODELS, tiny, tokens

from canon.integrations import transformers as transformers_module
from canon.integrations.transformers import sharded
from canon.training import sequence_loss

N, ENDS = 48, [0, 24, 30, 48]
COUNTED = "position_ids count the tokens of this rank from 0"
LABELS = "the model inside sharded gets labels"


def warnings_of(program):
    """Return Canon's warnings in a program."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program()
    return [str(each.message) for each in found if str(each.message).startswith("canon:")]


def warned(name, layout, mask, change, implementation="canon", passes=1):
    """Run a model inside `sharded` on this rank's part, after ``change``, and return warnings."""
    ids, model = tokens(N), tiny(name, implementation)
    part = layout.shard_batch({"input_ids": ids, "labels": ids}, dist.get_rank(), mask)
    labels = part.pop("shift_labels")
    del part["labels"]
    change(part, labels, model)

    def step():
        with sharded(mask, layout, half="reference"):
            sequence_loss(model(**part, use_cache=False).logits, labels)

    return warnings_of(lambda: [step() for _ in range(passes)])


def unchanged(part, labels, model):
    pass


def without_positions(part, labels, model):
    del part["position_ids"]


def without_positions_later(part, labels, model):
    with sharded(CAUSAL, ZIGZAG, half="reference"):
        model(part["input_ids"], position_ids=part.pop("position_ids"), use_cache=False)


def with_restarts(part, labels, model):
    part["position_ids"] = ZIGZAG.document_positions(dist.get_rank(), ENDS)[None]


def with_labels(part, labels, model):
    part["labels"] = part["input_ids"]


def with_mean(part, labels, model):
    part |= {"labels": labels, "shift_labels": labels}


def with_sum(part, labels, model):
    with_mean(part, labels, model)
    part["num_items_in_batch"] = N


def with_own_loss(part, labels, model):
    with_mean(part, labels, model)
    model.loss_function = lambda logits, shift_labels, **_: sequence_loss(logits, shift_labels)


CAUSAL, PACKED = Mask.causal(N), Mask.documents(ENDS)
HALVES, ZIGZAG = Layout.contiguous(N, 2), Layout.zigzag(N, 2)
CASES = {
    "without Canon": ("Llama", ZIGZAG, CAUSAL, unchanged, "eager"),
    "labels": ("Llama", ZIGZAG, CAUSAL, with_labels),
    "mean": ("Llama", ZIGZAG, CAUSAL, with_mean),
    "restarts": ("Llama", ZIGZAG, None, with_restarts, "canon", 2),  # of documents on rank 1
    "positions of halves": ("Llama", HALVES, PACKED, without_positions),
    "later": ("Llama", ZIGZAG, CAUSAL, without_positions_later),
    **{name: (name, ZIGZAG, CAUSAL, without_positions) for name in MODELS},
}
CORRECT = [
    *(
        (name, layout, mask, unchanged)
        for name in ("Llama", "GptOss")
        for layout in (HALVES, ZIGZAG)
        for mask in (CAUSAL, PACKED)
    ),
    ("Llama", HALVES, Mask.documents([0, 24, N]), without_positions),  # a document on each rank
    ("Llama", ZIGZAG, None, unchanged),
    ("Llama", ZIGZAG, CAUSAL, with_sum),
    ("Llama", ZIGZAG, CAUSAL, with_own_loss),
]


def programs():
    """Return the warnings of all cases on this rank."""
    found = []
    for case in (*CASES.values(), *CORRECT):
        transformers_module._looked.clear()
        found.append(warned(*case))
    tree = trees.pack([[1, 2, 3], [1, 2, 4], [5, 6, 7]])
    layout = Layout([[range(5)], [range(5, 8)]], 8)  # a path from a root on rank 1
    given = {"input_ids": tree.token_ids, "position_ids": tree.position_ids}
    part = {name: layout.shard(x, dist.get_rank(), 0)[None] for name, x in given.items()}

    def step():
        with sharded(tree.mask, layout, half="reference"):
            tiny("Llama", "canon")(**part, use_cache=False)

    return [*found, warnings_of(step)]


@functools.cache
def found():
    """Return the warnings of each of two processes by case, and those of correct programs."""
    ranks = list(zip(*process_groups.processes(programs, 2, timeout=300), strict=True))
    return dict(zip(CASES, ranks, strict=False)), ranks[len(CASES) :]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("without Canon", 'no model used Canon inside sharded.*set_attn_implementation."canon"'),
        ("labels", LABELS),
        ("mean", LABELS),
        *((name, COUNTED) for name in ("later", *MODELS)),
    ],
)
def test_a_mistake_warns_once_on_each_rank(case, expected):
    for messages in found()[0][case]:
        (message,) = messages
        assert re.search(expected, message)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("positions of halves", COUNTED),
        ("restarts", "a document sees those before it: pass Mask.documents"),
    ],
)
def test_positions_warn_on_the_rank_that_can_see_the_mistake(case, expected):
    first, (message,) = found()[0][case]
    assert first == []
    assert expected in message


def test_correct_programs_do_not_warn():
    assert not any(messages for ranks in found()[1] for messages in ranks)


def test_a_block_that_fails_does_not_warn():
    with pytest.raises(KeyError), sharded(CAUSAL, Layout.zigzag(N, 1), half="reference"):
        raise KeyError  # a warning would be an error here


def outside(layout):
    """Run a model outside of `sharded` on this rank's part, and return warnings."""
    part = layout.shard_batch({"input_ids": tokens(N)}, dist.get_rank())
    padding = torch.ones(2, N, dtype=torch.bool)
    padding[1, :5] = False
    whole = {
        "input_ids": tokens(N, 2),
        "attention_mask": padding,
        "position_ids": (padding.long().cumsum(1) - 1).masked_fill(~padding, 1),
    }
    model = tiny("Llama", "canon")
    return [warnings_of(lambda x=x: model(**x, use_cache=False)) for x in (whole, part)]


def test_positions_of_a_shard_outside_of_sharded_warn_on_each_rank():
    """Each rank of a zigzag layout has a jump, which transformers takes for a new document. A batch
    with padding on the left is correct.
    """
    for whole, part in process_groups.processes(functools.partial(outside, ZIGZAG), 2):
        assert whole == []
        (message,) = part
        assert "this rank attends to its own tokens alone" in message
