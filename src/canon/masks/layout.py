"""A layout: the tokens that each rank holds, in their local order.

    12 tokens, 3 ranks   rank 0       rank 1      rank 2
    contiguous           0 1 2 3      4 5 6 7     8 9 10 11
    zigzag               0 1  10 11   2 3  8 9    4 5  6 7
    striped              0 3 6 9      1 4 7 10    2 5 8 11
    zigzag_documents     0 5  6 11    1 4  7 10   2 3  8 9        of two documents of 6 tokens

Under a causal mask, zigzag and striped shards have nearly equal areas.

Sources: zigzag, Zilin Zhu, ring-flash-attention issue 2 (2024); striped, Brandon et al., Striped
Attention (2023).
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canon.masks.arguments import list_of, plain_tensor, shown, whole
from canon.masks.band import Band, IntervalIndex, joined, picked
from canon.masks.cuts import note_cut, note_possible
from canon.masks.immutable import Immutable, write
from canon.masks.mask import Mask
from canon.masks.mask_inputs import Ints, RangesPerRank, checked_ranges, document_ends
from canon.masks.plan_cache import cached_plan, keep_for_stream

if TYPE_CHECKING:
    from canon.ranks.group import Group

TILE = 128  # tokens along each side of a tile of the reference


class Layout(Immutable):
    """The tokens 0 .. ``tokens`` - 1, each on exactly one rank. Immutable, compared and hashed by
    content.

        Layout([[range(0, 2), range(6, 8)], [range(2, 6)]], 8)  # rank 0: 0 1 6 7, rank 1: 2 3 4 5

    Raises ValueError if a token is missing or held twice, or steps differ.
    """

    __slots__ = ("_planned_for", "ranges_per_rank", "tokens")
    ranges_per_rank: RangesPerRank
    tokens: int

    def __init__(self, ranges_per_rank: Sequence[Sequence[range]], tokens: int):
        tokens = whole("tokens", tokens, 0)
        held = checked_ranges(ranges_per_rank, tokens)
        self._remember((held, tokens))
        write(self, "ranges_per_rank", held)
        write(self, "tokens", tokens)
        write(self, "_planned_for", None)  # the mask of `dispatch`

    def __reduce__(self):
        return self._unpickled, self._content

    @classmethod
    def _unpickled(cls, ranges_per_rank: RangesPerRank, tokens: int) -> "Layout":
        layout = cls(ranges_per_rank, tokens)
        note_possible(layout)  # it may have divided tensors in another process
        return layout

    @classmethod
    def contiguous(cls, n: int, ranks: int, multiple_of: int = 1) -> "Layout":
        """Return one piece for each rank, larger ones first. Pieces begin at multiples of
        ``multiple_of`` tokens.
        """
        return cls([[piece] for piece in _pieces(n, whole("ranks", ranks, 1), multiple_of)], n)

    @classmethod
    def zigzag(cls, n: int, ranks: int, multiple_of: int = 1) -> "Layout":
        """Return the layout in which rank r holds the pieces r and 2 ``ranks`` - 1 - r of 2
        ``ranks``.
        """
        pieces = _pieces(n, 2 * whole("ranks", ranks, 1), multiple_of)
        return cls([[pieces[rank], pieces[-1 - rank]] for rank in range(ranks)], n)

    @classmethod
    def zigzag_documents(cls, cu_seqlens: Ints, ranks: int) -> "Layout":
        """Return the layout that divides each document as `zigzag` does. ``cu_seqlens``: 0, then
        the end of each document. Raises ValueError if it decreases.

        Source: Zilin Zhu, ring-flash-attention, `zigzag_ring_flash_attn_varlen_func`.
        """
        ends, ranks = document_ends(cu_seqlens), whole("ranks", ranks, 1)
        held: list[list[range]] = [[] for _ in range(ranks)]
        for start, stop in pairwise(ends):
            pieces = _pieces(stop - start, 2 * ranks, first=start)
            for rank, own in enumerate(held):
                own += [pieces[rank], pieces[-1 - rank]]
        return cls(held, ends[-1])

    @classmethod
    def striped(cls, n: int, ranks: int) -> "Layout":
        """Return the layout in which rank r holds every token r + i ``ranks``."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[range(r, n, ranks)] for r in range(ranks)], n)

    @classmethod
    def concat(cls, layouts: Sequence["Layout"]) -> "Layout":
        """Return the layout of independent sequences, one after another.

        Raises ValueError if ranks or steps differ.
        """
        layouts = list_of("layouts", layouts, cls)
        if len({layout.ranks for layout in layouts}) != 1:
            numbers = ", ".join(str(layout.ranks) for layout in layouts)
            raise ValueError(
                f"concat needs layouts of one number of ranks, got {numbers or 'no layout'}"
            )
        held, tokens = [[] for _ in layouts[0].ranges_per_rank], 0
        for layout in layouts:
            for own, ranges in zip(held, layout.ranges_per_rank, strict=True):
                own += [range(tokens + r.start, tokens + r.stop, r.step) for r in ranges]
            tokens += layout.tokens
        together = cls(held, tokens)
        note_possible(together)  # the tensors of each sequence were divided
        return together

    def __repr__(self) -> str:
        first = "; ".join(
            " ".join(f"{r.start}:{r.stop}:{r.step}" for r in held)
            for held in self.ranges_per_rank[:4]
        )
        return (
            f"Layout({self.tokens} tokens on {self.ranks} ranks: "
            f"{first}{'; ...' if self.ranks > 4 else ''})"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the content in hexadecimal, equal in every process."""
        if self._digest is None:
            digest = hashlib.sha256(repr(self._content).encode()).hexdigest()
            write(self, "_digest", digest)
        return self._digest

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranges_per_rank)

    @property
    def nbytes(self) -> int:
        """Bytes on the host (an estimate)."""
        return 200 + 200 * sum(map(len, self.ranges_per_rank))

    def size(self, rank: int) -> int:
        """Return the number of tokens that ``rank`` holds."""
        return sum(map(len, self._held(rank)))

    def positions(self, rank: int) -> Tensor:
        """Return the position of each local token in the sequence: int64 [t], on the CPU."""
        note_possible(self)  # as an index
        pieces = [torch.arange(r.start, r.stop, r.step, device="cpu") for r in self._held(rank)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def _held(self, rank: int) -> tuple[range, ...]:
        if not 0 <= whole("rank", rank) < self.ranks:
            raise ValueError(
                f"rank {rank} is not one of the layout's {self.ranks}: they count from 0"
            )
        return self.ranges_per_rank[rank]

    def document_positions(self, rank: int, cu_seqlens: Ints | Mask) -> Tensor:
        """Return the position of each local token in its own document: int64 [t], on the CPU.
        ``cu_seqlens``: as in `shard_batch`. Raises ValueError unless it ends at ``tokens``.
        """
        from canon.ranks.movement import document_positions, ends_of

        return document_positions(self, rank, ends_of(self, cu_seqlens))

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the tokens of ``rank`` from a full tensor with its tokens on ``dim``.
        Differentiable. Raises ValueError if ``x`` does not have ``tokens`` entries there.
        """
        dim = plain_tensor("shard", x, dim)
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"shard: x holds {x.shape[dim]} tokens along dim {dim}, the layout {self.tokens}"
            )
        note_cut(self, rank)
        return x.index_select(dim, positions_on(self, rank, x.device))

    def shard_batch(
        self,
        batch: Mapping[str, Tensor],
        rank: int,
        cu_seqlens: Ints | Mask | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Return the tokens of ``rank`` from each entry of a batch, with positions and shifted
        labels.

        Args:
            batch: tensors (b, n, ...) by name, with all tokens on dim 1: ``input_ids``, ``labels``,
                ``position_ids``, others.
            cu_seqlens: 0, then the end of each document. A Mask: documents start where a token does
                not see the one before it. None: they start where ``position_ids`` is 0.
            dims: the dim of the tokens in other entries by name, such as ``{"position_ids": 2}``
                for positions (3, b, n) of a vision model, which need ``cu_seqlens``.

        ``position_ids`` (b, t) are added unless given. So are ``shift_labels`` (b, t) if there are
        ``labels``: the label of the next token, -100 at the end of each document. Raises ValueError
        or TypeError for an entry of another shape or type, and where `Mask.from_position_ids`
        refuses them.
        """
        from canon.ranks.movement import sharded_batch

        return sharded_batch(self, batch, rank, cu_seqlens, dims)

    def unshard(
        self, x: Tensor, group: "Group" = None, dim: int = 1, *, partial_grad: bool = False
    ) -> Tensor:
        """Gather the full tensor from the shards of all ranks. A collective in both passes;
        differentiable once.

        Args:
            x: this rank's tokens along ``dim``.
            group: of ``ranks`` ranks, as in `canon.faces`; None is all ranks.
            partial_grad: False: the gradient must be equal on all ranks. Nothing is sent. True: the
                owner of a token adds the gradients of the ranks in rank order, in float32 (float64
                for float64), and rounds once.

        Raises ValueError if the shard or the group does not fit the layout.
        """
        from canon.ranks.movement import unsharded

        return unsharded(self, x, group, dim, partial_grad)

    def redistribute(
        self, x: Tensor, to: "Layout", *, group: "Group" = None, dim: int = 1
    ) -> Tensor:
        """Return this rank's tokens in the layout ``to`` from its tokens in this layout, by one
        all-to-all. A collective in both passes; differentiable.

        Raises ValueError or TypeError on every rank if arguments do not fit or differ between
        ranks.
        """
        from canon.ranks.movement import redistributed

        return redistributed(self, x, to, group, dim)

    def local_mask(self, mask: Mask, q_rank: int, k_ranks: int | Sequence[int]) -> Mask:
        """Return the mask between the local queries of ``q_rank`` and the local keys of
        ``k_ranks``, rank after rank. Cached. Raises ValueError if the mask or a rank does not fit.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"local_mask: mask must be a Mask, got {shown(mask)}")
        check_size(mask, self)
        several = k_ranks if isinstance(k_ranks, Sequence) else (k_ranks,)
        return _local_mask(
            self, mask, whole("q_rank", q_rank), tuple(whole("k_ranks", rank) for rank in several)
        )

    def divided(self, heads: int) -> "Layout":
        """Return the layout in which ``heads`` neighbouring ranks share the tokens of one rank, in
        order, in nearly equal parts.

        For a mesh ("tokens", "heads"): ``dispatch(mask, rows).divided(heads)``.
        """
        from canon.masks.rows import divided

        parts = divided(self, heads)
        write(parts, "_planned_for", self._planned_for)
        return parts

    def plot(self, mask: Mask | None = None):
        """Draw the rows of a mask, by default causal, in the colours of their ranks. Return the
        figure. Raises ValueError if the mask does not fit, ModuleNotFoundError without matplotlib.
        """
        from canon.show.layout_figures import plot_layout

        return plot_layout(self, mask)


