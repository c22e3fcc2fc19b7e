"""The public functions of both halves: one signature, docstring and declaration for each. Each half
binds its algorithms.

These arguments are common to all of them:

    q, k, v           this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or all three
                      without the batch axis. h is a multiple of g
    mask              over the whole sequence; None is causal. A tuple or a list of b Masks holds
                      one for each sequence
    layout            the tokens of each rank, for all sequences; None is contiguous (zigzag and
                      striped have their own)
    sink              as in `attention`, equal on all ranks. Add the gradients of all ranks: a
                      rank's is the sum over its own tokens
    group             a ProcessGroup or a DeviceMesh of one dimension; None is all ranks, or this
                      process alone without torch.distributed. Or a DeviceMesh ("tokens", "heads"),
                      in this order: the ranks of a row exchange heads for tokens, and the schedule
                      runs over the columns (`mesh.py` of each half). ``layout`` has a part for each
                      rank, row after row. "heads" must divide g; `latent_attention` raises
    reduce_dtype      dtype in which dk and dv are sent; None is float32 (float64 for float64)
    rank_invariant    return, on any number of ranks, the bits of one rank (`owner_computes.py`).
                      Each piece of the layout, a run of tokens on one rank, must begin at a
                      multiple of 128, in the sequence and in the rank's shard; the default layout
                      is then contiguous with such pieces
    scale, softcap, backward, return_lse, return_max_logits    as in `attention`

All ranks must call the function and its backward pass, with equal masks, layouts, dtypes, batches,
heads, widths, options, requires_grad and `torch.use_deterministic_algorithms`. The sequence is as
long as the mask; without a mask, as the layout; without both, W t tokens. A ValueError or TypeError
is raised on every rank, if the arguments of one rank do not fit together or differ between ranks. A
first call warns of tensors that may be (b, h, t, d), and of a planned layout that is not passed.
"""
