"""Kernels for Hopper (sm_90) in Gluon. Read `forward_plain`, `tile_ring` and `tile_queue` first."""
