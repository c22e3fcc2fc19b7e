"""The Triton backend: any CUDA GPU from sm_80 on, and Triton's interpreter on a CPU. Source of the
kernels, unless they name another: Tri Dao, FlashAttention-2 (2023),
https://arxiv.org/abs/2307.08691, algorithms 1 (forward) and 2 (backward), and section 2.3.1
(merge)."""
