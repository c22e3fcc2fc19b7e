"""Compile kernels ahead of the calls that need them."""
