"""Tiny random models of transformers, with large weights, so that attention matters; and one
training step of them.
"""

import copy
import sys

import torch
import torch.distributed as dist
import transformers
from torch.overrides import TorchFunctionMode

from canon import Layout
from canon.integrations.transformers import register, sharded
from canon.training import sequence_loss

MODELS = ("Llama", "Qwen3", "Gemma2", "Gemma3", "GptOss")
WINDOW = 7  # keys that a query of a sliding layer sees, itself included
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
WINDOWED = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(
    num_local_experts=2,
    num_experts_per_tok=1,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)
FOUR_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
SHARED_KEYS = dict(
    num_hidden_layers=4, layer_types=WINDOWED["layer_types"] * 2, num_kv_shared_layers=2
)
PER_LAYER_INPUTS = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)
LATENT = dict(
    head_dim=8,
    num_key_value_heads=4,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
)
GROUPS = dict(n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)
CONFIGS = {
    "Llama": (transformers.LlamaConfig, SIZES),
    "Qwen3": (transformers.Qwen3Config, SIZES),
    "Gemma2": (
        transformers.Gemma2Config,
        SIZES | WINDOWED | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    ),
    "Gemma3": (transformers.Gemma3TextConfig, SIZES | WINDOWED),
    "GptOss": (transformers.GptOssConfig, SIZES | WINDOWED | EXPERTS),
    "Mistral": (transformers.MistralConfig, SIZES | dict(sliding_window=WINDOW)),
    "Qwen3Moe": (transformers.Qwen3MoeConfig, SIZES | FOUR_EXPERTS | dict(num_experts=4)),
    "Gemma4": (
        transformers.Gemma4TextConfig,
        SIZES | WINDOWED | SHARED_KEYS | PER_LAYER_INPUTS | dict(global_head_dim=24),
    ),
    "DeepseekV3": (transformers.DeepseekV3Config, SIZES | FOUR_EXPERTS | LATENT | GROUPS),
}
EXPERT_MODELS = "GptOss", "Qwen3Moe", "DeepseekV3"


class Float64(TorchFunctionMode):
    """Replace float32 by float64 in the norms, softmax, rotary angles and routers of transformers,
    and nowhere else.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, caller = kwargs or {}, sys._getframe(1)
        while caller.f_globals["__name__"].startswith("torch"):
            caller = caller.f_back
        if not caller.f_globals["__name__"].startswith("transformers."):
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        return function(*args, **kwargs)


def tiny64(name, attention="eager"):
    """Return `tiny` in float64, to be called inside `Float64`. Grouped products of experts have no
    float64.
    """
    changes = {"experts_implementation": "eager"} if name in EXPERT_MODELS else {}
    with Float64():
        return tiny(name, attention, **changes).double()


def tiny(name, attention="eager", **changes):
    """Return a model in training mode. Equal arguments give equal weights."""
    kind, options = CONFIGS[name]
    register()
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**options | changes), attn_implementation=attention
    )
    return with_large_weights(model)


def with_large_weights(model, dtype=None):
    """Return the model in training mode, with weights that are equal in every call."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=draw, dtype=dtype)
            parameter.copy_(0.3 * drawn + (parameter.ndim == 1))
    return model.train()


def tokens(n, batch=1):
    return torch.randint(64, (batch, n), generator=torch.Generator().manual_seed(n))


def whole_step(model, batch, **options):
    """Return logits, loss and gradients by name of one process.
    ``batch`` has input_ids and labels.
    """
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    everything = Layout.contiguous(batch["labels"].shape[1], 1).shard_batch(batch, 0)
    logits = model(**inputs, use_cache=False, **options).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), everything["shift_labels"].flatten()
    )
    loss.backward()
    return logits.detach(), loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def sharded_step(
    model, batch, mask, layout, cu_seqlens=None, backward_inside=False, copied=True, **options
):
    """Return logits of the whole sequence, loss, and the gradients of all ranks, added. Runs on
    every rank.
    """
    rank = dist.get_rank()
    model = copy.deepcopy(model) if copied else model
    part = layout.shard_batch(batch, rank, cu_seqlens)
    with sharded(mask, layout, **options):
        inputs = {name: x for name, x in part.items() if "labels" not in name}
        logits = model(**inputs, use_cache=False).logits
        loss = sequence_loss(logits, part["shift_labels"])
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    gradients = {
        name.removeprefix("_orig_mod."): x.grad / dist.get_world_size()
        for name, x in model.named_parameters()
    }
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return layout.unshard(logits.detach()), loss.detach(), gradients


def assert_close(found, expected, valid=None, tolerance=1e-5):
    """Compare the results of two steps: relative L2 error of logits, loss and each gradient."""
    (logits, loss, gradients), (true_logits, true_loss, true_gradients) = found, expected
    if valid is not None:
        logits, true_logits = logits[valid], true_logits[valid]
    pairs = {"logits": (logits, true_logits), "loss": (loss, true_loss)}
    pairs |= {name: (x, true_gradients[name]) for name, x in gradients.items()}
    assert set(gradients) == set(true_gradients)
    errors = {name: ((x - y).norm() / y.norm()).item() for name, (x, y) in pairs.items()}
    assert max(errors.values()) < tolerance, errors
