// Tiles in shared memory: their layout, their loads from global memory, and the way of results back.
//
// Shared memory has 32 banks of 4 bytes: 8 chunks of 16 bytes are read at once if they differ modulo 128 bytes. ldmatrix reads
// one chunk of 8 rows, often in the same banks without a swizzle:
//
//     WIDTH = 64, one row is 128 bytes; chunk c of row r is stored at place c ^ (r % 8)
//
//     place    0  1  2  3  4  5  6  7
//     row 0    0  1  2  3  4  5  6  7
//     row 1    1  0  3  2  5  4  7  6
//
// Narrower rows, and widths like 80, need fewer bits of r.
#pragma once

#include "params.cuh"

template <int WIDTH>
struct Swizzle {
    static constexpr int CHUNKS = WIDTH / 8;
    static constexpr int BITS = CHUNKS % 8 == 0 ? 3 : CHUNKS % 4 == 0 ? 2 : 1;

    // The bits that are exchanged in the chunk numbers of a row; equal for rows r and r + 8.
    DEVICE static int key(int row) { return (row >> (3 - BITS)) & ((1 << BITS) - 1); }

    DEVICE static uint32 offset(int row, int chunk) {
        return row * (ELEMENT_BYTES * WIDTH) + ((chunk ^ key(row)) << 4);
    }
};

// The addresses that a lane gives to ldmatrix, for 16 rows and columns of a tile:
//
//                 columns 0-7      columns 8-15
//     rows 0-7    matrix 0         matrix 2          lane = 8 (matrix) + row of the matrix
//     rows 8-15   matrix 1         matrix 3
//
// This is the register order of a left operand, and of a right one transposed by its load. A right operand whose rows are the
// product's columns needs matrices 1 and 2 exchanged (`by_columns`), or the compiler moves every register.
DEVICE int by_columns(int lane) { return lane % 8 + (lane / 8 % 2) * 16 + lane / 16 * 8; }

template <int WIDTH>
struct SharedTile {
    static constexpr int PITCH = ELEMENT_BYTES * WIDTH;
    static constexpr int LOW = (1 << Swizzle<WIDTH>::BITS) - 1;
    static constexpr bool WHOLE = PITCH % 128 == 0;  // the swizzle's bits are those of the address
    uint32 row_address;
    uint32 place;  // of the left or right matrices, swizzled by this lane's row

    DEVICE SharedTile(uint32 tile, int lane)
        : row_address(tile + (lane % 16) * PITCH), place(((lane / 16) ^ Swizzle<WIDTH>::key(lane % 16)) << 4) {
        if constexpr (WHOLE) row_address += place;
    }

    // Return the address for rows from `row`, a multiple of 8, and columns from 16 `block`.
    DEVICE uint32 address(int row, int block) const {
        int swizzled = (2 * block & LOW) << 4, rest = (2 * block & ~LOW) << 4;
        if constexpr (WHOLE) return (row_address ^ swizzled) + (row * PITCH + rest);
        return row_address + (place ^ swizzled) + (row * PITCH + rest);
    }
};

// Begin to load TILE_ROWS tokens of one head, from `first` on. Tokens outside begin:end become 0, unread.
template <int TILE_ROWS, int WIDTH>
DEVICE void load_tile(uint32 tile, const Element* head, int64 stride, int first, int begin, int end) {
    constexpr int CHUNKS = WIDTH / 8;
    constexpr int ALL = TILE_ROWS * CHUNKS;
    constexpr int STEPS = (ALL + THREADS - 1) / THREADS;
    if constexpr (THREADS % (8 * CHUNKS) == 0 && ALL % THREADS == 0) {  // a thread keeps its chunk and swizzle
        constexpr int ROW_STEP = THREADS / CHUNKS;
        int row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
        const Element* source = head + (first + row) * stride + chunk * 8;
        uint32 target = tile + Swizzle<WIDTH>::offset(row, chunk);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            uint32 place = first + row + i * ROW_STEP - begin;  // large if the token is before `begin`
            copy_16_bytes(target + i * ROW_STEP * ELEMENT_BYTES * WIDTH, source, place < (uint32)(end - begin));
            source += ROW_STEP * stride;
        }
    } else {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int index = thread_index() + i * THREADS;
            int row = index / CHUNKS, chunk = index % CHUNKS;
            bool valid = first + row >= begin && first + row < end;
            if (ALL % THREADS == 0 || index < ALL)
                copy_16_bytes(tile + Swizzle<WIDTH>::offset(row, chunk), head + (first + row) * stride + chunk * 8, valid);
        }
    }
}

