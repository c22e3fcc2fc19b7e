"""Record what a ring of `canon.reference` sends and computes, and require that every hop and every
mask has the right owner.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from canon.route.call import Call


@dataclass(frozen=True)
class SentHop:
    """A message of a ring, in the order of its sender. By its ``step`` the ``tensors`` belong to
    the keys of ``owner``. ``computed``: the parts of a backward pass before it, on the sender.
    """

    step: int
    sender: int
    owner: int
    tensors: tuple[Tensor, ...]
    computed: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


@dataclass(frozen=True)
class Part:
    """A part of the forward pass: ``rank`` computes with the keys ``k``, under the mask of
    ``owner`` (None: of no owner). Before it, the rank started and awaited so many hops.
    """

    rank: int
    k: Tensor
    owner: int | None
    started: int
    awaited: int


@contextmanager
def recorded_hops(ring: ModuleType) -> Iterator[list[SentHop]]:
    """Yield a list of every hop that the ring sends inside the block, on all ranks: of one pass, or
    of both.
    """
    hops: list[SentHop] = []
    computed: Counter[int] = Counter()  # parts of the backward pass, by rank
    tiled_backward, plus_received = ring.tiled_backward, ring._plus_received

    class RecordedHop(ring.Hop):
        def __init__(self, *given, **named):
            tensors, owner, call = _of_a_hop(*given, **named)
            step, sent = (call.rank - owner - 1) % call.ranks, (owner + 1) % call.ranks
            hops.append(SentHop(step, call.rank, sent, tuple(tensors), computed[call.rank]))
            super().__init__(tensors, owner, call)

    def recorded_backward(*given, **options):
        computed[torch.distributed.get_rank()] += 1
        return tiled_backward(*given, **options)

    def checked_sum(part, hop):
        assert part[0] is not None, "own_part is (None, None): keep the part of step 0 there"
        return plus_received(part, hop)

    with mock.patch.multiple(
        ring, Hop=RecordedHop, tiled_backward=recorded_backward, _plus_received=checked_sum
    ):
        yield hops


@contextmanager
def recorded_parts(ring: ModuleType) -> Iterator[list[Part]]:
    """Yield a list of every part that the forward pass of the ring computes inside the block, on
    all ranks.
    """
    parts: list[Part] = []
    given: dict[int, tuple] = {}  # by the identity of a mask; it also keeps the masks
    hops: defaultdict[int, list[bool]] = defaultdict(list)  # by rank: has it waited for the hop?
    local_mask, tiled_forward = Call.local_mask, ring.tiled_forward

    def recorded_mask(call, owner):
        mask = local_mask(call, owner)
        given[id(mask)] = owner, mask
        return mask

    class RecordedWait(ring.Hop):
        def __init__(self, *given, **named):
            tensors, owner, call = _of_a_hop(*given, **named)
            self.of_rank = hops[call.rank]
            self.place = len(self.of_rank)
            self.of_rank.append(False)
            super().__init__(tensors, owner, call)

        def wait(self):
            self.of_rank[self.place] = True
            return super().wait()

    def recorded_forward(q, k, v, mask, **options):
        rank, owner = torch.distributed.get_rank(), given.get(id(mask), (None,))[0]
        parts.append(Part(rank, k, owner, len(hops[rank]), sum(hops[rank])))
        return tiled_forward(q, k, v, mask, **options)

    with (
        mock.patch.object(ring, "Hop", RecordedWait),
        mock.patch.object(Call, "local_mask", recorded_mask),
        mock.patch.object(ring, "tiled_forward", recorded_forward),
    ):
        yield parts


@contextmanager
def merged_dtypes(ring: ModuleType) -> Iterator[set[torch.dtype]]:
    """Yield a set of the dtypes of every out and lse that a ring merges inside the block, on all
    ranks.
    """
    dtypes: set[torch.dtype] = set()
    merged = ring.merged

    def recorded(*parts: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        dtypes.update(part.dtype for part in (*parts, *named.values()))
        return merged(*parts, **named)

    with mock.patch.object(ring, "merged", recorded):
        yield dtypes


def owner_of(k: Tensor, shards: Sequence[Tensor]) -> int | None:
    """Return the rank whose shard of the keys is ``k``, None if there is none."""
    return next(
        (rank for rank, shard in enumerate(shards) if torch.equal(k, shard.to(k.dtype))), None
    )


def keys_and_gradients(
    hops: Sequence[SentHop], shards: Sequence[Tensor]
) -> tuple[list[SentHop], list[SentHop]]:
    """Return the hops of keys, and the others: they bring gradients."""
    owners = [owner_of(hop.tensors[0], shards) for hop in hops]
    keys, gradients = (
        [hop for hop, owner in zip(hops, owners, strict=True) if (owner is None) == flag]
        for flag in (False, True)
    )
    return keys, gradients


def require_key_hops(hops: Sequence[SentHop], shards: Sequence[Tensor], passes: int = 1) -> None:
    """Raise AssertionError unless every rank sends the keys that it holds in each step of a pass
    but the last.
    """
    ranks = len(shards)
    for rank in range(ranks):
        own, expected = [hop for hop in hops if hop.sender == rank], passes * (ranks - 1)
        count = f"rank {rank}: {len(own)} hops of keys, expected {expected}"
        assert len(own) == expected, f"{count}: one in each step of a pass but the last"
        for place, hop in enumerate(own):
            step, sent = place % (ranks - 1), owner_of(hop.tensors[0], shards)
            held, where = (rank - step) % ranks, f"rank {rank}, step {step}"
            assert sent == held, f"{where}: it sends {_keys(sent)}, expected {_keys(held)}"
            named = f"{where}: the hop names owner {(hop.owner - 1) % ranks}"
            assert hop.step == step, (
                f"{named}, expected {(held - 1) % ranks}, the owner of the keys that it brings"
            )


def require_parts(parts: Sequence[Part], shards: Sequence[Tensor]) -> None:
    """Raise AssertionError unless every rank computes once with the keys of each rank, under the
    mask of their owner, while the hop of the same step is in flight.
    """
    ranks = len(shards)
    for rank in range(ranks):
        own = [part for part in parts if part.rank == rank]
        assert len(own) == ranks, (
            f"rank {rank}: {len(own)} parts, expected {ranks}: one in each step"
        )
        for step, part in enumerate(own):
            held, where = owner_of(part.k, shards), f"rank {rank}, step {step}"
            assert held == (rank - step) % ranks, (
                f"{where}: it holds {_keys(held)}, expected {_keys((rank - step) % ranks)}"
            )
            assert part.owner == held, (
                f"{where}: it holds {_keys(held)}, but the mask is that of owner {part.owner}"
            )
            assert part.awaited >= step, (
                f"{where}: it computes without waiting for the hop of its keys"
            )
            alone = "so the message overlaps with nothing"
            assert part.started > step or step == ranks - 1, (
                f"{where}: it starts the hop after it computes, {alone}"
            )
            assert part.awaited == step, (
                f"{where}: it waits for the hop before it computes, {alone}"
            )


def require_gradient_hops(hops: Sequence[SentHop], ranks: int, dtype: torch.dtype) -> None:
    """Raise AssertionError unless every rank sends a gradient of this dtype in each step but the
    first.
    """
    for rank in range(ranks):
        own = [hop for hop in hops if hop.sender == rank]
        count = f"rank {rank}: {len(own)} gradient hops, expected {ranks - 1}"
        assert len(own) == ranks - 1, (
            f"{count}: the part of step 0 stays, and every later step sends"
        )
        for step, hop in enumerate(own, 1):
            assert hop.computed == step + 1, (
                f"rank {rank}: gradient hop {step} of {ranks - 1} starts in step "
                f"{hop.computed - 1}, expected step {step}: the part of step 0 stays"
            )
            where = f"rank {rank}, step {step}: the gradient hop"
            dtypes = {x.dtype for x in hop.tensors}
            assert dtypes == {dtype}, (
                f"{where} has {', '.join(map(str, dtypes))}, expected call.reduce_dtype, {dtype}"
            )
            named, expected = ((x - 1) % ranks for x in (hop.owner, rank - step))
            assert hop.step == step, (
                f"{where} names owner {named}, expected {expected}, the owner of what it brings"
            )
            assert all(x.is_contiguous() for x in hop.tensors), (
                f"{where} has tensors that are not contiguous"
            )


def _of_a_hop(
    tensors=None, owner=None, call=None, *more: Any
) -> tuple[Sequence[Tensor], int, Call]:
    """Return the arguments of a hop. Raise TypeError that names them if these are others."""
    given, kinds = (tensors, owner, call, *more), ((list, tuple), int, Call)
    if len(given) == 3 and all(map(isinstance, given, kinds)):
        return tensors, owner, call
    found = ", ".join(type(x).__name__ for x in given)
    raise TypeError(
        "a hop takes a list of tensors, the owner of those that arrive, and call, as "
        f"Hop(held, owner - 1, call): found {found}"
    )


def _keys(owner: int | None) -> str:
    return "no rank's keys" if owner is None else f"the keys of {owner}"
