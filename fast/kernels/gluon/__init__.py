"""Kernels for Hopper (sm_90) in Gluon: TMA loads, warp-specialised wgmma, persistent CTAs. Start
with `forward_plain`.

launch             the functions of `canon.fast.kernels.triton.launch`
tile_scheduler     host: the schedule of work tiles
tile_queue         device: claim, publish and read work tiles
tile_ring          buffers, mbarriers and TMA loads
ptx                all inline PTX
few_queries        few queries over many keys with rank_invariant=True, in the order of `forward`
"""
