"""The Triton backend: kernels for any CUDA GPU from sm_80 on, and for Triton's interpreter on a CPU.

`launch` holds the functions that the rest of the package calls, and `config` the tile sizes. The other modules hold kernels
(`forward`, `dq`, `dkdv`, `softmax_stats`, `merge`, `rows`, `sum_ranks`) and their building blocks (`blocks`).
"""
