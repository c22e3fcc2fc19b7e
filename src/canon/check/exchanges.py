"""Run and judge the cases without attention: plans, group casts and group reduces, and layouts.

    dispatch, plan_report    equal to the reference
    cast_plan                equal to the reference; each rank receives once every token that the
                             mask needs there
    group_cast               rows equal to the plan's tokens of the full tensor, by source and by
                             row there
    group_reduce             as close to the float64 sum as float32 sums in any order
    Layout                   `shard`, `unshard` and their gradients equal to indexing by hand

A case returns tables on every rank: named tensors, tokens outermost.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from canon import reference
from canon.check.cases import Case, interleaving
from canon.check.inputs import Inputs, placed
from canon.masks.cast_plan import CastPlan
from canon.reference import Layout, Mask
from canon.route.checks import accumulate_dtype
from canon.testing.judge import EXACT, UNIT, Measure, judged, visible_blocks

Tables = dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """An expected table: equal to ``exact``, or as close to it as the sums ``honest`` in other
    orders.
    """

    exact: Tensor
    honest: list[Tensor] = field(default_factory=list)
    roundings: Tensor | None = None  # distances that widen the bound
    tokens: Tensor | None = None  # the token of each row, if the rows are tokens


def tables(
    module: Any, case: Case, mask: Mask, layout: Layout, x: Inputs | None, rank: int
) -> Tables:
    """Return the tables of ``module`` on this rank."""
    return _RUNNERS[case.function](module, case, mask, layout, x, rank)


def answers(
    case: Case, mask: Mask, layout: Layout, x: Inputs | None, rank: int
) -> dict[str, Answer]:
    """Return the expected tables on this rank: those of the reference, unless another way computes
    them.
    """
    if case.function in _ANSWERS:
        return _ANSWERS[case.function](case, mask, layout, x, rank)
    return {
        name: Answer(table)
        for name, table in tables(reference, case, mask, layout, x, rank).items()
    }


def compared(got: Tables, expected: dict[str, Answer]) -> tuple[list[Measure], list[str]]:
    """Return all measures and faults. If a table must be equal, its error is the number of wrong
    rows.
    """
    measures, faults = [], []
    for name, answer in expected.items():
        mine, exact, like = got[name], answer.exact, (answer.honest or [answer.exact])[0]
        if (mine.shape, mine.dtype) != (like.shape, like.dtype):
            faults.append(f"{name} is {_form(mine)}, expected {_form(like)}")
        elif answer.honest:
            more_measures, more_faults = judged(name, mine, exact, answer.honest, answer.roundings)
            measures, faults = measures + more_measures, faults + more_faults
            faults += [_worst(name, mine, answer)] if more_faults else []
        else:
            rows = rows_that_differ(mine, exact)
            measures.append(Measure(name, "rows", float(len(rows)), 0.0))
            if len(rows):
                token = "" if answer.tokens is None else f", token {int(answer.tokens[rows[0]])}"
                faults.append(
                    f"{name}: {len(rows)} of {len(exact)} rows are wrong, the first is "
                    f"row {rows[0]}{token}"
                )
    return measures, faults


def _worst(name: str, got: Tensor, answer: Answer) -> str:
    error = (got.double() - answer.exact.double()).norm(dim=-1).nan_to_num(torch.inf)
    error = error.flatten(1, -2).amax(1) if error.dim() > 2 else error
    row, head = divmod(int(error.argmax()), error.shape[-1])
    token = "" if answer.tokens is None else f", token {int(answer.tokens[row])}"
    return f"{name} is worst in row {row}{token}, head {head}"


def rows_that_differ(a: Tensor, b: Tensor) -> list[int]:
    """Return the indices of rows that are not equal. A NaN equals a NaN."""
    differ = (a != b) & ~((a != a) & (b != b))
    return differ.flatten(1).any(1).nonzero().flatten().tolist()


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _dispatch(module, case, mask, layout, x, rank) -> Tables:
    plan = module.dispatch(mask, layout.ranks, **interleaving(mask, layout.ranks))
    return {"plan": _places(plan.ranges_per_rank)}


def _places(ranges_per_rank: Sequence[Sequence[range]]) -> Tensor:
    """Return rows (token, its rank, its row there)."""
    rows = [
        (token, rank, row)
        for rank, ranges in enumerate(ranges_per_rank)
        for row, token in enumerate(token for piece in ranges for token in piece)
    ]
    return torch.tensor(sorted(rows), dtype=torch.int64).reshape(-1, 3)


def _cast_plan(module, case, mask, layout, x, rank) -> Tables:
    plan = module.cast_plan(mask, layout, **dict(case.options))
    moves = _moves(plan)
    mine = moves[moves[:, 1] == rank]
    return {"plan": moves, "need": mine[mine[:, 4].argsort()][:, 2:]}


def _cast_plan_answer(case, mask, layout, x, rank) -> dict[str, Answer]:
    places = _places(layout.ranges_per_rank)
    mine, needed = places[:, 1] == rank, torch.zeros(mask.keys, dtype=torch.bool)
    for rows, visible in visible_blocks(mask):
        needed |= visible[mine[rows]].any(0)
    need = places[needed & ~mine][:, [1, 2, 0]]
    return {
        "plan": Answer(_cast_plan(reference, case, mask, layout, x, rank)["plan"]),
        "need": Answer(need),
    }


def _moves(plan: CastPlan) -> Tensor:
    """Return rows (cast, receiver, source, row at the source, token), in the plan's order."""
    rows = [
        (cast, receiver, piece.source, piece.row + offset, token)
        for cast in range(plan.casts)
        for receiver in range(plan.layout.ranks)
        for piece in plan.received(cast, receiver)
        for offset, token in enumerate(piece.tokens)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)


