"""Kernel backends, with the same functions in their modules ``launch``.

    triton      any CUDA GPU, and in Triton's interpreter on a CPU
    gluon       Hopper
    cuda        CUDA C++ for sm_80 and later, compiled at run time

The words of Canon, and those of FlashAttention (FA), FlexAttention, MagiAttention or NCCL for the same thing:

    Canon                 elsewhere                     meaning
    band                  AttnSlice (Magi)              a rectangle of visible cells, cut by two diagonals lo <= j - i <= hi
    tile                  block (FA)                    rows x columns of S for one step; also these rows or columns of a tensor
    work table            BlockMask (FlexAttention)     for each tile of rows, the spans to visit (`work_tables.py`)
    span                  full / partial blocks         adjacent tiles of columns; a partial span is masked by its band
    work tile             work tile (FA 3, CUTLASS)     a tile of rows of one head or of packed heads; CTAs claim them
    tile schedule         tile scheduler (FA 3)         all work tiles of a launch, in order of claims; tensor ``work``
    owner                 -                             the head whose dk and dv a CTA computes: a key head, or with
                                                        head_parallel a query head
    row statistics        softmax_lse, dPsum (FA 3)     lse and delta of each query
    delta                 dPsum (FA 3)                  rowsum(dout * out) - dlse
    stale maximum         -                             an old row maximum, used unchecked; the sums of P verify it afterwards
    ping-pong             ping-pong scheduling (FA 3)   one warpgroup computes exponentials during MMAs of another
    loader                producer (FA 3)               the warps that load by TMA: 4, or 1 if fused
    warpgroup             consumer (FA 3)               four warps that issue MMAs together
    stages                stages (CUTLASS)              buffers of visited tiles
    full, free            full, empty (CUTLASS)         the two mbarriers of a buffer in shared memory
    dq semaphore          dq_semaphore (FA 3)           an int32 for each tile of dq; it fixes the order of additions to it
    ticket                -                             number of a span; a dq semaphore holds that of the last span added
    fused, split          -                             one kernel for dq, dk and dv, or one for dq and one for dk and dv
"""

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ModuleNotFoundError(
        "canon.fast needs Triton: pip install 'triton>=3.6' (on Linux), or use canon.reference, which needs torch alone",
        name="triton",
    ) from None
