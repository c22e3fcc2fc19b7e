"""Each Triton kernel on rows equals PyTorch's operation of that name, and a fault planted in any
Triton kernel is found here.

Schedules are tested with PyTorch's tiles, so the kernels need tests of their own. A planted fault
replaces a line of a kernel."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import hopper
import pytest
import torch
from hopper import METHODS, assert_exact, assert_methods, both_passes
from sharded import DEVICE

from canon import Mask
from canon.fast import local
from canon.fast.kernels.torch import rows as plain
from canon.fast.kernels.triton import launch, parts, rows, sink, sum_ranks
from canon.fast.kernels.triton.config import Config, forced
from canon.fast.mesh import as_tokens
from canon.fast.tables import key_parts
from canon.masks.plan_cache import PLANS
from canon.testing.judge import Attended

pytestmark = pytest.mark.gpu
B, T, H, G, D, DV, RANKS = 2, 37, 4, 2, 24, 40, 3


class Inputs:
    """Random tensors, the same for each object. Tensors of rows have any strides, and statistics
    have rows that see no key.
    """

    def __init__(self, dtype):
        self.dtype, self.accumulate = dtype, torch.promote_types(dtype, torch.float32)
        self.generator = torch.Generator().manual_seed(5)

    def normal(self, *shape, dtype=None):
        return (
            torch.randn(shape, generator=self.generator, dtype=torch.float64)
            .to(dtype or self.dtype)
            .to(DEVICE)
        )

    def rows(self, heads, width, tokens=T, dtype=None):
        return self.normal(heads, B, tokens, 2 * width, dtype=dtype).permute(1, 2, 0, 3)[
            ..., :width
        ]

    def statistic(self, tokens=T, hidden=False):
        x = self.normal(B, H, tokens, dtype=self.accumulate)
        return (
            x.masked_fill(torch.arange(tokens, device=DEVICE) % 5 == 1, -torch.inf) if hidden else x
        )

    def result(self, heads):
        """Return out and lse of a part; out holds NaN where the part has no key."""
        lse = self.statistic(hidden=True)
        hidden = (lse == -torch.inf).transpose(1, 2)[..., None]
        return self.rows(heads, DV).masked_fill(hidden, torch.nan), lse

    def some(self, number=11):
        return torch.randperm(T, generator=self.generator)[:number].to(DEVICE)


def empty(x, **options):
    return torch.full_like(x, torch.nan, **options)


def merge(operations, x):
    (out, lse), other = x.result(H), x.result(H)
    new = empty(out, dtype=x.accumulate), empty(lse)
    operations.merge(out, lse, *other, *new)
    return new


def merge_rows(operations, x):
    (out, lse), (other, other_lse), at = x.result(H), x.result(H), x.some()
    out, other = out.nan_to_num(), other[:, : len(at)]
    operations.merge(out, lse, other, other_lse[..., : len(at)].contiguous(), out, lse, at)
    return out, lse


def delta(operations, x):
    (out, lse), result = x.result(H), x.statistic()
    operations.delta(x.rows(H, DV), out, lse, x.statistic(), result)
    return (result,)


def sum_heads(operations, x):
    dk, dv = x.rows(G, D), x.rows(G, DV)
    operations.sum_heads(
        x.rows(H, D, dtype=x.accumulate), x.rows(H, DV, dtype=x.accumulate), dk, dv
    )
    return dk, dv


def take_rows(operations, x):
    at = x.some()
    out = empty(x.normal(B, len(at), G, D + DV))
    operations.take_rows(x.rows(G, D), x.rows(G, DV), at, out)
    return (out,)


def copy_rows(operations, x):
    at = x.some()
    part, of_lse = empty(x.rows(H, D, len(at))), empty(x.statistic(len(at)))
    operations.copy_rows(x.rows(H, D), part, at)
    operations.copy_rows(as_tokens(x.statistic()), as_tokens(of_lse), at)
    return part, of_lse


def copy_statistics(operations, x):
    at = x.some()
    made = x.statistic(len(at)), x.statistic(len(at))
    operations.copy_statistics(x.statistic(hidden=True), x.statistic(), made, at)
    return made


def add_to_rows(operations, x):
    at, total = x.some(), x.rows(H, D)
    operations.add_to_rows(total, at, x.rows(H, D, len(at)))
    return (total,)


def add_rows(operations, x):
    number = torch.arange(T, device=DEVICE) % 4
    first = torch.cat([number.new_zeros(1), number.cumsum(0)])
    places = torch.randperm(int(first[-1]), generator=x.generator).to(DEVICE)
    total = x.rows(G, D)
    operations.add_rows(total, x.rows(G, D, len(places)), first, places, total)
    return (total,)


def copy_tokens(operations, x):
    copy = empty(x.rows(H, D, dtype=torch.float32))
    operations.copy_tokens(x.rows(H, D), copy)
    message = empty(x.normal(B, T, H + 1, 1, dtype=x.accumulate))[:, :, 1:]
    operations.copy_tokens(as_tokens(x.statistic()), message)
    return copy, message


def sum_of_ranks(operations, x):
    total = empty(x.rows(G, D))
    operations.sum_ranks(x.normal(B, RANKS, T, G, D), total)
    return (total,)


def apply_sink(operations, x):
    (out, lse), result = x.result(H), x.rows(H, DV)
    operations.apply_sink(out.nan_to_num(), lse, x.normal(H), result)
    return (result,)


def differentiate_sink(operations, x):
    (dout, lse), made = x.result(H), (x.rows(H, DV), x.statistic())
    operations.differentiate_sink(dout, x.rows(H, DV), lse, x.normal(H), *made)
    return made


OPERATIONS = (
    merge,
    merge_rows,
    delta,
    sum_heads,
    take_rows,
    copy_rows,
    copy_statistics,
    add_to_rows,
    add_rows,
    copy_tokens,
)
OPERATIONS += (sum_of_ranks, apply_sink, differentiate_sink)
ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
}  # one rounding of the result, and of the sums


def assert_equals_plain(operation, dtype=torch.float64):
    got, expected = operation(rows, Inputs(dtype)), operation(plain, Inputs(dtype))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_kernel_equals_the_operation_of_pytorch(operation, dtype):
    assert_equals_plain(operation, dtype)


def test_tokens_are_copied_by_their_state_and_fills_leave_no_gap():
    fills()


def fills():
    x = Inputs(torch.float32)
    source, states = x.rows(H, D), torch.arange(T, device=DEVICE).remainder(3).sub(1).to(torch.int8)
    copy = torch.full_like(source, 7.0)
    rows.copy_tokens(source, copy, states)
    state = states[:, None, None]
    assert torch.equal(copy, torch.where(state == 1, source, torch.where(state == 0, 0.0, 7.0)))
    rows.zero_rows(copy)
    assert not copy.any()
    result = x.statistic()
    rows.mask_statistic(result)
    assert (result == -torch.inf).all()


# ---------------------------------------------------------------------- planted faults
def attends():
    mask = Mask.documents([0, 1, 1, 33, 34, 52])
    given = hopper.inputs(mask, h=4, g=2, d=16, dv=16, dtype=torch.float64)
    with forced(**dict.fromkeys(("forward", "dq", "dkdv", "fused"), Config(32, 16, 4, 1))):
        assert_methods(both_passes, given, mask, methods=METHODS)


def attends_in_parts():
    mask = Mask.causal(17, 700)
    given = hopper.inputs(mask, b=2, h=4, g=2, d=16, dv=16, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_parts, "PART", 128)
        patch.setattr(key_parts, "FEWEST_KEYS", 1)
        PLANS.clear()  # a recording would launch the kernel as it was
        assert_exact(Attended(*local.attention(*given[:3], mask, return_lse=True)), *given, mask)


def flips():
    x = Inputs(torch.float64).rows(H, D)
    flipped, _ = launch.signed(x, -0.5)
    assert torch.equal(flipped, -x)


FAULTS = {  # by kernel: where its name is read, the text and its fault, and the test
    "forward_kernel": (launch, "acc / l[:, None]", "acc", attends),
    "sign_kernel": (launch, "* sign", "* (0 - sign)", flips),
    "dq_kernel": (launch, "acc * scale_acc", "acc", attends),
    "dkdv_kernel": (launch, "dk_acc * scale_acc", "dk_acc", attends),
    "sum_heads_kernel": (launch, "(head + 1) * group", "head * group + 1", sum_heads),
    "merge_kernel": (launch, "(b_weight / total)", "b_weight", merge),
    "delta_kernel": (launch, "total, mask", "-total, mask", delta),
    "take_rows_kernel": (rows, "ALIGN) + D, values", "ALIGN), values", take_rows),
    "row_kernel": (rows, "values + tl.load", "0 * values + tl.load", add_to_rows),
    "add_rows_kernel": (rows, "range(0, tl.max", "range(1, tl.max", add_rows),
    "statistics_kernel": (
        rows,
        "delta_stride_h) + row",
        "delta_stride_h) + index",
        copy_statistics,
    ),
    "copy_kernel": (rows, "read, D", "read & (rows > 0), D", copy_tokens),
    "zero_rows_kernel": (rows, "tl.zeros([", "1 + tl.zeros([", fills),
    "statistic_kernel": (rows, "token * result_stride_t", "token", copy_tokens),
    "sink_kernel": (sink, "x * a[:, None]", "x", apply_sink),
    "sink_backward_kernel": (sink, "slope * tl.sum", "a * tl.sum", differentiate_sink),
    "sum_ranks_kernel": (sum_ranks, "range(1, RANKS)", "range(2, RANKS)", sum_of_ranks),
    "parts_kernel": (
        parts,
        "((seen[:, None] >> bits[None, :]) & 1) != 0",
        "seen[:, None] >= bits[None, :]",
        attends_in_parts,
    ),
    "merge_parts_kernel": (
        parts,
        "exp2(part_lse - top_or_zero)",
        "exp2(part_lse)",
        attends_in_parts,
    ),
}


def test_each_kernel_has_a_planted_fault():
    folder = Path(launch.__file__).parent
    assert {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"^def ([a-z]\w+_kernel)\(", path.read_text(), re.M)
    } == {*FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found_by_its_test(name, tmp_path, monkeypatch):
    module, text, fault, test = FAULTS[name]
    check = partial(assert_equals_plain, test) if test in OPERATIONS else test
    check()
    source = Path(importlib.import_module(getattr(module, name).fn.__module__).__file__).read_text()
    begin = source.index(f"def {name}(")
    end = source.find("\n\n\n", begin)
    assert text in source[begin:end]
    path = tmp_path / "planted.py"
    path.write_text(source[:begin] + source[begin:end].replace(text, fault) + source[end:])
    spec = importlib.util.spec_from_file_location("planted", path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    monkeypatch.setattr(module, name, getattr(planted, name))
    with pytest.raises(AssertionError):
        check()