def _plan_report(module, case, mask, layout, x, rank) -> Tables:
    report = module.plan_report(mask, layout, chunk=interleaving(mask, layout.ranks)["chunk"])
    by_rank = torch.tensor([report.areas, report.received, report.sent], dtype=torch.int64).T
    return {"report": by_rank, "largest": torch.tensor([[report.tokens, report.largest_chunk]])}


def _rows(layout: Layout, x: Tensor, rank: int, case: Case) -> Tensor:
    return placed(x[_positions(layout, rank).to(x.device)], case.shape)


def _positions(layout: Layout, rank: int) -> Tensor:
    return _tokens(layout.ranges_per_rank[rank])


def _tokens(pieces: Iterable[range]) -> Tensor:
    return torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)


def _tokens_received(plan: CastPlan, cast: int, rank: int) -> Tensor:
    pieces = sorted(plan.received(cast, rank), key=lambda piece: (piece.source, piece.row))
    return _tokens(piece.tokens for piece in pieces)


def _group_cast(module, case, mask, layout, x, rank) -> Tables:
    plan = reference.cast_plan(mask, layout, **dict(case.options))
    mine = _rows(layout, x.k.movedim(-3, 0), rank, case)
    return {f"cast {cast}": module.group_cast(mine, plan, cast) for cast in range(plan.casts)}


def _group_cast_answer(case, mask, layout, x, rank) -> dict[str, Answer]:
    plan = reference.cast_plan(mask, layout, **dict(case.options))
    full = x.k.movedim(-3, 0)
    received = [_tokens_received(plan, cast, rank).to(full.device) for cast in range(plan.casts)]
    return {
        f"cast {cast}": Answer(full[tokens], tokens=tokens) for cast, tokens in enumerate(received)
    }


