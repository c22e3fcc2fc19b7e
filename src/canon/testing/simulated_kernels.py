"""Simulate the Gluon kernels of `canon.fast` on the CPU: give their names to `canon.simulator`.

with fast.backend("gluon"), simulated(order="late", seed=0):
    fast.attention(q, k, v)
"""

from canon import simulator
from canon.fast.kernels import interpreter
from canon.fast.kernels.gluon import ptx, softmax
from canon.simulator import simulated

__all__ = ["simulated"]

simulator.adopt(ptx, softmax.lane_sum)
simulator.parsing = interpreter.parsing  # Triton's interpreter parses source, too
