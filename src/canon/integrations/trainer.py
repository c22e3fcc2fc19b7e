"""transformers' Trainer on sequences that ranks hold together.

    register("canon")
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="canon")
    trainer = ContextParallelTrainer(model, args, train_dataset=dataset, data_collator=collator)
    trainer.train()  # under torchrun

The ranks of ``group`` read the same batch. The collator plans its mask and layout, and takes this
rank's part. The loss is `sequence_loss` of the model inside `sharded`, divided by the labels of all
ranks and microbatches.

Limits: datasets without a length, label smoothing, ``compute_loss_func``, ``compute_metrics``,
router losses, NEFTune, hybrid and other than causal models raise. Evaluation gives no predictions.

Source: transformers 5.23, trainer.py; accelerate 1.15, data_loader.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from canon.integrations.transformers import HALVES, attend_layer, check_layers, sharded
from canon.masks.arguments import shown
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.ranks.group import Group, place_in
from canon.training import sequence_loss

__all__ = ["ContextParallelTrainer"]

SHARDING = "sharding"  # the entry of a batch that holds its mask and layout
# the mask has their content
WHOLE = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class ContextParallelTrainer(Trainer):
    """Train on batches that the ranks of ``group`` hold together.

    Args, besides those of Trainer:
        group: this rank's group of successive ranks. Different groups read different batches.
        half, function, options: of `sharded`.
        layout: of a mask and a number of ranks. None is `dispatch`. For a mesh pass ``lambda mask,
            ranks: dispatch(mask, ranks // heads).divided(heads)``.

    Raises TypeError or ValueError for arguments that have no place here.
    """

    def __init__(
        self,
        *args: Any,
        group: Group = None,
        half: str = "fast",
        function: str = "magi",
        layout: Callable[[Mask, int], Layout] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        if half not in HALVES:
            raise ValueError(
                f"{type(self).__name__}: half must be one of {HALVES}, got {shown(half)}"
            )
        super().__init__(*args, **kwargs)
        _check_trainer(self)
        members, rank, self.context_ranks = place_in(type(self).__name__, group)
        _check_successive(type(self).__name__, members, self.context_ranks)
        self.sharding = {"group": group, "half": half, "function": function, **(options or {})}
        layout = import_module(f"canon.{half}").dispatch if layout is None else layout
        self.data_collator = ShardingCollator(self.data_collator, layout, rank, self.context_ranks)
        # so that Trainer counts the labels of all ranks and microbatches
        self.model_accepts_loss_kwargs = True

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader with the same batches for a context group, in evaluation for all."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        if (ranks := self.args.world_size) == 1:
            return loader
        batches = loader.batch_sampler
        if not isinstance(batches, BatchSamplerShard):
            raise ValueError(
                f"{type(self).__name__}: {shown(loader.dataset)} has no length or is dispatched "
                "by rank 0, so ranks would read "
                "different batches: pass a dataset with a length, and leave dispatch_batches out"
            )
        held_by = self.context_ranks if kwargs.get("is_training") else ranks
        # groups of ``held_by`` ranks read different batches
        batches.num_processes, batches.process_index = ranks // held_by, dist.get_rank() // held_by
        # one group takes a short last batch as one process does
        batches.even_batches &= ranks > held_by
        return loader

    def compute_loss(
        self,
        model: Any,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        mask, layout = inputs[SHARDING]
        left_out = SHARDING, "labels", "shift_labels"
        given = {name: x for name, x in inputs.items() if name not in left_out}
        with sharded(mask, layout, **self.sharding):
            outputs = model(**given, use_cache=False)
        loss = sequence_loss(
            outputs.logits, inputs["shift_labels"], num_items_in_batch=num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch. Raises ValueError unless ``prediction_loss_only``."""
        if not prediction_loss_only:
            raise ValueError(
                f"{type(self).__name__} gives no predictions: call evaluate, for the loss"
            )
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean loss. Each rank has all losses, so none are gathered."""
        self.gather_function = self._losses_of_samples
        return super().evaluation_loop(*args, **kwargs)

    def _losses_of_samples(self, losses: Tensor) -> Tensor:
        state = self.accelerator.gradient_state
        short = state.end_of_dataloader and state.remainder > 0
        return losses[: state.remainder] if short else losses

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.context_ranks


@dataclass
class ShardingCollator:
    """Collate a batch (b, n), plan it, and return one rank's part."""

    collate: Callable
    layout: Callable[[Mask, int], Layout]
    rank: int
    ranks: int

    def __call__(self, features: list) -> dict[str, Any]:
        collated = self.collate(features)
        batch = {name: x for name, x in collated.items() if name not in WHOLE}
        if "labels" not in batch:
            raise ValueError(
                f"ContextParallelTrainer: the data collator must return labels, got {sorted(batch)}"
            )
        if len(batch) < len(collated) and "position_ids" not in batch:
            raise ValueError(
                f"ContextParallelTrainer: the data collator returns {sorted(WHOLE & set(collated))}"
                " without position_ids, which describe the same documents here: let it return them"
            )
        if (padding := batch.get("attention_mask")) is not None and bool(padding.all()):
            del batch["attention_mask"]
        mask = mask_of(batch)
        layout = self.layout(mask, self.ranks)
        return {**layout.shard_batch(batch, self.rank), SHARDING: (mask, layout)}


def mask_of(batch: Mapping[str, Tensor]) -> Mask:
    """Return the one mask of a batch: causal, in each document of ``position_ids``."""
    if (positions := batch.get("position_ids")) is None:
        return Mask.causal(batch["labels"].shape[1])
    masks = set(Mask.from_position_ids(positions))
    if len(masks) > 1:
        raise ValueError(
            "ContextParallelTrainer: the sequences of a batch are packed differently, but several "
            "ranks take one mask for all of them: flatten the batch into one sequence, as "
            "DataCollatorWithFlattening or padding_free=True do"
        )
    return masks.pop()


def _check_trainer(trainer: Any) -> None:
    args = trainer.args
    name = type(trainer).__name__
    config = trainer.model.config.get_text_config()
    if ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation) is not attend_layer:
        raise ValueError(
            f"{name}: the model has attn_implementation={config._attn_implementation!r}, so ranks "
            "would attend to their own tokens alone: call "
            "canon.integrations.transformers.register and load the model with that name"
        )
    check_layers(config)
    causal = {x.is_causal for x in trainer.model.modules() if hasattr(x, "is_causal")}
    if causal == {False} or getattr(config, "is_causal", None) is False:
        raise ValueError(
            f"{name}: the model is not causal, but ranks get causal masks: use Trainer itself"
        )
    refused = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "compute_metrics": trainer.compute_metrics is not None,
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,
        "output_router_logits in the config": getattr(config, "output_router_logits", False),
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy
        == "batch_rebalance",
        "parallelism_config": trainer.accelerator.parallelism_config is not None,
        "several GPUs in one process": args.n_gpu > 1,
    }
    if wrong := [option for option, given in refused.items() if given]:
        raise ValueError(f"{name} does not support {wrong[0]}: leave it out")


def _check_successive(name: str, group: Any, ranks: int) -> None:
    if group is not None:
        members = sorted(dist.get_process_group_ranks(group))
        if (
            members != list(range(members[0], members[0] + ranks))
            or members[0] % ranks
            or dist.get_world_size() % ranks
        ):
            raise ValueError(
                f"{name}: group has the ranks {members}, expected {ranks} successive ranks from a "
                f"multiple of {ranks}: "
                "make context the last dimension of the mesh, as init_device_mesh(..., "
                'mesh_dim_names=("dp", "cp"))["cp"]'
            )
