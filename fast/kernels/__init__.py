"""Kernel backends: the same functions in their modules ``launch``, a declaration in ``backend``.

    triton      any CUDA GPU, and in Triton's interpreter on a CPU
    gluon       Hopper
    cuda        CUDA C++ for sm_80 and later, compiled at run time
    torch       plain PyTorch, for all other tensors

Words of the kernels; the others are FlashAttention 3's:

    band             a rectangle of visible cells, cut by two diagonals lo <= j - i <= hi
    tile             rows x columns of S for one step; also these rows or columns
    span             adjacent tiles of columns; a partial span is masked by its band
    work table       for each tile of rows, the spans to visit
    part             keys that one CTA sums, if few queries see many keys
    owner            the head whose dk and dv a CTA computes
    stale maximum    an old row maximum, verified afterwards by the sums of P
"""
