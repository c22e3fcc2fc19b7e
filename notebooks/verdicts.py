"""Verdicts of the judge on kernels, against `canon.reference` in float64."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from canon import reference
from canon.masks.mask import Mask
from canon.testing.judge import Agreement, Attended, agreement, orders


def first_difference(verdict: Agreement) -> str:
    """Return the first fault of a verdict, such as "lse is 3.1 times the bound";
    "" if it agrees.
    """
    if verdict.agrees:
        return ""
    wrong = next((measure for measure in verdict.measures if not measure.ratio <= 1), None)
    finite = wrong and wrong.error < float("inf")
    return f"{wrong.tensor} is {wrong.ratio:.1f} times the bound" if finite else verdict.faults[0]


def equal(
    name: str,
    got: Tensor,
    expected: Tensor,
    dim: int = 1,
    positions: Sequence[int] | Tensor | None = None,
) -> None:
    """Raise AssertionError that names the tokens, along axis ``dim``, that differ by more than
    1e-12. ``positions`` are their names, by default from 0.
    """
    for what in ("shape", "dtype"):
        mine, theirs = getattr(got, what), getattr(expected, what)
        assert mine == theirs, f"{name}: its {what} is {mine}, expected {theirs}"
    wrong = ~torch.isclose(got, expected, rtol=0, atol=1e-12)
    if not wrong.any():
        return
    rows = wrong.movedim(dim, 0).flatten(1).any(1).nonzero().flatten().tolist()
    tokens = rows if positions is None else [int(positions[row]) for row in rows]
    shown = ", ".join(map(str, tokens[:8])) + ", ..." * (len(tokens) > 8)
    place = tuple(wrong.movedim(dim, 0).nonzero()[0].tolist())
    found, right = (float(x.movedim(dim, 0)[place]) for x in (got, expected))
    raise AssertionError(
        f"{name}: wrong at {len(tokens)} of {got.shape[dim]} tokens: {shown}. At the first there "
        f"is {found:.3g}, expected {right:.3g}"
    )


def equal_cells(name: str, got: Tensor, expected: Tensor) -> None:
    """Raise AssertionError that names the first cell of a mask that differs."""
    wrong = (got != expected).nonzero().tolist()
    if wrong:
        query, key = wrong[0]
        right, other = ("visible", "hidden") if expected[query, key] else ("hidden", "visible")
        raise AssertionError(
            f"{name}: the cell in row {query}, column {key} is {other}, expected {right}"
        )


@contextmanager
def explained(reason: str) -> Iterator[None]:
    """Raise AssertionError with the reason if a rank raises inside the block."""
    try:
        yield
    except RuntimeError as error:
        raise AssertionError(reason) from error


def require(
    name: str, found: Attended, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask
) -> None:
    """Print the largest error of each tensor over its bound. Raise AssertionError that names the
    first difference.

    Errors are against `canon.reference` in float64 on the same inputs. An error may be twice that
    of plain attention in the dtype of q, plus one rounding.
    """
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(*leaves, mask, return_lse=True)
    exact = Attended(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    verdict = agreement(found, exact, orders(q, k, v, dout, mask))
    worst: dict[str, float] = {}
    for measure in verdict.measures:
        worst[measure.tensor] = max(measure.ratio, worst.get(measure.tensor, 0.0))
    print(
        f"{name}: error / bound",
        ", ".join(f"{tensor} {ratio:.2f}" for tensor, ratio in worst.items()),
    )
    assert verdict.agrees, f"{name}: {first_difference(verdict)}"
