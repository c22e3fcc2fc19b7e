"""Pack sequences that begin alike into one tree: the tokens that they share are computed once.

    0 1 2 3 4 5   trunk   branches
    0 1 2 3 6 7   0 1 2   3 4 5 | 3 6 7

A node is a run of tokens. Token 3 repeats: its next token differs, and a position has one label.

    tree = canon.trees.pack(sequences)
    logits = model(tree.token_ids[None], tree.position_ids[None])     with attention under tree.mask
    loss = canon.training.sequence_loss(logits[0], tree.labels, weights=tree.weights)

This loss is the mean over all tokens of all sequences, and with `sequence_weights` that over the
sequences' means. Attention gives each token the output that it has in its sequence alone, up to
rounding. Policy gradients and limits: paper/in_your_program.md#many-answers-to-one-prompt.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import overload

import numpy as np
import torch
from torch import Tensor

from canon.masks.arguments import plain_tensor, shown, whole
from canon.masks.mask import Mask
from canon.masks.mask_inputs import Ints, number_tensor

NO_LABEL = -100


@dataclass(frozen=True, eq=False)
class Tree:
    """Sequences packed into t positions. Tensors are (t,) and on the CPU. Gaps behind leaves have
    token 0, position 0, no label and weight 0.
    """

    token_ids: Tensor  # int64
    position_ids: Tensor  # int64, the place of each token in its sequences
    labels: Tensor  # int64, the next token; -100 after the last token of a sequence
    weights: Tensor  # float64, the number of sequences with this label
    sequence_weights: Tensor  # float64, the sum of 1 / (labels of the sequence)
    mask: Mask
    parents: tuple[int, ...]  # of each node; -1 for a root
    lengths: tuple[int, ...]  # tokens of each node, without gaps
    starts: tuple[int, ...]  # the first position of each node
    paths: tuple[tuple[int, ...], ...]  # the nodes of each sequence, from its root to its leaf

    def unpack(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        """Return the entries of each sequence from a tensor with the tree's t positions on ``dim``.
        Differentiable. Raises ValueError if ``x`` has no t entries there.
        """
        dim = plain_tensor("unpack", x, dim) % x.ndim
        if x.shape[dim] != len(self.token_ids):
            raise ValueError(
                f"unpack: x has {x.shape[dim]} entries along dim {dim}, the tree "
                f"{len(self.token_ids)}"
            )
        nodes = torch.tensor(
            [node for path in self.paths for node in path], dtype=torch.int64, device="cpu"
        )
        lengths, starts = (
            torch.tensor(x, dtype=torch.int64, device="cpu") for x in (self.lengths, self.starts)
        )
        size = lengths[nodes]
        rows = (starts[nodes] - size.cumsum(0) + size).repeat_interleave(size)
        rows += torch.arange(len(rows), device="cpu")
        # Indexing adds gradients of equal rows in a fixed order; `index_select` on a GPU does not.
        # The sum over many sequences is float32.
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.requires_grad else x
        taken = wide[(slice(None),) * dim + (rows.to(x.device),)].to(x.dtype)
        return list(
            taken.split([sum(self.lengths[node] for node in path) for path in self.paths], dim)
        )

    def weights_of(self, per_sequence: Iterable[float | Tensor]) -> Tensor:
        """Return the weight of each label, such as its advantage: the sum over the sequences that
        share it, float64 (t,).

        ``per_sequence``: for each sequence a number, or a tensor with a weight for each token. The
        sums may be 0 or below: pass the number of labels to the loss, as ``num_items_in_batch``.
        Raises TypeError or ValueError.
        """
        rows = self.unpack(torch.arange(len(self.token_ids), device="cpu"))
        given = list(per_sequence)
        if len(given) != len(rows):
            raise ValueError(
                f"weights_of: {len(given)} weights for {len(rows)} sequences: give one of each"
            )
        total = torch.zeros(len(self.token_ids), dtype=torch.float64, device="cpu")
        for place, (row, weight) in enumerate(zip(rows, given, strict=True)):
            if not isinstance(weight, Real | Tensor):
                raise TypeError(
                    f"per_sequence[{place}] must be a number or a tensor, got {shown(weight)}"
                )
            weight = torch.as_tensor(weight, dtype=torch.float64, device="cpu").detach()
            if weight.shape not in ((), row.shape):
                raise ValueError(
                    f"per_sequence[{place}] must be a number or ({len(row)},), got "
                    f"{tuple(weight.shape)}"
                )
            total[row] += weight
        return total.masked_fill(self.labels == NO_LABEL, 0)


@overload
def pack(sequences: Iterable[Ints], multiple_of: int = 1, max_tokens: None = None) -> Tree: ...
@overload
def pack(sequences: Iterable[Ints], multiple_of: int = 1, *, max_tokens: int) -> list[Tree]: ...
def pack(
    sequences: Iterable[Ints], multiple_of: int = 1, max_tokens: int | None = None
) -> Tree | list[Tree]:
    """Return the tree of token ids, or with ``max_tokens`` a list of trees of at most so many
    positions.

    Args:
        sequences: lists or tensors of one axis.
        multiple_of: branches begin at depths and positions that are multiples of this number. Up to
            ``multiple_of`` shared tokens then repeat in each branch, and a gap follows it.
        max_tokens: each tree then packs the next sequences as long as they fit, so `unpack` of tree
            after tree keeps the order.

    Two sequences part at the last multiple of ``multiple_of`` before their last shared token, so
    that its label is unique. Also a sequence that is the beginning of another has a leaf. Equal
    sequences have one path. Sequences of 0 or 1 tokens have no label, and count in no mean.
    Branches are sorted by their tokens. Cost: O(s log n) for n sequences of s tokens together.

    Raises TypeError for other types, and ValueError if ``multiple_of`` is below 1 or a sequence is
    longer than ``max_tokens``.
    """
    multiple_of = whole("multiple_of", multiple_of, 1)
    if not isinstance(sequences, Iterable):
        raise TypeError(
            f"sequences must be a list with the token ids of each sequence, got {shown(sequences)}"
        )
    tokens = (
        number_tensor(f"sequences[{place}]", ids).numpy() for place, ids in enumerate(sequences)
    )
    # the order of bytes is that of token ids >= 0
    keys = [ids.astype(">i8").tobytes() for ids in tokens]
    if max_tokens is None:
        return _tree(keys, multiple_of)
    return [
        _tree(keys[some], multiple_of)
        for some in _fitting(keys, multiple_of, whole("max_tokens", max_tokens, 1))
    ]


def _tokens(key: bytes) -> np.ndarray:
    return np.frombuffer(key, ">i8")


def _fork(one: bytes, other: bytes, multiple_of: int) -> int:
    size = min(len(one), len(other)) // 8
    differ = _tokens(one)[:size] != _tokens(other)[:size]
    shared = int(differ.argmax()) if differ.any() else size
    return max(0, shared - 1) // multiple_of * multiple_of


def _fitting(keys: list[bytes], multiple_of: int, most: int) -> Iterator[slice]:
    first, padded = 0, 0  # ``padded``: the positions of the tree, with a gap at its end
    held: list[bytes] = []  # sorted
    for place, key in enumerate(keys):
        if len(key) // 8 > most:
            raise ValueError(
                f"sequences[{place}] has {len(key) // 8} tokens, more than max_tokens={most}"
            )
        at = bisect_left(held, key)
        if key in held[at : at + 1]:
            continue
        own = -(-len(key) // 8 // multiple_of) * multiple_of
        shared = max(
            (_fork(key, other, multiple_of) for other in held[max(0, at - 1) : at + 1]), default=0
        )
        gap = -len(max([key, *held[-1:]])) // 8 % multiple_of
        if padded + own - shared - gap > most:
            yield slice(first, place)
            first, padded, shared, held = place, 0, 0, []
        padded += own - shared
        insort(held, key)
    if keys:
        yield slice(first, len(keys))


@dataclass
class _Nodes:
    """The nodes in depth-first order, and the path of each leaf."""

    parents: list[int]
    depths: list[tuple[int, int]]  # start and stop
    leaves: list[int]  # a leaf of the node's subtree
    paths: list[tuple[int, ...]]


def _nodes(leaves: list[bytes], multiple_of: int) -> _Nodes:
    """Return the nodes of different sequences, sorted: neighbours share most."""
    forks = [0, *(_fork(*both, multiple_of) for both in pairwise(leaves))][: len(leaves)]
    # of each leaf, the last leaf first: its fork, and where the nodes behind it stop
    cuts: list[list[int]] = []
    later: list[int] = []  # ascending: the forks at which later leaves part from this one
    for leaf, fork in zip(reversed(leaves), reversed(forks), strict=True):
        stops = [len(leaf) // 8]
        while later and later[-1] > fork:
            stops.append(later.pop())
        if later[-1:] != [fork]:
            later.append(fork)
        cuts.append([fork, *reversed(stops)])
    nodes, path = _Nodes([], [], [], []), []
    for leaf, depths in enumerate(reversed(cuts)):
        while path and nodes.depths[path[-1]][1] > depths[0]:
            path.pop()
        for both in pairwise(depths):
            nodes.parents.append(path[-1] if path else -1)
            nodes.leaves.append(leaf)
            path.append(len(nodes.depths))
            nodes.depths.append(both)
        nodes.paths.append(tuple(path))
    return nodes


def _tree(keys: list[bytes], multiple_of: int) -> Tree:
    counts = Counter(key for key in keys if key)
    leaves = sorted(counts)
    nodes = _nodes(leaves, multiple_of)
    lengths = [stop - start for start, stop in nodes.depths]
    starts, end = [], 0
    for length in lengths:
        starts.append(-(-end // multiple_of) * multiple_of)
        end = starts[-1] + length
    tokens, (ids, positions, labels) = list(map(_tokens, leaves)), np.zeros((3, end), np.int64)
    labels[:], weights = NO_LABEL, np.zeros((2, end))
    for (first, last), leaf, start, weight in zip(
        nodes.depths, nodes.leaves, starts, _weights(nodes, leaves, counts), strict=True
    ):
        place = slice(start, start + last - first)
        ids[place], positions[place] = tokens[leaf][first:last], np.arange(first, last)
        following = tokens[leaf][first + 1 : last + 1]
        labels[start : start + len(following)] = following
        weights[:, start : start + len(following)] = weight[:, None]
    path_of = dict(zip(leaves, nodes.paths, strict=True))
    return Tree(
        *map(torch.from_numpy, (ids, positions, labels, *weights)),
        Mask.tree(nodes.parents, lengths, starts),
        *map(tuple, (nodes.parents, lengths, starts)),
        tuple(path_of.get(key, ()) for key in keys),
    )


def _weights(nodes: _Nodes, leaves: list[bytes], counts: Counter[bytes]) -> np.ndarray:
    """Return the two weights of the labels of each node: sums over its sequences."""
    weights = np.zeros((len(nodes.parents), 2))
    for leaf, path in zip(leaves, nodes.paths, strict=True):
        weights[path[-1]] = counts[leaf], counts[leaf] / max(1, len(leaf) // 8 - 1)
    for node in reversed(range(len(nodes.parents))):
        if nodes.parents[node] >= 0:
            weights[nodes.parents[node]] += weights[node]
    return weights
