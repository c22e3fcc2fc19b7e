"""Train a Llama of Hugging Face transformers on a mesh of data x context ranks: FSDP2 shards it,
Canon is its attention.

    torchrun --nproc-per-node 4 fsdp2_context_parallel.py --context 2

             context 0        context 1
    data 0   part of pack 0   part of pack 0   the ranks of a row hold one pack of documents
                                               together
    data 1   part of pack 1   part of pack 1   each row has its own documents, mask and layout

FSDP2 shards parameters, gradients and optimizer states over all ranks. Attention communicates
inside a row only. The loss is the mean over the tokens of all rows, so each token counts equally.
Runs on CPUs (gloo), or with one GPU for each rank."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import canon
from canon.integrations.transformers import register, sharded

TOKENS, VOCABULARY = 256, 64  # TOKENS, of each pack


def llama(attention: str) -> torch.nn.Module:
    """Return a small Llama on the CPU. Its parameters are equal on all ranks."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def fully_sharded(model: torch.nn.Module, gpu: bool) -> torch.nn.Module:
    """Return the model with its parameters divided among all ranks. Each layer is a unit of FSDP2,
    the rest is another.
    """
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if gpu else MixedPrecisionPolicy()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def pack(step: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids (1, TOKENS) and cu_seqlens of three documents. Each counts at its own speed,
    modulo VOCABULARY.
    """
    draw = torch.Generator().manual_seed(1000 * step + row)
    ends = (
        torch.cat([torch.tensor([0, TOKENS]), torch.randint(1, TOKENS, (2,), generator=draw)])
        .sort()
        .values
    )
    starts, speeds = (torch.randint(1, high, (3,), generator=draw) for high in (VOCABULARY, 4))
    lengths = zip(starts, speeds, ends.diff(), strict=True)
    ids = torch.cat([start + speed * torch.arange(length) for start, speed, length in lengths])
    return ids[None] % VOCABULARY, ends


def train(steps: int, context: int) -> list[float]:
    """Train on all ranks of the default group, with ``context`` ranks for each pack. Return the
    loss of each step.
    """
    gpu = dist.get_backend() == "nccl"
    device, half, attn = (
        ("cuda", "fast", canon.fast) if gpu else ("cpu", "reference", canon.reference)
    )
    rows, rest = divmod(dist.get_world_size(), context)
    if rest:
        raise ValueError(
            f"--context {context} does not divide the number of ranks, {dist.get_world_size()}"
        )
    mesh = dist.init_device_mesh(device, (rows, context), mesh_dim_names=("data", "context"))
    row, column = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    register("canon")
    model, losses = fully_sharded(llama("canon").to(device), gpu), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids, ends = pack(step, row)
        mask = canon.Mask.documents(ends)
        layout = attn.dispatch(mask, context)  # all ranks of a row plan the same layout
        part = layout.shard_batch({"input_ids": ids, "labels": ids}, column, cu_seqlens=ends)
        part = {name: x.to(device) for name, x in part.items()}
        with sharded(mask, layout, mesh["context"], half=half, function="magi"):
            logits = model(
                input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False
            ).logits
        # of all ranks: FSDP2 averages over them, too
        loss = canon.training.sequence_loss(logits, part["shift_labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Read the command line, join the group of torchrun, train, and print the losses on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--context",
        type=int,
        default=2,
        help="ranks that hold one pack; divides the number of ranks",
    )
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for step, loss in enumerate(train(options.steps, options.context)):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    if not torch.cuda.is_available():
        # a thread of gloo that frees a tensor while Python ends would abort the process
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
