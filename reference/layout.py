"""Which rank holds which tokens, in which local order.

    12 tokens, 3 ranks       rank 0          rank 1          rank 2
    contiguous               0 1 2 3         4 5 6 7         8 9 10 11
    zigzag                   0 1  10 11      2 3  8 9        4 5  6 7
    striped                  0 3 6 9         1 4 7 10        2 5 8 11

Under a causal mask contiguous shards are unbalanced (the last rank sees W times what the first one sees); zigzag and
striped shards see nearly equal areas. Any number of tokens and ranks will do: shards may be uneven, and empty.

A layout is the one source of four things that must never disagree: what the data loader hands out, the positions that
the rotary embedding turns by, the labels, and the mask between two ranks (`local_mask`).

Sources: zigzag, Zilin Zhu, ring-flash-attention issue 2 (2024); striped, Brandon et al., Striped Attention (2023).
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.arguments import place_in, plain_tensor, shown, whole
from canon.reference.band import joined
from canon.reference.group_state import group_state, refused_together
from canon.reference.mask import Ints, Mask, document_ends
from canon.reference.plan_cache import cached_plan
from canon.reference.unshard import Unshard


class Layout:
    """The tokens 0 .. ``tokens`` - 1, each on one rank: per rank a tuple of ranges, in local order, all of one step.

    Raises ValueError if a token is missing or held twice, or the steps differ; TypeError if a piece is not a range.
    """

    __slots__ = ("_digest", "_hash", "ranges_per_rank", "tokens")
    ranges_per_rank: tuple[tuple[range, ...], ...]
    tokens: int

    def __init__(self, ranges_per_rank: Sequence[Sequence[range]], tokens: int):
        tokens = whole("tokens", tokens, 0)
        _check_ranges(ranges_per_rank, tokens)
        steps = {piece.step for ranges in ranges_per_rank for piece in ranges if len(piece) > 1} or {1}
        if len(steps) > 1 or min(steps) < 1:
            raise ValueError(f"the ranges of a layout must share one step >= 1, got {sorted(steps)}")
        (step,) = steps
        held = tuple(tuple(range(p[0], p[-1] + 1, step) for p in ranges if len(p)) for ranges in ranges_per_rank)
        _check_partition(held, tokens, step)
        content = (held, tokens)
        object.__setattr__(self, "ranges_per_rank", held)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "_hash", hash(content))
        object.__setattr__(self, "_digest", None)

    def __setattr__(self, name, value):
        raise AttributeError(f"a Layout is immutable: cannot set {name}")

    def __eq__(self, other) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine, others = ((x._hash, x.tokens, x.ranges_per_rank) for x in (self, other))
        return self is other or mine == others

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Layout, (self.ranges_per_rank, self.tokens)

    def __repr__(self) -> str:
        shown = "; ".join(" ".join(f"{r.start}:{r.stop}:{r.step}" for r in held) for held in self.ranges_per_rank[:4])
        return f"Layout({self.tokens} tokens on {self.ranks} ranks: {shown}{'; ...' if self.ranks > 4 else ''})"

    # ------------------------------------------------------------------ constructors
    @classmethod
    def contiguous(cls, n: int, ranks: int) -> "Layout":
        """One piece of n tokens for each rank; sizes differ by at most 1, larger ones first."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[piece] for piece in _pieces(n, ranks)], n)

    @classmethod
    def zigzag(cls, n: int, ranks: int) -> "Layout":
        """2 x ranks pieces; rank r holds pieces r and 2 * ranks - 1 - r: one cheap, one dear under a causal mask."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        pieces = _pieces(n, 2 * ranks)
        return cls([[pieces[r], pieces[2 * ranks - 1 - r]] for r in range(ranks)], n)

    @classmethod
    def striped(cls, n: int, ranks: int) -> "Layout":
        """Rank r holds the tokens r, r + ranks, r + 2 * ranks, ..."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[range(r, n, ranks)] for r in range(ranks)], n)

    # ------------------------------------------------------------------ what can be asked
    @property
    def digest(self) -> str:
        """A digest of the content, equal in every process."""
        if self._digest is None:
            content = repr((self.ranges_per_rank, self.tokens))
            object.__setattr__(self, "_digest", hashlib.sha256(content.encode()).hexdigest())
        return self._digest

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranges_per_rank)

    @property
    def nbytes(self) -> int:
        """About how many bytes the layout takes on the host."""
        return 200 + 200 * sum(map(len, self.ranges_per_rank))

    def size(self, rank: int) -> int:
        """The number of tokens that ``rank`` holds."""
        return sum(map(len, self._held(rank)))

    def positions(self, rank: int) -> Tensor:
        """The place of each local token in the whole sequence: int64 [t], CPU."""
        pieces = [torch.arange(r.start, r.stop, r.step, device="cpu") for r in self._held(rank)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def document_positions(self, rank: int, cu_seqlens: Ints) -> Tensor:
        """The place of each local token in its own document, for the rotary embedding: int64 [t], CPU.

        Raises ValueError or TypeError if cu_seqlens is malformed, or ends elsewhere than at ``tokens``.
        """
        ends = torch.tensor(document_ends(cu_seqlens), device="cpu")
        if ends[-1] != self.tokens:
            raise ValueError(f"cu_seqlens ends at {ends[-1]}, the layout has {self.tokens} tokens")
        positions = self.positions(rank)
        document = torch.searchsorted(ends, positions, right=True) - 1
        return positions - ends[document]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The tokens of ``rank`` out of a full tensor, along ``dim`` (1; 0 where packed). Differentiable.

        Raises ValueError if ``x`` does not hold ``tokens`` tokens along ``dim``, TypeError if it is no plain tensor.
        """
        dim = plain_tensor("shard", x, dim)
        if x.shape[dim] != self.tokens:
            raise ValueError(f"shard: x holds {x.shape[dim]} tokens along dim {dim}, the layout {self.tokens}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(
        self, x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, *, partial_grad: bool = False
    ) -> Tensor:
        """Gather the full tensor out of every rank's shard. A collective, forward and backward; differentiable once.

        Args:
            x: this rank's tokens along ``dim``.
            group: the ranks; their number is ``ranks``.
            partial_grad: False takes the gradient of the full tensor to be the same on all ranks, and returns this
                rank's part of it. True takes the gradients of the ranks as summands. They travel in the dtype of ``x``;
                their owner adds them in rank order, in float32 (float64 for float64), and rounds the sum once.

        Raises ValueError if the shard or the group does not fit the layout, TypeError if ``x`` is no plain tensor.
        """
        rank, ranks = place_in("unshard", group)
        with refused_together("unshard", group, ranks):
            dim = plain_tensor("unshard", x, dim)
            if not isinstance(partial_grad, bool):
                raise TypeError(f"unshard: partial_grad must be True or False, got {shown(partial_grad)}")
            if ranks != self.ranks or x.shape[dim] != self.size(rank):
                raise ValueError(
                    f"unshard: rank {rank} of {ranks} has {x.shape[dim]} tokens along dim {dim}; the layout is for "
                    f"{self.ranks} ranks" + (f" and gives it {self.size(rank)}" if rank < self.ranks else "")
                )
        if ranks > 1:
            fields = (
                ("function", "unshard"),
                ("layout", self),
                ("dtype", x.dtype),
                ("requires_grad, partial_grad", (torch.is_grad_enabled() and x.requires_grad, partial_grad)),
                ("shape without tokens", tuple(size for axis, size in enumerate(x.shape) if axis != dim % x.ndim)),
            )
            group_state(group).agree("unshard", fields, wait=x.device.type == "cpu")
        return Unshard.apply(x.movedim(dim, 0), self, rank, group, partial_grad).movedim(0, dim)

    def local_mask(self, mask: Mask, q_rank: int, k_ranks: int | Sequence[int]) -> Mask:
        """The mask between the tokens of ``q_rank`` and those of ``k_ranks``, one after another, in local coordinates.

        It speaks the coordinates of a buffer that holds the keys of ``k_ranks`` in that order: nothing is re-ordered.
        Raises ValueError if the mask is not one of ``tokens`` x ``tokens``, or a rank is not one of the layout's.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"local_mask: mask must be a Mask, got {shown(mask)}")
        if (mask.queries, mask.keys) != (self.tokens, self.tokens):
            raise ValueError(f"the mask is {mask.queries} x {mask.keys}, the layout has {self.tokens} tokens")
        several = k_ranks if isinstance(k_ranks, Sequence) else (k_ranks,)
        return _local_mask(self, mask, whole("q_rank", q_rank), tuple(whole("k_ranks", rank) for rank in several))

    def _held(self, rank: int) -> tuple[range, ...]:
        if not 0 <= whole("rank", rank) < self.ranks:
            raise ValueError(f"rank {rank} is not one of the layout's {self.ranks}: they count from 0")
        return self.ranges_per_rank[rank]


@cached_plan
def _local_mask(layout: Layout, mask: Mask, q_rank: int, k_ranks: tuple[int, ...]) -> Mask:
    return mask_between(mask, layout._held(q_rank), [piece for rank in k_ranks for piece in layout._held(rank)])


def mask_between(mask: Mask, queries: Sequence[range], keys: Sequence[range]) -> Mask:
    """The mask between the tokens of some ranges and those of others, in the coordinates of the two buffers."""
    rows, columns = _placed(queries), _placed(keys)
    bands = []
    for q_offset, q_piece in rows:
        for band in mask.bands:
            if band.q_start >= q_piece.stop or band.q_stop <= q_piece.start:
                continue
            for k_offset, k_piece in columns:
                if band.k_start < k_piece.stop and band.k_stop > k_piece.start:
                    cut = band.pick(q_piece, k_piece)
                    if cut.area:
                        bands.append(cut.shift(q_offset, k_offset))
    return Mask(joined(bands), sum(len(p) for _, p in rows), sum(len(p) for _, p in columns))


def _placed(pieces: Sequence[range]) -> list[tuple[int, range]]:
    """(offset in the buffer, tokens) of each piece; pieces that go on where the one before ends are one."""
    placed: list[tuple[int, range]] = []
    end = 0
    for piece in pieces:
        offset, last = placed[-1] if placed else (0, range(0))
        if len(last) and last[-1] + last.step == piece.start and last.step == piece.step:
            placed[-1] = (offset, range(last.start, piece.stop, piece.step))
        else:
            placed.append((end, piece))
        end += len(piece)
    return placed


def _pieces(n: int, count: int) -> list[range]:
    small, larger = divmod(n, count)
    starts = [i * small + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def _check_ranges(ranges_per_rank: Any, tokens: int) -> None:
    """Raise unless each rank has a sequence of ranges, all inside 0 .. ``tokens`` - 1."""
    if not isinstance(ranges_per_rank, Sequence):
        raise TypeError(f"ranges_per_rank must be a list with a list of ranges by rank, got {shown(ranges_per_rank)}")
    if not ranges_per_rank:
        raise ValueError("ranges_per_rank must hold a list of ranges for each of one or more ranks, got []")
    for rank, ranges in enumerate(ranges_per_rank):
        if not isinstance(ranges, Sequence) or isinstance(ranges, range):
            raise TypeError(f"ranges_per_rank[{rank}] must be a list of ranges, got {shown(ranges)}: put it in a list")
        for place, piece in enumerate(ranges):
            name = f"ranges_per_rank[{rank}][{place}]"
            if not isinstance(piece, range):
                raise TypeError(f"{name} must be a range, got {shown(piece)}: write range(start, stop)")
            if piece and not (0 <= piece[0] < tokens and 0 <= piece[-1] < tokens):
                raise ValueError(f"{name} must lie inside the layout's {tokens} tokens, got {piece}")


def _check_partition(held: tuple[tuple[range, ...], ...], tokens: int, step: int) -> None:
    """Every token exactly once: in each residue class of the step the pieces must form one chain."""
    pieces = sorted(((piece, rank) for rank, ranges in enumerate(held) for piece in ranges), key=lambda x: x[0].start)
    expected = list(range(min(step, tokens)))  # per residue class, the next token that must come
    for piece, rank in pieces:
        due = expected[piece.start % step] if piece.start % step < len(expected) else None
        if piece.start != due or piece[-1] >= tokens:
            raise ValueError(
                f"a layout holds each of its {tokens} tokens once: {piece} of rank {rank} comes where "
                f"token {due} is due"
            )
        expected[piece.start % step] = piece[-1] + step
    missing = [token for token in expected if token < tokens]
    if missing:
        raise ValueError(f"a layout holds each of its {tokens} tokens once: no rank holds token {missing[0]}")
