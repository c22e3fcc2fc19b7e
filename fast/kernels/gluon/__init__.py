"""Kernels for Hopper (sm_90) in Gluon: TMA loads, warp-specialised wgmma, one persistent CTA on each SM.

`launch` has the functions of `canon.fast.kernels.triton.launch`, with the same arguments. Modules that the kernels share:

    tile_scheduler     host: the schedule of work tiles, one int32 tensor
    tile_queue         device: claim, publish and read work tiles
    tile_ring          buffers in shared memory with mbarriers, and TMA loads
    masking            mask a tile by the band of its span
    epilogue           write accumulators to global memory
    layouts            register and shared memory layouts
    ptx                all inline PTX

Start with `forward`.
"""
