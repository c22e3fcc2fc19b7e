"""Kernels for Hopper (sm_90) in Gluon: TMA loads, warp-specialised wgmma, persistent CTAs. Start
with `forward_plain`, `tile_ring` and `tile_queue`; `tile_scheduler` makes the schedules on the
host."""
