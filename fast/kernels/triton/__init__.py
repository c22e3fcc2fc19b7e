"""The Triton backend: any CUDA GPU from sm_80 on, and Triton's interpreter on a CPU."""
