"""Train a small model on packed documents, which the ranks hold together. The loss does not depend
on their number.

    torchrun --nproc-per-node 4 notebooks/train.py

Runs on CPUs (gloo, `canon.reference`), or with one GPU for each rank (NCCL, `canon.fast`). The loss
falls from about 5.7 to below 1.0.

    dispatch         plans the layout: the tokens of each rank
    shard_batch      returns a rank's part of the batch, with positions inside each document and
                     shifted labels
    sequence_loss    returns the mean over the labelled tokens of all ranks; the averaging of DDP
                     and FSDP2 gives its gradient
"""

import os

import torch
import torch._dynamo  # imported after init_process_group, as by optimizers, it would keep the group
from torch import distributed as dist
from torch import nn

import canon


class Model(nn.Module):
    """One layer of attention over bytes."""

    def __init__(self):
        super().__init__()
        self.text, self.position = nn.Embedding(256, 128), nn.Embedding(1024, 128)
        self.qkv, self.project = nn.Linear(128, 8 * 64), nn.Linear(4 * 64, 128)
        self.head = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256))

    def forward(self, text, positions, mask, layout):
        x = self.text(text) + self.position(positions)
        q, k, v = self.qkv(x).unflatten(2, (8, 64)).split([4, 2, 2], dim=2)  # (b, t, heads, width)
        # an exchange brings all keys that this rank needs
        out = attn.magi_attention(q, k, v, mask, layout)
        return self.head(x + self.project(out.flatten(2)))


gpu = torch.cuda.is_available()
attn, device = (canon.fast, "cuda") if gpu else (canon.reference, "cpu")  # the same functions
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(20):
    # three packed documents: put your data loader here
    ends = torch.tensor([0, 50 + 10 * step, 600, 1024])
    text = (
        torch.cat([speed * torch.arange(length) for speed, length in enumerate(ends.diff(), 1)])[
            None
        ].to(device)
        % 256
    )
    mask = canon.Mask.documents(ends)  # of all 1024 tokens; causal inside each document
    layout = attn.dispatch(mask, ranks)  # each rank computes the same layout; all layers use it
    part = layout.shard_batch({"text": text, "labels": text}, rank, cu_seqlens=ends)
    with torch.autocast(device, torch.bfloat16, enabled=gpu):
        logits = model(part["text"], part["position_ids"], mask, layout)
    loss = canon.training.sequence_loss(logits, part["shift_labels"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
del model, optimizer, logits, loss  # they keep the group; its threads must end before Python does
dist.destroy_process_group()