def _summands(like: Tensor, ranks: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    start, *parts = (
        torch.randn(like.shape, generator=generator).to(like.device) for _ in range(1 + ranks)
    )
    return start.to(accumulate_dtype(like.dtype)), [part.to(like.dtype) for part in parts]


def _summed(start: Tensor, parts: list[Tensor]) -> Answer:
    """Return the sum in float64, and four sums in other orders."""
    generator, parts = torch.Generator().manual_seed(3), [part.to(start.dtype) for part in parts]
    honest = []
    for _ in range(4):
        total = start.clone()
        for index in torch.randperm(len(parts), generator=generator).tolist():
            total += parts[index]
        honest.append(total)
    unit = EXACT if start.dtype == torch.float64 else UNIT
    roundings = unit * sum((part.double().abs() for part in parts), start.double().abs())
    return Answer(sum((part.double() for part in parts), start.double()), honest, roundings)


def _group_reduce(module, case, mask, layout, x, rank) -> Tables:
    plan = reference.cast_plan(mask, layout, **dict(case.options))
    start, parts = _summands(x.k.movedim(-3, 0), layout.ranks)
    into = total = _rows(layout, start, rank, case)
    for cast in range(plan.casts):
        y = parts[rank][_tokens_received(plan, cast, rank).to(start.device)]
        total = module.group_reduce(placed(y, case.shape), plan, cast, into)
    return {"sum": total, "into": into}


def _group_reduce_answer(case, mask, layout, x, rank) -> dict[str, Answer]:
    plan = reference.cast_plan(mask, layout, **dict(case.options))
    start, parts = _summands(x.k.movedim(-3, 0), layout.ranks)
    mine = _positions(layout, rank).to(start.device)
    for source, part in enumerate(parts):
        sent = torch.zeros(len(part), dtype=torch.bool)
        for cast in range(plan.casts):
            sent[_tokens_received(plan, cast, source)] = True
        part[~sent.to(part.device)] = 0
    answer = replace(_summed(start[mine], [part[mine] for part in parts]), tokens=mine)
    return {"sum": answer, "into": answer}


def _layout(module, case, mask, layout, x, rank) -> Tables:
    made, full = module.Layout(layout.ranges_per_rank, layout.tokens), x.k.detach().requires_grad_()
    grads = [part.movedim(0, -3) for part in _summands(x.k.movedim(-3, 0), layout.ranks)[1]]
    shard = made.shard(full, rank, -3)
    mine = shard.detach().requires_grad_()
    replicated, partial = made.unshard(mine, dim=-3), made.unshard(mine, dim=-3, partial_grad=True)
    found = {
        "shard": shard.detach(),
        "unshard": replicated.detach(),
        "gradient of shard": torch.autograd.grad(shard, full, shard.detach())[0],
        "gradient of unshard": torch.autograd.grad(replicated, mine, grads[0])[0],
        "sum": torch.autograd.grad(partial, mine, grads[rank])[0],
    }
    return {"positions": made.positions(rank)[:, None]} | {
        name: table.movedim(-3, 0) for name, table in found.items()
    }


def _layout_answer(case, mask, layout, x, rank) -> dict[str, Answer]:
    full, positions = x.k.movedim(-3, 0), _positions(layout, rank)
    mine = positions.to(full.device)
    _, grads = _summands(full, layout.ranks)
    scattered = torch.zeros_like(full)
    scattered[mine] = full[mine]
    equal = {
        "positions": positions[:, None],
        "shard": full[mine],
        "unshard": full,
        "gradient of shard": scattered,
        "gradient of unshard": grads[0][mine],
    }
    summed = replace(
        _summed(torch.zeros_like(full[mine]), [grad[mine] for grad in grads]), tokens=mine
    )
    tokens = {"positions": positions, "shard": positions, "gradient of unshard": positions}
    return {name: Answer(table, tokens=tokens.get(name)) for name, table in equal.items()} | {
        "sum": summed
    }


_RUNNERS: dict[str, Callable[..., Tables]] = {
    "dispatch": _dispatch,
    "cast_plan": _cast_plan,
    "plan_report": _plan_report,
    "group_cast": _group_cast,
    "group_reduce": _group_reduce,
    "Layout": _layout,
}
_ANSWERS: dict[str, Callable[..., dict[str, Answer]]] = {
    "cast_plan": _cast_plan_answer,
    "group_cast": _group_cast_answer,
    "group_reduce": _group_reduce_answer,
    "Layout": _layout_answer,
}
