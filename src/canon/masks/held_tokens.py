"""The tokens that each rank holds: storage, content and positions. `Layout` adds constructors and operations on tensors.

Positions are also kept on the devices of the tensors that they index (`positions_on`), in the cache of plans.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from canon.masks.arguments import whole
from canon.masks.layout_arguments import RangesPerRank, checked_ranges
from canon.masks.plan_cache import cached_plan, keep_for_stream


class HeldTokens:
    """The tokens 0 .. ``tokens`` - 1, each on exactly one rank: the part of a `Layout` without operations on tensors."""

    __slots__ = ("_digest", "_hash", "ranges_per_rank", "tokens")
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
        if not isinstance(other, HeldTokens):
            return NotImplemented
        mine, others = ((x._hash, x.tokens, x.ranges_per_rank) for x in (self, other))
        return self is other or mine == others

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return type(self), (self.ranges_per_rank, self.tokens)

    def __repr__(self) -> str:
        first = "; ".join(" ".join(f"{r.start}:{r.stop}:{r.step}" for r in held) for held in self.ranges_per_rank[:4])
        return f"Layout({self.tokens} tokens on {self.ranks} ranks: {first}{'; ...' if self.ranks > 4 else ''})"

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

    def _held(self, rank: int) -> tuple[range, ...]:
        """Return the ranges of a rank."""
        if not 0 <= whole("rank", rank) < self.ranks:
            raise ValueError(f"rank {rank} is not one of the layout's {self.ranks}: they count from 0")
        return self.ranges_per_rank[rank]


def positions_on(layout: HeldTokens, rank: int, device: torch.device) -> Tensor:
    """Return `HeldTokens.positions` on a device, from the cache. Do not change the tensor."""
    layout._held(rank)  # raises for a wrong rank, before it becomes a key
    if torch.compiler.is_compiling():  # a graph holds its own positions, because torch.compile does not trace the cache
        return layout.positions(rank).to(device)
    positions = _positions_on(layout, rank, device)
    keep_for_stream(positions)
    return positions


@cached_plan
def _positions_on(layout: HeldTokens, rank: int, device: torch.device) -> Tensor:
    return layout.positions(rank).to(device)
