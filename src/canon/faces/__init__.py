"""The public functions of both halves, each declared once. Their common arguments:

    q, k, v           this rank's tokens, (b, t, h, d), (b, t, g, d), (b, t, g, dv), or all three
                      without the batch axis. h is a multiple of g
    mask              over the whole sequence; None is causal. A tuple or a list of b Masks holds
                      one for each sequence
    layout            the tokens of each rank; None is contiguous (zigzag and striped have their
                      own)
    sink              as in `attention`, equal on all ranks. A rank's gradient is the sum over its
                      own tokens: add those of all ranks
    group             a ProcessGroup or a DeviceMesh of one dimension; None is all ranks, or this
                      process alone without torch.distributed. Or a DeviceMesh ("tokens", "heads")
                      of ranks that ascend row after row, as the parts of ``layout``: the ranks of a
                      row exchange heads for tokens, and the schedule runs over the columns
                      (`mesh.py`). "heads" must divide g; `latent_attention` raises
    reduce_dtype      dtype in which dk and dv are sent; None is float32 (float64 for float64)
    rank_invariant    return, on any number of ranks, the bits of one rank (`owner_computes.py`).
                      Each piece of the layout must begin at a multiple of 128, in the sequence and
                      on its rank, as in the default layout
    scale, softcap, backward, return_lse, return_max_logits    as in `attention`

All ranks must call the function and its backward pass, with equal masks, layouts, dtypes, batches,
heads, widths, options, requires_grad and `torch.use_deterministic_algorithms`. Without a mask the
sequence is as long as the layout, without both W t tokens. A ValueError or TypeError is raised on
every rank, if arguments do not fit together or differ between ranks. A first call warns of tensors
that may be (b, h, t, d), and of a planned layout that is not passed.
"""
