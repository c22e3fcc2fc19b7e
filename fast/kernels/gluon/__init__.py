"""Kernels for Hopper (sm_90) in Gluon: TMA loads, warp-specialised wgmma, one program per processor.

`launch` has the functions of `canon.fast.kernels.triton.launch`, with the same arguments.
"""
