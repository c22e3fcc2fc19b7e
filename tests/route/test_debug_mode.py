"""PyTorch's DebugMode names the first call of Canon in which two runs part, by the lines of
paper/in_your_program.md.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import GUIDE

from canon import Mask, reference
from canon.testing import process_groups

(CODE,) = re.findall(
    r"```python\n(from torch.utils._debug_mode.*?)```", GUIDE.read_text(), re.DOTALL
)
N = 20


def logs_of(folder, run, half=reference, scale=0.25, off=0.0):
    """Run the page's lines on two ranks. Each takes two steps; ``off`` is added to k of rank 1
    between them.
    """

    def program():
        q, k, v = (torch.randn(1, N // 2, h, 16).requires_grad_() for h in (2, 1, 1))

        def train():
            for _ in range(2):
                half.zigzag_attention(
                    q, k, v, Mask.window(N, 3, 0), scale=scale
                ).square().sum().backward()
                with torch.no_grad():
                    k.add_(off * dist.get_rank())

        exec(CODE, {"train": train, "Path": Path, "run": folder / run, "rank": dist.get_rank()})

    torch.manual_seed(0)
    process_groups.threads(program, 2)
    return [(folder / f"{run}.rank{rank}").read_text().splitlines() for rank in range(2)]


def first_difference(one, other):
    """Return the two lines that differ first, and the number of Canon's passes before them."""
    found = [
        (i, x.strip(), y.strip()) for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y
    ][:1]
    return [(x, y, sum("canon::" in line for line in one[:i])) for i, x, y in found]


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Return a function that logs a run with the same tensors as every other run."""
    drawn = torch.randn
    monkeypatch.setattr(
        torch, "randn", lambda *shape: drawn(shape, generator=torch.Generator().manual_seed(7))
    )
    return lambda run, **options: logs_of(tmp_path, run, **options)


def test_equal_runs_have_equal_logs_with_both_passes(logged, half):
    one, other = logged("a", half=half), logged("b", half=half)
    assert one == other
    for lines in one:
        names = re.findall(r"canon::\w+", "".join(lines))
        assert names == 2 * ["canon::zigzag_attention", "canon::zigzag_attention_backward"]


@pytest.mark.parametrize(("function", "passes"), [("forward", 2), ("backward", 3)])
def test_the_pass_with_other_bits_is_named(logged, monkeypatch, function, passes):
    from canon.reference.ring import ZIGZAG

    before, compute, calls = logged("a"), getattr(ZIGZAG, function), []

    def faulty(*given):
        results = list(compute(*given))
        calls.append(dist.get_rank())
        if calls.count(1) == 2 and dist.get_rank() == 1:
            results[1].view(-1)[3] = torch.nextafter(results[1].view(-1)[3], torch.tensor(9.0))
        return tuple(results)

    object.__setattr__(ZIGZAG, function, faulty)  # an algorithm is frozen
    try:
        after = logged("b")
    finally:
        object.__setattr__(ZIGZAG, function, compute)
    assert not first_difference(before[0], after[0]), "the fault is on rank 1"
    ((one, other, place),) = first_difference(before[1], after[1])
    name = "canon::zigzag_attention" + "_backward" * (function == "backward")
    assert one.startswith(f"{name}(")
    assert place == passes
    inputs, results = zip(
        *(line.split("# {'input_hash': ")[1].split("'hash': ") for line in (one, other)),
        strict=True,
    )
    assert inputs[0] == inputs[1]
    differ = [x != y for x, y in zip(*(re.findall(r"\d+", line) for line in results), strict=True)]
    assert differ == [False, True, False], "the log names the tensor: lse, or dk"


def test_a_cause_outside_of_canon_and_another_option_are_named(logged):
    before = logged("a")
    ((one, other, place),) = first_difference(before[1], logged("b", off=1.0)[1])
    assert one.startswith("aten::add_")
    assert place == 2
    ((one, other, place),) = first_difference(before[0], logged("c", scale=0.5)[0])
    assert (", 0.25, " in one, ", 0.5, " in other, place) == (True, True, 0)
    assert f"{Mask.window(N, 3, 0)}" in one
