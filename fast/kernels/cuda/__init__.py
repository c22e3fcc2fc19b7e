"""Kernels in CUDA C++ for sm_80 and later: `mma.sync`, `cp.async`, compiled at run time by NVRTC
(pip install 'canon[cuda]').
"""
