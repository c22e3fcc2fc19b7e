"""Run and judge the cases without attention: plans, group casts and group reduces.

dispatch        equal to the reference
cast_plan       the same; each rank receives once every token that its mask needs
group_cast      rows equal to the plan's tokens
group_reduce    as close to the float64 sum as float32 sums in any order
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from canon import reference
from canon.check.cases import Case, interleaving
from canon.check.inputs import Inputs, placed
from canon.masks.cast_plan import CastPlan
from canon.reference import Layout
from canon.route.checks import accumulate_dtype
from canon.testing.judge import EXACT, UNIT, Measure, judged, visible_blocks

Tables = dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """An expected table, or with ``honest`` other sums that may differ as much."""

    exact: Tensor
    honest: list[Tensor] = field(default_factory=list)
    roundings: Tensor | None = None  # distances that widen the bound
    tokens: Tensor | None = None  # the token of each row, if the rows are tokens


class Exchange:
    """A case on one rank. Other answers are tables of the reference."""

    def __init__(self, case: Case, layout: Layout, x: Inputs | None, rank: int):
        self.case, self.mask, self.layout, self.rank = case, case.masks, layout, rank
        self.options = dict(case.options)
        if x is not None:
            self.full = x.k.movedim(-3, 0)
            self.mine = _tokens(layout.ranges_per_rank[rank]).to(self.full.device)

    def tables(self, half: Any) -> Tables:
        return getattr(self, f"{self.case.function}_tables")(half)

    def answers(self) -> dict[str, Answer]:
        if own := getattr(self, f"{self.case.function}_answers", None):
            return own()
        return {name: Answer(table) for name, table in self.tables(reference).items()}

    def dispatch_tables(self, half: Any) -> Tables:
        ranks = self.layout.ranks
        plan = half.dispatch(self.mask, ranks, **interleaving(self.mask, ranks))
        return {"plan": _places(plan.ranges_per_rank)}

    def cast_plan_tables(self, half: Any) -> Tables:
        """Return rows (cast, receiver, source, row there, token), and those of this rank."""
        plan = half.cast_plan(self.mask, self.layout, **self.options)
        rows = [
            (cast, receiver, piece.source, piece.row + offset, token)
            for cast in range(plan.casts)
            for receiver in range(plan.layout.ranks)
            for piece in plan.received(cast, receiver)
            for offset, token in enumerate(piece.tokens)
        ]
        moves = torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)
        mine = moves[moves[:, 1] == self.rank]
        return {"plan": moves, "need": mine[mine[:, 4].argsort()][:, 2:]}

    def cast_plan_answers(self) -> dict[str, Answer]:
        places = _places(self.layout.ranges_per_rank)
        mine = places[:, 1] == self.rank
        needed = torch.zeros(self.mask.keys, dtype=torch.bool)
        for rows, visible in visible_blocks(self.mask):
            needed |= visible[mine[rows]].any(0)
        need = places[needed & ~mine][:, [1, 2, 0]]
        return {"plan": Answer(self.cast_plan_tables(reference)["plan"]), "need": Answer(need)}

    @cached_property
    def plan(self) -> CastPlan:
        return reference.cast_plan(self.mask, self.layout, **self.options)

    def received(self, cast: int, rank: int) -> Tensor:
        pieces = sorted(self.plan.received(cast, rank), key=lambda piece: (piece.source, piece.row))
        return _tokens(piece.tokens for piece in pieces).to(self.full.device)

    def group_cast_tables(self, half: Any) -> Tables:
        mine = placed(self.full[self.mine], self.case.shape.strides)
        casts = range(self.plan.casts)
        return {f"cast {cast}": half.group_cast(mine, self.plan, cast) for cast in casts}

    def group_cast_answers(self) -> dict[str, Answer]:
        received = [self.received(cast, self.rank) for cast in range(self.plan.casts)]
        return {
            f"cast {cast}": Answer(self.full[tokens], tokens=tokens)
            for cast, tokens in enumerate(received)
        }

    def summands(self) -> tuple[Tensor, list[Tensor]]:
        """Return the start of a sum of the whole sequence, and a part of each rank."""
        generator, like = torch.Generator().manual_seed(2), self.full
        start, *parts = (
            torch.randn(like.shape, generator=generator).to(like.device)
            for _ in range(1 + self.layout.ranks)
        )
        return start.to(accumulate_dtype(like.dtype)), [part.to(like.dtype) for part in parts]

    def group_reduce_tables(self, half: Any) -> Tables:
        start, parts = self.summands()
        into = total = placed(start[self.mine], self.case.shape.strides)
        for cast in range(self.plan.casts):
            y = placed(parts[self.rank][self.received(cast, self.rank)], self.case.shape.strides)
            total = half.group_reduce(y, self.plan, cast, into)
        return {"sum": total, "into": into}

    def group_reduce_answers(self) -> dict[str, Answer]:
        start, parts = self.summands()
        for source, part in enumerate(parts):
            sent = torch.zeros(len(part), dtype=torch.bool, device=part.device)
            for cast in range(self.plan.casts):
                sent[self.received(cast, source)] = True
            part[~sent] = 0
        start, *parts = (x[self.mine].to(start.dtype) for x in (start, *parts))
        generator = torch.Generator().manual_seed(3)
        orders = [torch.randperm(len(parts), generator=generator).tolist() for _ in range(4)]
        honest = [sum((parts[rank] for rank in order), start) for order in orders]
        exact, sizes = start.double(), start.double().abs()
        for part in parts:
            exact, sizes = exact + part, sizes + part.double().abs()
        unit = EXACT if start.dtype == torch.float64 else UNIT
        answer = Answer(exact, honest, unit * sizes, self.mine)
        return {"sum": answer, "into": answer}


def _places(ranges_per_rank: Sequence[Sequence[range]]) -> Tensor:
    rows = [
        (int(token), rank, row)
        for rank, ranges in enumerate(ranges_per_rank)
        for row, token in enumerate(_tokens(ranges))
    ]
    return torch.tensor(sorted(rows), dtype=torch.int64).reshape(-1, 3)


def _tokens(pieces: Iterable[range]) -> Tensor:
    return torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)


def compared(got: Tables, expected: dict[str, Answer]) -> tuple[list[Measure], list[str]]:
    """Return measures and faults. The error of an exact table is its number of wrong rows."""
    measures, faults = [], []
    for name, answer in expected.items():
        mine, exact, like = got[name], answer.exact, (answer.honest or [answer.exact])[0]
        if (mine.shape, mine.dtype) != (like.shape, like.dtype):
            faults.append(f"{name} is {_form(mine)}, expected {_form(like)}")
        elif answer.honest:
            more_measures, more_faults = judged(name, mine, exact, answer.honest, answer.roundings)
            measures, faults = measures + more_measures, faults + more_faults
            if more_faults:
                error = (mine.double() - exact.double()).norm(dim=-1).nan_to_num(torch.inf)
                error = error.flatten(1, -2).amax(1) if error.dim() > 2 else error
                row, head = divmod(int(error.argmax()), error.shape[-1])
                faults.append(f"{name} is worst in row {row}{_token(answer, row)}, head {head}")
        else:
            rows = differs(mine, exact).flatten(1).any(1).nonzero().flatten().tolist()
            measures.append(Measure(name, "rows", float(len(rows)), 0.0))
            if rows:
                first = f"the first is row {rows[0]}{_token(answer, rows[0])}"
                faults.append(f"{name}: {len(rows)} of {len(exact)} rows are wrong, {first}")
    return measures, faults


def _token(answer: Answer, row: int) -> str:
    return "" if answer.tokens is None else f", token {int(answer.tokens[row])}"


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return where elements are not equal. A NaN equals a NaN."""
    return (a != b) & ~((a != a) & (b != b))


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
