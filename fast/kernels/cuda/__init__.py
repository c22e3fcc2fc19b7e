"""Kernels in CUDA C++ for sm_80 and later: tensor cores by `mma.sync`, copies by `cp.async`, compiled at run time by NVRTC.

    program    compile a .cu file, and keep the result on disk
    kernel     load a compiled kernel, pack its parameters, launch it
    config     tile sizes, warps and shared memory of each kernel
    launch     the functions of `canon.fast.kernels.triton.launch`, with the same arguments

The extra ``cuda`` installs the compiler: pip install 'canon[cuda]'.
"""