def check_size(mask: Mask, layout: Layout, name: str = "the mask") -> None:
    """Raise ValueError unless the mask is over the layout's tokens."""
    if (mask.queries, mask.keys) != (layout.tokens, layout.tokens):
        raise ValueError(
            f"{name} is {mask.queries} x {mask.keys}, the layout has {layout.tokens} tokens"
        )


def positions_on(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Return `Layout.positions` on a device, from the cache, for reading."""
    layout._held(rank)  # raises for a wrong rank, before it becomes a key
    if torch.compiler.is_compiling():  # a graph holds its own positions
        return layout.positions(rank).to(device)
    positions = _positions_on(layout, rank, device)
    keep_for_stream(positions)
    return positions


@cached_plan
def _positions_on(layout: Layout, rank: int, device: torch.device) -> Tensor:
    return layout.positions(rank).to(device)


@cached_plan
def _local_mask(layout: Layout, mask: Mask, q_rank: int, k_ranks: tuple[int, ...]) -> Mask:
    keys = [piece for rank in k_ranks for piece in layout._held(rank)]
    return mask_between(mask, layout._held(q_rank), keys)


def _pieces(n: int, count: int, multiple_of: int = 1, first: int = 0) -> list[range]:
    n, multiple_of = whole("n", n, 0), whole("multiple_of", multiple_of, 1)
    small, larger = divmod(-(-n // multiple_of), count)
    ends = [first + min(n, (i * small + min(i, larger)) * multiple_of) for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def equal_parts(pieces: Sequence[range], count: int) -> list[list[range]]:
    """Divide ranges into ``count`` lists of nearly as many tokens, larger ones first."""
    smaller, larger = divmod(sum(map(len, pieces)), count)
    left, piece = iter(pieces), range(0)
    parts: list[list[range]] = []
    for part in range(count):
        parts.append([])
        size = smaller + (part < larger)
        while size:
            piece = piece or next(left)
            parts[-1].append(piece[:size])
            piece, size = piece[size:], size - len(parts[-1][-1])
    return parts


def mask_between(mask: Mask, queries: Sequence[range], keys: Sequence[range]) -> Mask:
    """Return the mask between two buffers that hold these ranges of tokens. All have one step >= 1.

    Cost: O(r log n + c log c) for r query ranges, n bands and c crops, if the bands of a range are
    neighbours.
    """
    rows, columns = placed(queries), sorted(placed(keys), key=lambda placed: placed[1].start)
    index = IntervalIndex([(piece.start, piece.stop) for _, piece in columns])
    bands: list[Band] = []
    for q_offset, q_piece in rows:
        touching: defaultdict[int, list[Band]] = defaultdict(list)  # by place in ``columns``
        for band in mask.bands_near(q_piece):
            near = index.near(band.k_start, band.k_stop)
            for place in range(near.start, near.stop):
                touching[place].append(band)
        for place, some in touching.items():
            k_offset, k_piece = columns[place]
            bands += picked(some, q_piece, k_piece, q_offset, k_offset)
    return mask.of_disjoint(joined(bands), sum(map(len, queries)), sum(map(len, keys)))


def placed(pieces: Sequence[range]) -> list[tuple[int, range]]:
    """Return (first row, tokens) of each piece in a buffer, joined where one continues another."""
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
