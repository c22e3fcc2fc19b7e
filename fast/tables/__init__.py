"""Tables that kernels read: which tiles to visit, in which order, and where."""