// Begin to load COLUMNS values of lse, then of delta, from token `first` on; 0 outside begin:end.
DEVICE void load_statistics(uint32 target, const float* lse, const float* delta, int first, int begin, int end) {
#pragma unroll
    for (int i = 0; i < (2 * COLUMNS + THREADS - 1) / THREADS; ++i) {
        int index = thread_index() + i * THREADS, token = first + index % COLUMNS;
        const float* source = (index < COLUMNS ? lse : delta) + token;
        if (index < 2 * COLUMNS) copy_4_bytes(target + 4 * index, source, token >= begin && token < end);
    }
}

// Round a warp's accumulators to 16 bits, to the rows from `row` and chunks from `chunk` on.
template <int WIDTH, int N>
DEVICE void write_tile(uint32 tile, int row, int chunk, const float (&x)[M][N][4]) {
    int lane = thread_index() % 32;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint32 place = tile + Swizzle<WIDTH>::offset(row + 16 * i + lane / 4, chunk + n) + 4 * (lane % 4);
            write_shared(place, pack(x[i][n][0], x[i][n][1]));
            write_shared(place + 8 * ELEMENT_BYTES * WIDTH, pack(x[i][n][2], x[i][n][3]));
        }
}

DEVICE void write_scalar(float* target, float x) { *target = x; }

DEVICE void write_scalar(Element* target, float x) { *target = (Element)(pack(x, 0.0f) & 0xffff); }

// Return whether rows begin at multiples of 16 bytes.
template <class Number>
DEVICE bool is_aligned(const Number* head, int64 stride) {
    return ((unsigned long long)head | (unsigned long long)(stride * sizeof(Number))) % 16 == 0;
}

// Write `rows` rows of a warp's results, BLOCKS blocks of 16 columns, to `target` with this stride.
//
// float32: 4 lanes write 32 consecutive bytes from registers. 16 bits: through `staging`, WARP_ROWS x 16 BLOCKS elements of the
// warp; then 2 BLOCKS lanes write one row, 16 bytes each.
template <int BLOCKS>
DEVICE void write_rows(const float (&x)[M][2 * BLOCKS][4], uint32 staging, Result* target, int64 stride, int rows, int width,
                       int lane) {
    bool aligned = is_aligned(target, stride);
    if (!aligned || sizeof(Result) == 4) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = 16 * i + 8 * half + lane / 4;
#pragma unroll
                for (int n = 0; n < 2 * BLOCKS; ++n) {
                    int column = 8 * n + 2 * (lane % 4);
                    if (row >= rows || column >= width) continue;
                    Result* place = target + row * stride + column;
                    if (sizeof(Result) == 4 && aligned) {
                        write_global(place, x[i][n][2 * half], x[i][n][2 * half + 1]);
                    } else {
                        write_scalar(place, x[i][n][2 * half]);
                        write_scalar(place + 1, x[i][n][2 * half + 1]);
                    }
                }
            }
        return;
    }
    using Layout = Swizzle<16 * BLOCKS>;
    write_tile<16 * BLOCKS>(staging, 0, 0, x);
    warp_barrier();
    for (int index = lane; index < WARP_ROWS * 2 * BLOCKS; index += 32) {
        int row = index / (2 * BLOCKS), chunk = index % (2 * BLOCKS);
        if (row >= rows || 8 * chunk >= width) continue;
        uint32 pairs[4];
        read_shared(pairs, staging + Layout::offset(row, chunk));
        write_global(target + row * stride + 8 * chunk, pairs);
    }
    warp_barrier();
}
