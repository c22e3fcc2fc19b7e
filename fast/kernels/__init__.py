"""Kernel backends, with the same functions in their modules ``launch`` and their declarations in
``backend``.

    triton      any CUDA GPU, and in Triton's interpreter on a CPU
    gluon       Hopper
    cuda        CUDA C++ for sm_80 and later, compiled at run time
    torch       plain PyTorch, for every tensor that the others do not serve

Words of the kernels, and of FlashAttention 3 (FA), FlexAttention or MagiAttention for the same
thing:

    band             AttnSlice (Magi)          a rectangle of visible cells, cut by two diagonals lo
                                               <= j - i <= hi
    tile             block (FA)                rows x columns of S for one step; also these rows or
                                               columns
    span             full / partial blocks     adjacent tiles of columns; a partial span is masked
                                               by its band
    work table       BlockMask (Flex)          for each tile of rows, the spans to visit
    part             split (FA)                keys that one CTA sums, if few queries see many keys
    work tile        work tile (FA)            a tile of rows of one head or of packed heads
    tile schedule    tile scheduler (FA)       all work tiles of a launch, in the order in which
                                               CTAs claim them
    owner            -                         the head whose dk and dv a CTA computes
    row statistics   softmax_lse, dPsum (FA)   lse and delta of each query
    stale maximum    -                         an old row maximum, verified afterwards by the sums
                                               of P
    loader           producer (FA)             the warps that load by TMA
    warpgroup        consumer (FA)             four warps that issue MMAs together
    full, free       full, empty (CUTLASS)     the two mbarriers of a buffer in shared memory
    dq semaphore     dq_semaphore (FA)         the number (ticket) of the last span added to a tile
                                               of dq
    fused, split     -                         one kernel for dq, dk and dv, or one for dq and one
                                               for dk and dv
"""
