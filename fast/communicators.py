"""Own communicators: messages of attention that never queue behind other messages of the group, such as those of DDP.

    default              gathers, group casts, hops             the communicator of the group
                         reductions                             a second one (only NCCL)
    own_communicators    gathers, group casts, hops of keys                 one of their own
                         reductions, group reduces, hops of sums            another one

NCCL runs the messages of one communicator one after another. Two suffice: a pass has at most one message of each row in flight.
"""

import torch
import torch.distributed as dist

from canon.fast.messages import transport_for
from canon.ranks.group import Group, backend_of, place_in

__all__ = ["own_communicators"]


def own_communicators(group: Group = None) -> None:
    """Give the messages of ``group`` two communicators of their own; None is all ranks. Later calls use them.

    Then no message queues behind messages of DDP or FSDP, and no hop of keys queues behind a hop of sums. The kernels of a ring
    step start after its hop of keys has started. Call it on every rank of the group, at the same place between two steps, with
    the current CUDA device of the rank. A second call does nothing. The communicators end when the group is destroyed and no
    variable refers to it.

    It is no default: on two H100 steps under DDP took as long without, and a communicator took 0.5 GB of each GPU
    (paper/data/communicators_two_h100.json, of `canon bench communicators`).
    """
    group, _, ranks = place_in("own_communicators", group)
    if ranks == 1:
        return
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    on_gpu = gpu is not None and backend_of(dist.group.WORLD if group is None else group, gpu) not in ("", "gloo")
    transport = transport_for(group, gpu if on_gpu else torch.device("cpu"))
    if not transport.is_separate:
        transport.separate()
