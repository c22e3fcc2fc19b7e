"""What the kernels read beside tensors, built on the host: which tiles to visit, in which order,
and where.
"""
