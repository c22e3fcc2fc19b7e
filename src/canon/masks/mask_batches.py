"""The constructors of `Mask` for one sequence or a batch. A batch of b sequences gives a tuple of b masks.

    Mask.from_position_ids(position_ids)      packed documents, as data collators describe them
    Mask.padding(lengths, n)                  sequences of different lengths
    Mask.block_causal(blocks, ...)            blocks of tokens that see each other and earlier blocks

Arguments are sequences or tensors, (n,) or (b, n). A tensor on a GPU is copied to the CPU once.
"""

from canon.masks.arguments import flag, whole, whole_numbers
from canon.masks.band import Band
from canon.masks.block_causal import bands_of_levels, levels
from canon.masks.mask_cells import M, MaskCells
from canon.masks.mask_inputs import Ints, Rows, block_ids, by_sequence, document_bands, position_ends


class MaskBatches(MaskCells):
    """The constructors of `Mask` that accept a batch."""

    __slots__ = ()

    @classmethod
    def from_position_ids(cls: type[M], position_ids: Ints | Rows) -> M | tuple[M, ...]:
        """Return the mask of packed documents, causal in each, from positions that restart at 0 at each document.

            from_position_ids([0, 1, 0, 1, 2])      equals documents([0, 2, 5])

        Args: ``position_ids`` of the whole sequence: (n,) gives a mask, (b, n) a tuple of b masks.
        Raises ValueError unless each position is 0 or one more than the position before it; TypeError for wrong types.
        """
        ends, several = position_ends(position_ids)
        masks = tuple(cls.of_disjoint(document_bands(e, True, None)[0], e[-1], e[-1]) for e in ends)
        return masks if several else masks[0]

    @classmethod
    def padding(cls: type[M], lengths: Ints, n: int, causal: bool = True) -> tuple[M, ...]:
        """Return one n x n mask for each length. Tokens from the length on are padding: they see nothing and are not seen.

            padding([2, 3], 4)      x . . .      x . . .
                                    x x . .      x x . .
                                    . . . .      x x x .
                                    . . . .      . . . .

        Args: ``lengths``, the number of tokens before the padding of each sequence; ``causal``, hide later tokens.
        For padding on the left use `block_causal` with ``q_valid`` and ``k_valid``.
        Raises ValueError unless all lengths are in 0..n; TypeError for wrong types.
        """
        n, high = whole("n", n, 0), 0 if flag("causal", causal) else None
        masks = []
        for place, length in enumerate(whole_numbers("lengths", lengths)):
            if not 0 <= length <= n:
                raise ValueError(f"lengths[{place}] must be in 0..{n}, the tokens of a sequence, got {length}")
            masks.append(cls.of_disjoint([Band(0, length, 0, length, None, high)] if length else [], n, n))
        return tuple(masks)

    @classmethod
    def block_causal(
        cls: type[M],
        q_blocks: Ints | Rows,
        k_blocks: Ints | Rows | None = None,
        q_valid: Ints | Rows | None = None,
        k_valid: Ints | Rows | None = None,
    ) -> M | tuple[M, ...]:
        """Return the mask in which query i sees key j iff both are valid and k_blocks[j] <= q_blocks[i].

            block_causal([0, 0, 1, 1])      x x . .
                                            x x . .
                                            x x x x
                                            x x x x

        Args:
            q_blocks, k_blocks: a block id for each query and each key, in any order. Keys have the ids of the queries by
                default. A different id for each token, ascending, is causal. One id for all tokens is full.
            q_valid, k_valid: a boolean for each query and each key. All are valid by default.

        If an argument is (b, n), the result is a tuple of b masks, and arguments (n,) serve all of them. For the
        ``pad_masks`` and ``att_masks`` of pi0, `make_att_2d_masks` is
        ``block_causal(att_masks.cumsum(1), q_valid=pad_masks, k_valid=pad_masks)``.

        Equal cells make equal masks. Ascending ids in r runs make up to r bands, random ids about r^2 / 9 (see
        `canon.masks.block_causal`). So random ids for every token are expensive.
        Raises ValueError if ids and validity differ in length, arguments in their number of sequences, or a validity is
        neither 0 nor 1.
        """
        batch = by_sequence(q_blocks=q_blocks, k_blocks=k_blocks, q_valid=q_valid, k_valid=k_valid)
        if batch is not None:
            return tuple(cls.of_disjoint(*_block_bands(**one)) for one in batch)
        return cls.of_disjoint(*_block_bands(q_blocks, k_blocks, q_valid, k_valid))


def _block_bands(
    q_blocks: Ints, k_blocks: Ints | None, q_valid: Ints | None, k_valid: Ints | None
) -> tuple[list[Band], int, int]:
    """Return the bands of the block-causal mask of one sequence, and its numbers of queries and keys."""
    q_ids, q_flags = block_ids("q", q_blocks, q_valid)
    k_ids, k_flags = block_ids("k", q_blocks if k_blocks is None else k_blocks, k_valid)
    return bands_of_levels(*levels(q_ids, k_ids, q_flags, k_flags)), len(q_ids), len(k_ids)
