"""The argument ``group`` of every distributed function, and the backends of process groups.

A group is a ProcessGroup, a DeviceMesh of one dimension, also a slice (``mesh["cp"]``), or None:
all ranks, or this process alone without torch.distributed. Attention exchanges heads inside the
rows of a DeviceMesh ("tokens", "heads"); for other functions it is the group of its ranks. Picture:
`canon.reference.mesh`.
"""

import os
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist

from canon.masks.arguments import shown
from canon.ranks.digests import GatheredDigests, SharedDigests, shared_memory

Group = dist.ProcessGroup | dist.DeviceMesh | None
TOKENS_HEADS = ("tokens", "heads")  # the dimensions of a mesh of two dimensions
ENDED = "the process group has ended: make a new one, and keep it until the backward pass"
WRONG_GROUP = "group must be a ProcessGroup, a DeviceMesh of one dimension or None"
UNUSED_TAG = 2**31 - 2  # of a receive that nothing answers
BETWEEN = " x "  # the names of a column and a row
GATHERING: set[str] = set()  # backends that always gather digests; tests add theirs


def place_in(name: str, group: Any) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (process group or None, this process's rank, number of ranks). Raises TypeError or
    ValueError, on this rank only.
    """
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{name}: this process is not a member of group: call it on the members only"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup | dist.DeviceMesh | Mesh):
        raise TypeError(
            f"{name}: {WRONG_GROUP}, got {shown(group)}: pass the result of dist.new_group"
        )
    if not dist.is_initialized():
        if group is not None:
            raise ValueError(
                f"{name}: a group was given, but torch.distributed has ended: call "
                "init_process_group"
            )
        _warn_of_one_rank()
        return None, 0, 1
    if isinstance(group, dist.DeviceMesh | Mesh):
        group = _group_of_mesh(name, group)
    if group is not None and group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(f"{name}: {ENDED}")
    rank = dist.get_rank(group)
    if rank < 0:
        members = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not a member of the group, whose "
            f"ranks are {members}"
        )
    return group, rank, dist.get_world_size(group)


@cache
def _warn_of_one_rank() -> None:
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        warnings.warn(
            f"canon: WORLD_SIZE is {ranks}, but torch.distributed is not initialised, so this "
            "process computes alone: call init_process_group first",
            stacklevel=3,
        )


class Mesh:
    """This rank's groups in a DeviceMesh ("tokens", "heads"): its ``row`` exchanges heads, its
    ``column`` has a rank of every row, and ``everyone`` has all ranks, row after row. References
    are weak, because the cache of calls keeps a mesh.
    """

    def __init__(self, mesh: dist.DeviceMesh, column: Any, row: Any):
        self.columns = dist.get_world_size(row)
        everyone = _everyone(mesh.mesh.flatten().tolist(), column, row)
        self._column, self._row, self._everyone = ref(column), ref(row), ref(everyone)

    column = property(lambda self: self._alive(self._column))
    row = property(lambda self: self._alive(self._row))
    everyone = property(lambda self: self._alive(self._everyone))

    def parts(self) -> list[Any]:
        """Return the row and the column, if they have not ended."""
        return [group for x in (self._row, self._column) if (group := x()) is not None]

    def _alive(self, reference: Any) -> Any:
        group = reference()
        if group is None or group not in dist.distributed_c10d._world.pg_map:
            raise ValueError(ENDED)
        return group


_lock = threading.Lock()  # ranks may be threads
_meshes: WeakKeyDictionary[Any, dict[str, Mesh]] = WeakKeyDictionary()  # by column, name of the row


def mesh_of(name: str, group: Any) -> Mesh | None:
    """Return the groups of a mesh of two dimensions; None for others, and for rows of one rank. The
    first call is a collective.
    """
    if isinstance(group, Mesh):
        return group
    if not isinstance(group, dist.DeviceMesh) or group.ndim == 1 or not dist.is_initialized():
        return None
    _check_dimensions(name, group)
    column, row = (group.get_group(dim) for dim in TOKENS_HEADS)
    if dist.get_world_size(row) == 1:
        return None
    with _lock:
        found = _meshes.setdefault(column, {}).get(row.group_name)
    if found is None or found._row() is not row:
        _check_order(name, group.mesh)
        found = Mesh(group, column, row)  # only this rank's thread uses its groups
        with _lock:
            _meshes[column][row.group_name] = found
    return found


def _everyone(ranks: list[int], column: Any, row: Any) -> Any:
    """Return the group of all ranks of a mesh. A new one ends with the column."""
    for group in (row, dist.group.WORLD):
        if dist.get_process_group_ranks(group) == ranks:
            return group
    store = dist.distributed_c10d._get_default_store()
    store = own_store(dist.PrefixStore(f"canon mesh {ranks}", store), len(ranks))
    return companion_of(column, store, "mesh", dist.get_backend_config(row), ranks=ranks)


def _check_dimensions(name: str, mesh: dist.DeviceMesh) -> None:
    if (names := mesh.mesh_dim_names) != TOKENS_HEADS:
        dimensions = (
            f"dimensions {', '.join(map(repr, names))}"
            if names
            else f"{mesh.ndim} dimensions without names"
        )
        remedy = 'mesh["cp"]' if not names or "cp" in names else f'mesh["{names[-1]}"]'
        remedy = f"the dimension of the sequence, for example {remedy}"
        if names and [x for x in names if x in TOKENS_HEADS] == [*TOKENS_HEADS]:
            remedy = 'mesh["tokens", "heads"]'
        raise ValueError(
            f"{name}: group is a DeviceMesh with {dimensions}, expected one, or 'tokens', 'heads' "
            f"in this order: pass {remedy}"
            + ("" if names else ", and give mesh_dim_names to init_device_mesh")
        )
    _check_member(name, mesh)


def _check_member(name: str, mesh: dist.DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} is not a member of the mesh: call it on "
            "the members only"
        )


def _check_order(name: str, ranks: torch.Tensor) -> None:
    """Raise ValueError unless the ranks ascend: a rank's place in a layout counts row after row."""
    if (ranks.flatten().diff() <= 0).any():
        raise ValueError(
            f"{name}: the ranks of a mesh must ascend row after row, got {ranks.tolist()}: make it "
            "by init_device_mesh"
        )


def _group_of_mesh(name: str, mesh: "dist.DeviceMesh | Mesh") -> dist.ProcessGroup:
    if (found := mesh_of(name, mesh)) is not None:
        return found.everyone
    assert isinstance(mesh, dist.DeviceMesh)
    if mesh.ndim != 1:  # rows of one rank
        return mesh.get_group(TOKENS_HEADS[0])
    _check_member(name, mesh)
    return mesh.get_group()


def own_store(store: Any, ranks: int) -> Any:
    """Return a part of the store for this group: ended ones may have left the same names."""
    generation = (store.add("canon/generation", 1) - 1) // ranks
    return dist.PrefixStore(f"canon/{generation}", store)


def companion_of(
    owner: Any,
    store: Any,
    name: str,
    backend: str,
    timeout: timedelta | None = None,
    ranks: list[int] | None = None,
) -> Any:
    """Return a new group of ``ranks``, by default those of the group ``owner``, with whose last
    reference it ends. A collective. ``store``: of these ranks alone.

    `dist.new_group` would need all ranks, or reuse what ended groups left in the store.
    """
    c10d, backend = dist.distributed_c10d, dist.Backend(backend)
    ranks = dist.get_process_group_ranks(owner) if ranks is None else ranks
    unique = store.compare_set(f"name of {name}", "", uuid.uuid4().hex).decode()  # the first rank's
    timeout = c10d._get_default_timeout(backend) if timeout is None else timeout
    place = len(ranks), ranks.index(dist.get_rank()), ranks
    with _unbound():
        made, _ = c10d._new_process_group_helper(
            *place, backend, store, f"canon-{unique}", timeout=timeout
        )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    finalize(owner, _end, made).atexit = False
    return made


def _end(made: Any) -> None:
    """End a group on this rank alone: NCCL's `destroy_process_group` could wait for the others."""
    c10d = dist.distributed_c10d
    if made in c10d._world.pg_map:  # else torch has ended all groups
        is_nccl = backend_of(made, torch.device("cuda")) == "nccl"
        (c10d._abort_process_group if is_nccl else c10d.destroy_process_group)(made)


@contextmanager
def _unbound() -> Iterator[None]:
    """Unbind the default group from its GPU: NCCL would split it, which needs all its ranks."""
    default = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def backend_of(group: Any, device: torch.device) -> str:
    """Return the backend of the group for tensors of the device, such as "nccl", or ""."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",")).get(
        device.type, ""
    )


def name_of(group: Any) -> str:
    """Return the name by which `group_named` finds a group; "" for None."""
    if group is None:
        return ""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, dist.DeviceMesh):
        return group.get_group().group_name if group.ndim == 1 else _name_of_mesh(group)
    raise TypeError(f"{WRONG_GROUP}, got {type(group).__name__}")


def _name_of_mesh(mesh: dist.DeviceMesh) -> str:
    found = mesh_of("canon", mesh)
    if found is None:
        return mesh.get_group(TOKENS_HEADS[0]).group_name
    return f"{found.column.group_name}{BETWEEN}{found.row.group_name}"


# a traced program holds the name
_name_of_mesh._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def group_named(name: str) -> "dist.ProcessGroup | Mesh | None":
    """Return the process group or the mesh of a name. Raise RuntimeError if it has ended."""
    if not name:
        return None
    first, _, row = name.partition(BETWEEN)
    for group, its_name in dist.distributed_c10d._world.pg_names.items():
        if its_name == first:
            if not row:
                return group
            with _lock:
                return _meshes[group][row]
    raise RuntimeError(
        f"the process group {name!r} of a compiled function has ended: compile the function again"
    )


def digests_of(group: Any, store: Any, rank: int, ranks: int) -> Any:
    """Return the carrier of a group's digests. A collective."""
    on_cpu = backend_of(group, torch.device("cpu"))
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
    memory = None if on_cpu in GATHERING else shared_memory(store, rank, ranks)
    if memory is not None:
        return SharedDigests(memory, rank, ranks, timeout.total_seconds())
    if on_cpu in ("gloo", "mpi", *GATHERING):
        return GatheredDigests(ref(group), ranks, lambda: None)  # aborted with the group
    channel = companion_of(group, store, "digests", "gloo", timeout)
    return GatheredDigests(lambda: channel, ranks, lambda: abort_group(channel))


def abort_group(group: Any) -> None:
    """End all messages in flight: their waits raise. Gloo has no abort, but a receive that times
    out closes its connections.
    """
    group.abort()
    if backend_of(group, torch.device("cpu")) == "gloo":
        other = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, UNUSED_TAG).wait(
                timedelta(milliseconds=1)
            )


def is_from_messages(error: BaseException) -> bool:
    """Return whether an error comes from messages, by its type or its text."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")
    named = isinstance(error, Exception) and any(word in str(error).lower() for word in words)
    return named or isinstance(error, dist.DistError)
