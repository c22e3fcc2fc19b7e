"""The portable kernels, in Triton: any CUDA GPU from sm_80 on, and Triton's interpreter on a CPU.

`launch` is what the rest of the package calls; `forward`, `backward` and `merge` hold the kernels, `blocks` what they
share, `config` their tile sizes.
"""
