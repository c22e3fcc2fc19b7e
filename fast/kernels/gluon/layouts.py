"""Layouts of the Hopper kernels in registers and in shared memory.

An accumulator of a warpgroup has 64 rows, each held by four lanes (a *quad*); a lane holds two of
every eight columns. Source: PTX ISA, Register Fragments for wgmma.mma_async.m64nNk16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def mma_layout(columns):
    """Return the layout of an MMA accumulator (64, columns)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def per_column_layout(columns):
    """Return the layout of a vector over its columns."""
    return gl.SliceLayout(0, mma_layout(columns))


@gluon.constexpr_function
def per_row_layout(columns):
    """Return the layout of a vector over its rows."""
    return gl.SliceLayout(1, mma_layout(columns))


@gluon.constexpr_function
def lane_sum_layout():
    """Return the layout of row sums (64, 4) by the lane of a quad."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def operand_layout(columns):
    """Return the register layout of a left operand for an accumulator with ``columns``."""
    return gl.DotOperandLayout(0, mma_layout(columns), 2)


@gluon.constexpr_function
def shared_operand_layout(columns):
    """Return the shared layout of two-byte operands."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2
    )


@gluon.constexpr_function
def store_layout(columns):
    """Return a layout like `mma_layout`; a lane holds 8 adjacent columns of every 32."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [
        [0, 32 << i] for i in range((columns // 32).bit_length() - 1)
    ]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def scalar_layout(warps):
    """Return the layout of a number that all threads hold."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def contracted_width(d, padded):
    """Return the columns that MMAs contract: three quarters of 128 or 256 may suffice."""
    return padded * 3 // 4 if padded >= 128 and d <= padded * 3 // 4 else padded
