"""Tables that kernels read beside tensors: which tiles to visit, in which order, and where."""
