"""The argument ``group`` of every distributed function, and the place of this process in it.

    ProcessGroup                   its ranks
    DeviceMesh of one dimension    the ranks of that dimension, also as a slice of a larger mesh: ``mesh["cp"]``
    None                           all ranks; this process alone without torch.distributed

`place_in` resolves it at the start of a call. All other code gets a ProcessGroup or None.
"""

from typing import Any

import torch.distributed as dist

from canon.masks.arguments import shown

Group = dist.ProcessGroup | dist.DeviceMesh | None


def place_in(name: str, group: Any) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (process group or None, rank of this process in it, number of its ranks).

    Raise TypeError unless ``group`` is a ProcessGroup, a DeviceMesh or None, and ValueError if the mesh has several
    dimensions or this process is not a member. The error is raised on this rank only.
    """
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this process is not a member of group: call it on the members only")
    if group is not None and not isinstance(group, dist.ProcessGroup | dist.DeviceMesh):
        raise TypeError(
            f"{name}: group must be a ProcessGroup, a DeviceMesh of one dimension or None, got {shown(group)}: "
            "pass the result of dist.new_group"
        )
    if not dist.is_initialized():
        if group is not None:
            raise ValueError(f"{name}: a group was given, but torch.distributed has ended: call init_process_group")
        return None, 0, 1
    if isinstance(group, dist.DeviceMesh):
        group = _group_of_mesh(name, group)
    rank = dist.get_rank(group)
    if rank < 0:
        members = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise ValueError(f"{name}: rank {dist.get_rank()} is not a member of the group, whose ranks are {members}")
    return group, rank, dist.get_world_size(group)


def _group_of_mesh(name: str, mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension. Raise ValueError for other meshes, and outside the mesh."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        dimensions = f"dimensions {', '.join(map(repr, names))}" if names else f"{mesh.ndim} dimensions without names"
        remedy = 'mesh["cp"]' if not names or "cp" in names else f'mesh["{names[-1]}"]'
        raise ValueError(
            f"{name}: group is a DeviceMesh with {dimensions}, expected one: pass the dimension of the sequence, "
            f"for example {remedy}" + ("" if names else ", and give mesh_dim_names to init_device_mesh")
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not a member of the mesh: call it on the members only")
    return mesh.get_group()
