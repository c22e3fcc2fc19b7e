"""Run ring-flash-attn's zigzag ring. It calls two private functions of FlashAttention 2. Without
it, a module with these functions calls flash-attn-4.

Sources: zhuzilin/ring-flash-attention 0.1.8, zigzag_ring_flash_attn.py; flash-attn-4,
flash_attn/cute/interface.py.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from torch import Tensor

NAME = "ring-flash-attn zigzag"


def zigzag_function() -> Callable[..., Any] | None:
    """Return zigzag attention, or None where it is not installed."""
    try:
        _provide_kernels()
        adapters = ModuleType("ring_flash_attn.adapters")
        adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
        sys.modules.setdefault(adapters.__name__, adapters)
        module = importlib.import_module("ring_flash_attn")
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False):
        result = module.zigzag_ring_flash_attn_func(
            q, k, v, causal=True, return_attn_probs=return_lse
        )
        return result[:2] if return_lse else result

    return attend


def installed() -> str:
    """Return the version of ring-flash-attn, or "not installed"."""
    try:
        return version("ring-flash-attn")
    except PackageNotFoundError:
        return "not installed"


def _provide_kernels() -> None:
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
        return
    except ImportError:
        kernels = importlib.import_module("flash_attn.cute.interface")
    module = ModuleType("flash_attn.flash_attn_interface")

    def forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        out, lse = kernels._flash_attn_fwd(
            q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True
        )[:2]
        return out, lse, None, None

    def backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        options = {"softmax_scale": softmax_scale, "causal": causal, "deterministic": deterministic}
        kernels._flash_attn_bwd(q, k, v, out, dout, softmax_lse, dq=dq, dk=dk, dv=dv, **options)

    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    module._flash_attn_varlen_forward = module._flash_attn_varlen_backward = None
    sys.modules["flash_attn.flash_attn_interface"] = module
