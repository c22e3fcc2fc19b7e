"""Queries that all ranks hold attend to keys that the ranks divide: shapes and dtypes that the
table of cases leaves out.
"""

import pytest
import torch
from invariant_worlds import decoded
from sharded import whole

from canon import Mask

ENDS, QUERIES = [11, 11, 37], 3  # of the keys of three ranks; the second one has none
# causal at the end
LAST = Mask.ranges([(0, QUERIES)], [(0, 37)], ["causal"], queries=QUERIES, keys=37)


def inputs():
    """Return q and the keys and values of all ranks."""
    q, k, v, *_ = whole(Mask.full(37), b=2, dv=5, dtype=torch.float32)
    return [q[:, :QUERIES], k, v]


def test_packed_queries_under_autocast_have_no_gradient(half):
    tensors = [x[0].requires_grad_() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = half.decode_attention(*tensors, LAST, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert (out.shape, lse.shape) == ((QUERIES, 4, 5), (4, QUERIES))
    assert torch.equal(out, half.decode_attention(*(x.bfloat16() for x in tensors), LAST))


@pytest.mark.parametrize("shape", [(0, QUERIES), (2, 0)], ids=["no sequence", "no query"])
def test_no_queries(half, shape):
    q, k, v = inputs()
    for out, lse in decoded(half, ENDS, *(x[: shape[0]] for x in (q[:, : shape[1]], k, v))):
        assert (out.shape, lse.shape) == ((*shape, 4, 5), (shape[0], 4, shape[1]))


def test_a_compiled_program_breaks_its_graph_at_it(half):
    def program(q, k, v):
        return half.decode_attention(2 * q, k, v) + 1

    compiled, tensors = torch.compile(program, backend="eager"), inputs()
    assert torch.equal(compiled(*tensors), program(*tensors))


@pytest.mark.usefixtures("own_errors")
def test_a_missing_argument_is_named_with_the_function(half):
    with pytest.raises(TypeError, match=r"^decode_attention\(\) missing 3 required positional"):
        half.decode_attention()
