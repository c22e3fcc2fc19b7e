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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from canon.masks.arguments import plain_tensor, shown, whole
from canon.masks.held_tokens import HeldTokens, positions_on
from canon.masks.local_masks import mask_between
from canon.masks.mask import Mask
from canon.masks.mask_inputs import Ints
from canon.masks.opaque import OpaqueMeta
from canon.masks.plan_cache import cached_plan

if TYPE_CHECKING:
    from canon.runtime.group_arguments import Group

TILE = 128  # tokens along each side of a tile of the reference, and the unit of rank-invariant layouts


class Layout(HeldTokens, metaclass=OpaqueMeta):
    """The tokens 0 .. ``tokens`` - 1, each on exactly one rank.

        Layout([[range(0, 2), range(6, 8)], [range(2, 6)]], 8)      rank 0: 0 1 6 7      rank 1: 2 3 4 5

    Args:
        ranges_per_rank: for each rank, its tokens as ranges in local order. All ranges have the same step.
        tokens: the length of the whole sequence.

    A layout is immutable, and compared and hashed by content.
    Raises ValueError if a token is missing or held twice, or the steps differ; TypeError if a piece is not a range.
    """

    __slots__ = ("__weakref__",)

    # ------------------------------------------------------------------ constructors
    @classmethod
    def contiguous(cls, n: int, ranks: int, multiple_of: int = 1) -> "Layout":
        """Return one piece of n tokens for each rank; larger ones come first.

        Pieces begin at multiples of ``multiple_of`` tokens; rank-invariant attention needs 128. Their sizes differ by at
        most 2 ``multiple_of`` - 1, and by at most 1 by default. ``contiguous(300, 2, 128)`` has the pieces 0:256, 256:300.
        """
        n, ranks, multiple_of = whole("n", n, 0), whole("ranks", ranks, 1), whole("multiple_of", multiple_of, 1)
        return cls([[piece] for piece in _pieces(n, ranks, multiple_of)], n)

    @classmethod
    def zigzag(cls, n: int, ranks: int, multiple_of: int = 1) -> "Layout":
        """Return a layout of 2 ``ranks`` pieces of n tokens: rank r holds the pieces r and 2 ``ranks`` - 1 - r.

        Under a causal mask an early piece sees few keys and a late one many, so all ranks compute nearly the same area.
        Pieces begin at multiples of ``multiple_of`` tokens, as in `contiguous`.
        """
        n, ranks, multiple_of = whole("n", n, 0), whole("ranks", ranks, 1), whole("multiple_of", multiple_of, 1)
        pieces = _pieces(n, 2 * ranks, multiple_of)
        return cls([[pieces[r], pieces[2 * ranks - 1 - r]] for r in range(ranks)], n)

    @classmethod
    def striped(cls, n: int, ranks: int) -> "Layout":
        """Return a layout in which rank r holds the tokens r, r + ``ranks``, r + 2 ``ranks``, ... below n."""
        n, ranks = whole("n", n, 0), whole("ranks", ranks, 1)
        return cls([[range(r, n, ranks)] for r in range(ranks)], n)

    # ------------------------------------------------------------------ operations
    def document_positions(self, rank: int, cu_seqlens: Ints) -> Tensor:
        """Return the position of each local token in its own document, for the rotary embedding: int64 [t], on the CPU.

        With ``cu_seqlens=[0, 3, 8]``, rank 0 of ``Layout.zigzag(8, 2)`` gets ``[0, 1, 3, 4]``.
        Raises ValueError or TypeError if ``cu_seqlens`` is malformed or does not end at ``tokens``.
        """
        from canon.runtime.layout_batches import document_positions, ends_of

        return document_positions(self, rank, ends_of(self, cu_seqlens))

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the tokens of ``rank``, in local order, from a full tensor. Differentiable.

        Args: ``x``, any tensor with ``tokens`` entries along ``dim``; ``dim``, 1 for (b, s, ...), 0 for packed tensors.
        Raises ValueError if ``x`` does not have ``tokens`` entries along ``dim``, TypeError if it is not a plain tensor.
        """
        dim = plain_tensor("shard", x, dim)
        if x.shape[dim] != self.tokens:
            raise ValueError(f"shard: x holds {x.shape[dim]} tokens along dim {dim}, the layout {self.tokens}")
        return x.index_select(dim, positions_on(self, rank, x.device))

    def shard_batch(self, batch: Mapping[str, Tensor], rank: int, cu_seqlens: Ints | None = None) -> dict[str, Tensor]:
        """Return the tokens of ``rank`` from each entry of a training batch, with positions and shifted labels.

        Args:
            batch: tensors (b, n, ...) of the whole sequence, with all n = ``tokens`` tokens on dim 1, by name: ``input_ids``,
                ``labels``, ``position_ids``, and any others. Entries without tokens, as a 4-D attention mask, raise.
            cu_seqlens: 0, then the end of each document, for all b sequences. None: a document starts where
                ``position_ids`` is 0, or without this entry the sequence is one document.

        Returns:
            The rank's part of all entries, on their devices, and of two more unless given. ``position_ids`` (b, t) start at 0
            in each document. ``shift_labels`` (b, t), for ``labels`` (b, n), have the label of the next token, -100 at the
            end of each document.

        Raises ValueError for an entry of another shape, TypeError for one that is not a plain tensor. Both name it.
        """
        from canon.runtime.layout_batches import sharded_batch

        return sharded_batch(self, batch, rank, cu_seqlens)

    def unshard(self, x: Tensor, group: "Group" = None, dim: int = 1, *, partial_grad: bool = False) -> Tensor:
        """Gather the full tensor from the shards of all ranks. A collective, forward and backward; differentiable once.

        Args:
            x: this rank's tokens along ``dim``.
            group: a ProcessGroup or a DeviceMesh of one dimension, with ``ranks`` ranks; None is all ranks.
            partial_grad: with False, the gradient of the full tensor must be equal on all ranks. Each rank takes its own
                part and sends nothing. With True, the gradients of the ranks are summands. They travel in the dtype of
                ``x``. The owner adds them in rank order, in float32 (float64 for float64), and rounds the sum once.

        Raises ValueError if the shard or the group does not fit the layout, TypeError if ``x`` is not a plain tensor.
        """
        from canon.runtime.layout_collectives import unsharded

        return unsharded(self, x, group, dim, partial_grad)

    def redistribute(self, x: Tensor, to: "Layout", *, group: "Group" = None, dim: int = 1) -> Tensor:
        """Return this rank's tokens in the layout ``to`` from its tokens in this layout. A collective; differentiable.

        One all-to-all moves the tokens; no rank holds the full tensor. The backward pass moves gradients back, so every rank
        must call it. ``Layout.contiguous(8, 2).redistribute(x, Layout.zigzag(8, 2))`` has the tokens 0 1 6 7 on rank 0.

        Args: ``x``, this rank's tokens along ``dim``; ``to``, a layout of as many tokens and ranks; ``group``, as in `unshard`.
        Raises ValueError or TypeError on every rank if the arguments of a rank do not fit or differ from those of others.
        """
        from canon.runtime.layout_collectives import redistributed

        return redistributed(self, x, to, group, dim)

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


@cached_plan
def _local_mask(layout: Layout, mask: Mask, q_rank: int, k_ranks: tuple[int, ...]) -> Mask:
    keys = [piece for rank in k_ranks for piece in layout._held(rank)]
    return mask_between(mask, layout._held(q_rank), keys)


def _pieces(n: int, count: int, multiple_of: int) -> list[range]:
    """Return n tokens as ``count`` ranges that begin at multiples of ``multiple_of``. Larger ones come first."""
    small, larger = divmod(-(-n // multiple_of), count)
    starts = [min(n, (i * small + min(i, larger)) * multiple_of) for i in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
