"""No result depends on torch.set_default_device or torch.set_default_dtype."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded import CALLS, attending, layout_of, on_this_rank, whole

import canon
from canon import Layout, Mask
from canon.integrations import transformers_masks
from canon.testing import process_groups
from canon.training import linear_sequence_loss, sequence_loss

SOURCES = Path(canon.__file__).parent
# Rooms of commands and tests: they run in processes of their own.
TOOLS = {"bench", "check", "simulator", "testing"}
# makers of tensors; the first ones give them the dtype of their values
WHOLE = "arange as_tensor randint randperm tensor tril_indices triu_indices"
MAKERS = (
    f"{WHOLE} empty empty_strided eye full linspace logspace ones rand randn scalar_tensor zeros"
)
MASK = Mask.documents([0, 3, 12, 19])


def makers(path):
    """Yield (line, function, keywords) of every call that makes a tensor by default on the default
    device.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MAKERS.split()
        ):
            keywords = {x.arg for x in node.keywords}
            if ast.unparse(node.func.value) == "torch" and None not in keywords:
                yield node.lineno, node.func.attr, keywords


def test_every_new_tensor_names_its_device_and_a_dtype_that_is_not_that_of_its_values():
    files = [x for x in SOURCES.rglob("*.py") if x.relative_to(SOURCES).parts[0] not in TOOLS]
    files += [x for half in ("fast", "reference") for x in (SOURCES / half).resolve().rglob("*.py")]
    found = [(path, *maker) for path in files for maker in makers(path)]
    assert len(found) > 50
    assert not [(str(path), line) for path, line, _, keywords in found if "device" not in keywords]
    assert not [
        (str(path), line)
        for path, line, name, words in found
        if name not in WHOLE.split() and "dtype" not in words
    ]


def attended(half, call):
    """Ranks that are threads compare their calls as those of several hosts do."""
    layout = layout_of(call, 19, 2, Layout.zigzag(19, 2))
    tensors = whole(MASK, dtype=torch.float32)
    return 2, lambda: on_this_rank(attending(half, call, MASK, layout), layout, tensors)


def local(half):
    q, k, v, _, _ = whole(MASK, dtype=torch.float32)
    sink = torch.arange(4, dtype=torch.float32)
    return 1, lambda: [
        *half.attention(q, k, v, MASK, sink=sink, return_lse=True),
        *half.attention(q, k, v, MASK, softcap=3.0, return_lse=True, return_max_logits=True),
    ]


def decoding(half):
    q, k, v, _, _ = whole(MASK, dtype=torch.float32)
    return 2, lambda: [half.decode_attention(q[:, :1], k, v), *decoding_in_order(half, q, k, v)]


def decoding_in_order(half, q, k, v):
    k, v = (x[:, :0] if dist.get_rank() else x for x in (k, v))
    return half.decode_attention(q[:, :1], k, v, rank_invariant=True, return_lse=True)


def losses(_):
    draw = torch.Generator().manual_seed(0)
    logits, hidden, head = (
        torch.randn(*x, generator=draw) for x in ((1, 19, 5), (1, 19, 4), (5, 4))
    )
    labels = torch.arange(19)[None] % 5
    return 2, lambda: [
        sequence_loss(logits, labels),
        linear_sequence_loss(hidden, head, labels, chunk=8),
    ]


def plans(half):
    cu, labels, valid = torch.tensor([0, 3, 19]), torch.arange(19)[None] % 5, torch.arange(19) > 2
    return 1, lambda: [
        half.dispatch(Mask.documents(cu), 2, chunk=2).positions(1),
        *Layout.zigzag(19, 2).shard_batch({"labels": labels}, 1, cu_seqlens=cu).values(),
        canon.trees.pack([[1, 2, 3], [1, 2, 4]]).token_ids,
        *map(list, transformers_masks._runs(valid)),
    ]


CASES = {call: lambda half, call=call: attended(half, call) for call in CALLS}
CASES |= {x.__name__: x for x in (local, decoding, losses, plans)}


@pytest.fixture
def restored_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_defaults_of_torch_change_no_bit(half, case, restored_dtype):
    """The default device "meta" stands for a GPU: it is a property of a thread, and the dtype one
    of the process.
    """
    ranks, program = CASES[case](half)

    def on_meta():
        with torch.device("meta"):
            return program()

    results = [process_groups.threads(program, ranks), process_groups.threads(on_meta, ranks)]
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        results.append(process_groups.threads(program, ranks))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
