// Matrix products of a warp, from MMAs of 16 x 16 by 16 x 8. Each lane holds a few elements of each matrix: its fragment.
//
// With g = lane / 4 and t = lane % 4, the registers of a lane hold
//
//     A, 16 x 16, 16 bits                    B, 16 x 8, 16 bits           C, 16 x 8, float32
//
//              columns     columns                    column                      columns
//              2t, 2t+1    2t+8, 2t+9                 g                           2t      2t+1
//     row g    a[0]        a[2]              rows 2t, 2t+1    b0          row g   c[0]    c[1]
//     row g+8  a[1]        a[3]              rows 2t+8, 2t+9  b1          row g+8 c[2]    c[3]
//
// Two neighbouring accumulators C, rounded to 16 bits, are the fragment A of the next product: P and dS stay in registers.
// `load_matrices` gives fragments A of rows and B of columns, `load_transposed_matrices` B of rows. So one tile of k serves
// both q k^T and ds k.
#pragma once

#include "tensor.cuh"

// Accumulators of a warp: M x N tiles of 16 x 8.
template <int N>
struct Accumulator {
    float x[M][N][4];

    // Call change(element, i, n, e) for each element.
    template <class Change>
    DEVICE void each(const Change& change) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) change(x[i][n][e], i, n, e);
    }

    DEVICE void clear() { each([](float& x, int, int, int) { x = 0.0f; }); }

    DEVICE void scale(float factor) { each([=](float& x, int, int, int) { x *= factor; }); }
};

// A left operand in shared memory: WARP_ROWS rows from `row` on, columns from 16 `first` on.
template <int WIDTH>
struct SharedOperand {
    SharedTile<WIDTH> tile;
    int row, first;

    DEVICE SharedOperand(uint32 address, int row, int lane, int first = 0) : tile(address, lane), row(row), first(first) {}

    DEVICE void fragment(uint32 (&a)[M][4], int block) const {
#pragma unroll
        for (int i = 0; i < M; ++i) load_matrices(a[i], tile.address(row + 16 * i, first + block));
    }
};

// A left operand in registers, of 16 BLOCKS columns.
template <int BLOCKS>
struct RegisterOperand {
    uint32 x[BLOCKS][M][4];

    DEVICE void fragment(uint32 (&a)[M][4], int block) const {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) a[i][e] = x[block][i][e];
    }

    DEVICE void round(const Accumulator<2 * BLOCKS>& c) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < M; ++i) {
                const float(&left)[4] = c.x[i][2 * block], (&right)[4] = c.x[i][2 * block + 1];
                x[block][i][0] = pack(left[0], left[1]);
                x[block][i][1] = pack(left[2], left[3]);
                x[block][i][2] = pack(right[0], right[1]);
                x[block][i][3] = pack(right[2], right[3]);
            }
    }

    // Write it to a tile of WIDTH columns: rows from `row`, columns from 16 `first` on.
    template <int WIDTH>
    DEVICE void write(uint32 tile, int row, int first) const {
        int lane = thread_index() % 32;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < M; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int at = row + 16 * i + e % 2 * 8 + lane / 4, chunk = 2 * (first + block) + e / 2;
                    write_shared(tile + Swizzle<WIDTH>::offset(at, chunk) + 4 * (lane % 4), x[block][i][e]);
                }
    }

    template <class Operand>
    DEVICE void load(const Operand& operand) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) operand.fragment(x[block], block);
    }
};

// c += a b^T over a depth of WIDTH, with the 8 N rows of `b` from `row` on and the lanes of `by_columns`.
template <int N, int WIDTH, class Left>
DEVICE void multiply_transposed(Accumulator<N>& c, const Left& a, const SharedTile<WIDTH>& b, int row = 0) {
#pragma unroll
    for (int block = 0; block < WIDTH / 16; ++block) {
        uint32 left[M][4];
        a.fragment(left, block);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            uint32 right[4];
            load_matrices(right, b.address(row + 16 * n, block));
#pragma unroll
            for (int i = 0; i < M; ++i) {
                mma(c.x[i][2 * n], left[i], right[0], right[1]);
                mma(c.x[i][2 * n + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// c += a b over DEPTH rows of `b` from `row` on, for N / 2 blocks of 16 columns from `first` on. Blocks beyond the width of `b`
// do not exist.
template <int DEPTH, int N, int WIDTH, class Left>
DEVICE void multiply(Accumulator<N>& c, const Left& a, const SharedTile<WIDTH>& b, int first = 0,
                     int row = 0) {
    constexpr bool ALL_EXIST = WIDTH == N * 8 * PARTS || PARTS == 1;
#pragma unroll
    for (int block = 0; block < DEPTH / 16; ++block) {
        uint32 left[M][4];
        a.fragment(left, block);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            if (!ALL_EXIST && first + n >= WIDTH / 16) continue;
            uint32 right[4];
            load_transposed_matrices(right, b.address(row + 16 * block, first + n));
#pragma unroll
            for (int i = 0; i < M; ++i) {
                mma(c.x[i][2 * n], left[i], right[0], right[1]);
                mma(c.x[i][2 * n + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// --- PARTS warps that share rows ---

// Each warp has a barrier where the others arrive and it waits. In between it computes what needs no other one. Before the next
// arrivals, all pass another barrier.
static_assert(PARTS == 1 || WARPS + WARPS / PARTS < 16, "barrier 0 is that of the CTA, and there are 16");

// Publish that this warp has written its part of shared memory.
DEVICE void publish_part(int warp) {
#pragma unroll
    for (int other = 1; other < PARTS; ++other)
        arrive_at_barrier(1 + warp / PARTS * PARTS + (warp + other) % PARTS, 32 * PARTS);
}

// Wait until all others have published.
DEVICE void wait_for_parts(int warp) { wait_at_barrier(1 + warp, 32 * PARTS); }

// Wait for all warps that share the rows.
DEVICE void group_barrier(int warp) { wait_at_barrier(1 + WARPS + warp / PARTS, 32 * PARTS); }

// c += a b for the depths of other warps, whose parts of `a` (COLUMNS / PARTS columns) are in shared memory.
template <int N, int WIDTH>
DEVICE void multiply_other_parts(Accumulator<N>& c, uint32 a, int own_row, int part, const SharedTile<WIDTH>& b, int first) {
    constexpr int DEPTH = COLUMNS / PARTS;
#pragma unroll
    for (int other = 1; other < PARTS; ++other) {
        const int column = (part + other) % PARTS * DEPTH;
        const SharedOperand<COLUMNS> operand(a, own_row, thread_index() % 32, column / 16);
        multiply<DEPTH>(c, operand, b, first, column);
    }
}
