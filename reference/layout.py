"""A layout: the tokens that each rank holds, in their local order.

    12 tokens, 3 ranks       rank 0          rank 1          rank 2
    contiguous               0 1 2 3         4 5 6 7         8 9 10 11
    zigzag                   0 1  10 11      2 3  8 9        4 5  6 7
    striped                  0 3 6 9         1 4 7 10        2 5 8 11

Under a causal mask, contiguous shards are unbalanced. On W ranks the last one computes almost 2 W - 1 times the cells of
the first. Zigzag and striped shards have nearly equal areas: a zigzag rank holds an early piece, with few visible keys,
and a late piece, with many. Any number of tokens and ranks is supported, so shards may be uneven or empty.

A layout is the one source of four things that must agree: the shards of the data loader, the labels, the positions for
the rotary embedding, and the masks between ranks (`local_mask`).

Sources: zigzag, Zilin Zhu, ring-flash-attention issue 2 (2024); striped, Brandon et al., Striped Attention (2023).
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from canon.reference.arguments import place_in, plain_tensor, shown, whole
from canon.reference.group_state import group_state, refused_together
from canon.reference.layout_arguments import RangesPerRank, checked_ranges
from canon.reference.local_masks import mask_between
from canon.reference.mask import Mask
from canon.reference.mask_arguments import Ints, document_ends
from canon.reference.opaque import OpaqueMeta
from canon.reference.plan_cache import cached_plan
from canon.reference.unshard import Unshard


class Layout(metaclass=OpaqueMeta):
    """The tokens 0 .. ``tokens`` - 1, each on exactly one rank.

        Layout([[range(0, 2), range(6, 8)], [range(2, 6)]], 8)      rank 0: 0 1 6 7      rank 1: 2 3 4 5

    Args:
        ranges_per_rank: for each rank, its tokens as ranges in local order. All ranges have the same step.
        tokens: the length of the whole sequence.

    A layout is immutable, and compared and hashed by content.
    Raises ValueError if a token is missing or held twice, or the steps differ; TypeError if a piece is not a range.
    """

    __slots__ = ("__weakref__", "_digest", "_hash", "ranges_per_rank", "tokens")
    ranges_per_rank: RangesPerRank
    tokens: int

    def __init__(self, ranges_per_rank: Sequence[Sequence[range]], tokens: int):
        tokens = whole("tokens", tokens, 0)
        held = checked_ranges(ranges_per_rank, tokens)
        object.__setattr__(self, "ranges_per_rank", held)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "_hash", hash((held, tokens)))
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

    def __deepcopy__(self, memo):
        return self

    def __repr__(self) -> str:
        first = "; ".join(" ".join(f"{r.start}:{r.stop}:{r.step}" for r in held) for held in self.ranges_per_rank[:4])
        return f"Layout({self.tokens} tokens on {self.ranks} ranks: {first}{'; ...' if self.ranks > 4 else ''})"

    # ------------------------------------------------------------------ constructors
    @classmethod
    def contiguous(cls, n: int, ranks: int) -> "Layout":
        """Return one piece of n tokens for each rank. Sizes differ by at most 1; larger ones come first."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[piece] for piece in _pieces(n, ranks)], n)

    @classmethod
    def zigzag(cls, n: int, ranks: int) -> "Layout":
        """Return a layout of 2 ``ranks`` pieces of n tokens: rank r holds the pieces r and 2 ``ranks`` - 1 - r.

        Under a causal mask an early piece sees few keys and a late one many, so all ranks compute nearly the same area.
        """
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        pieces = _pieces(n, 2 * ranks)
        return cls([[pieces[r], pieces[2 * ranks - 1 - r]] for r in range(ranks)], n)

    @classmethod
    def striped(cls, n: int, ranks: int) -> "Layout":
        """Return a layout in which rank r holds the tokens r, r + ``ranks``, r + 2 ``ranks``, ... below n."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[range(r, n, ranks)] for r in range(ranks)], n)

    # ------------------------------------------------------------------ properties and methods
    @property
    def digest(self) -> str:
        """SHA-256 of the content, as hexadecimal digits. Equal layouts have equal digests in every process."""
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
        """The memory of the layout on the host, in bytes (an estimate)."""
        return 200 + 200 * sum(map(len, self.ranges_per_rank))

    def size(self, rank: int) -> int:
        """Return the number of tokens that ``rank`` holds. Raises ValueError if there is no such rank."""
        return sum(map(len, self._held(rank)))

    def positions(self, rank: int) -> Tensor:
        """Return the position of each local token in the whole sequence: int64 [t], on the CPU.

        ``Layout.zigzag(8, 2).positions(0)`` is ``[0, 1, 6, 7]``. Raises ValueError if there is no such rank.
        """
        pieces = [torch.arange(r.start, r.stop, r.step, device="cpu") for r in self._held(rank)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")

    def document_positions(self, rank: int, cu_seqlens: Ints) -> Tensor:
        """Return the position of each local token in its own document, for the rotary embedding: int64 [t], on the CPU.

        With ``cu_seqlens=[0, 3, 8]``, rank 0 of ``Layout.zigzag(8, 2)`` gets ``[0, 1, 3, 4]``.
        Raises ValueError or TypeError if ``cu_seqlens`` is malformed or does not end at ``tokens``.
        """
        ends = torch.tensor(document_ends(cu_seqlens), device="cpu")
        if ends[-1] != self.tokens:
            raise ValueError(f"cu_seqlens ends at {ends[-1]}, the layout has {self.tokens} tokens")
        positions = self.positions(rank)
        document = torch.searchsorted(ends, positions, right=True) - 1
        return positions - ends[document]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the tokens of ``rank``, in local order, from a full tensor. Differentiable.

        Args: ``x``, any tensor with ``tokens`` entries along ``dim``; ``dim``, 1 for (b, s, ...), 0 for packed tensors.
        Raises ValueError if ``x`` does not have ``tokens`` entries along ``dim``, TypeError if it is not a plain tensor.
        """
        dim = plain_tensor("shard", x, dim)
        if x.shape[dim] != self.tokens:
            raise ValueError(f"shard: x holds {x.shape[dim]} tokens along dim {dim}, the layout {self.tokens}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(
        self, x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, *, partial_grad: bool = False
    ) -> Tensor:
        """Gather the full tensor from the shards of all ranks. A collective, forward and backward; differentiable once.

        Args:
            x: this rank's tokens along ``dim``.
            group: the ranks; their number is ``ranks``.
            partial_grad: with False, the gradient of the full tensor must be equal on all ranks. Each rank takes its own
                part and sends nothing. With True, the gradients of the ranks are summands. They travel in the dtype of
                ``x``. The owner adds them in rank order, in float32 (float64 for float64), and rounds the sum once.

        Raises ValueError if the shard or the group does not fit the layout, TypeError if ``x`` is not a plain tensor.
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
        """Return the mask between the queries of ``q_rank`` and the keys of ``k_ranks``, in local coordinates. Cached.

        Row i is the i-th token of ``q_rank``. Column j is the j-th row of a buffer that holds the keys of ``k_ranks`` one
        rank after another, each in local order. So a ring step or an all-gather needs no reordering.
        ``Layout.zigzag(8, 2).local_mask(Mask.causal(8), 0, 1)`` has tokens 0 1 6 7 as rows and 2 3 4 5 as columns: rows 2
        and 3 see all keys.

        Raises ValueError if the mask is not ``tokens`` x ``tokens``, or a rank is not one of the layout's.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"local_mask: mask must be a Mask, got {shown(mask)}")
        if (mask.queries, mask.keys) != (self.tokens, self.tokens):
            raise ValueError(f"the mask is {mask.queries} x {mask.keys}, the layout has {self.tokens} tokens")
        several = k_ranks if isinstance(k_ranks, Sequence) else (k_ranks,)
        return _local_mask(self, mask, whole("q_rank", q_rank), tuple(whole("k_ranks", rank) for rank in several))

    def _held(self, rank: int) -> tuple[range, ...]:
        """Return the ranges of a rank."""
        if not 0 <= whole("rank", rank) < self.ranks:
            raise ValueError(f"rank {rank} is not one of the layout's {self.ranks}: they count from 0")
        return self.ranges_per_rank[rank]


@cached_plan
def _local_mask(layout: Layout, mask: Mask, q_rank: int, k_ranks: tuple[int, ...]) -> Mask:
    keys = [piece for rank in k_ranks for piece in layout._held(rank)]
    return mask_between(mask, layout._held(q_rank), keys)


def _pieces(n: int, count: int) -> list[range]:
    """Return n tokens as ``count`` ranges. Sizes differ by at most 1; larger ones come first."""
    small, larger = divmod(n, count)
    starts = [i * small + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
