"""Kernels, by family: ``triton`` is portable (any CUDA GPU, and Triton's interpreter on a CPU)."""
