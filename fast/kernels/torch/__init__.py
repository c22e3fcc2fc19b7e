"""The PyTorch backend, for a CPU without Triton's interpreter and GPUs without Triton."""
