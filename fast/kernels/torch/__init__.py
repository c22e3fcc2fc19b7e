"""The PyTorch backend: plain tiles, for a CPU without Triton's interpreter and for GPUs without
Triton.
"""
