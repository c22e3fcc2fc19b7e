// Arguments and compile-time constants of the kernels.
//
// launch.py packs a `Params` byte by byte: fields of 8 bytes, then of 4, in order. Strides count elements; the last one is 1.
#pragma once

#include "ptx.cuh"

constexpr int D = CANON_D;              // of q, k, dq, dk
constexpr int DV = CANON_DV;            // of v, out, dout, dv
constexpr int ROWS = CANON_ROWS;        // of a work tile: queries, or keys in dkdv.cu
constexpr int COLUMNS = CANON_COLUMNS;  // of a visited tile
constexpr int WARPS = CANON_WARPS;
constexpr int PARTS = CANON_PARTS;    // warps that share rows and divide columns
constexpr int STAGES = CANON_STAGES;  // visited tiles in shared memory

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS * PARTS / WARPS;
constexpr int M = WARP_ROWS / 16;                // MMA tiles along them
constexpr int ELEMENT_BYTES = 2;

static_assert(D % 16 == 0 && DV % 16 == 0 && D <= 256 && DV <= 256, "MMAs have a depth of 16");
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32, "a warp owns one or two MMA tiles of rows");
static_assert(CANON_PARTIAL_COLUMNS == COLUMNS, "a warp skips the masked part of a tile, so narrow tiles gain nothing");
static_assert(STAGES >= 2, "a tile is loaded while another one is used");

using Element = unsigned short;  // bits of a bfloat16 or float16
#if CANON_OUT_FLOAT
using Result = float;
#else
using Result = Element;
#endif

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Return lse log2(e), and 1e30 for -inf: then the weight of a score of -inf is 0, not NaN.
DEVICE float base_2(float lse) { return lse == -INFINITY ? 1e30f : lse * LOG2_E; }

struct Strides {
    int64 batch, token, head;
};

struct StatisticStrides {  // of lse and delta (b, h, t)
    int64 batch, head;
};

struct ForwardParams {
    const Element *q, *k, *v;
    Result* out;
    float* lse;
    const int *tiles, *spans;
    Strides q_strides, k_strides, v_strides, out_strides;
    StatisticStrides lse_strides;
    float scale_log2;  // |scale| log2(e), or log2(e) if sign is 0
    int sign;          // of the scale, 1, -1 or 0: multiplies q
    int tile_count, heads, group, l2_heads;
};

struct DqParams {
    const Element *q, *k, *v, *dout;
    const float *lse, *delta;
    Result* dq;
    const int *tiles, *spans;
    Strides q_strides, k_strides, v_strides, dout_strides, dq_strides;
    StatisticStrides statistic_strides;
    float scale;
    int tile_count, heads, group, l2_heads;
};

struct DkdvParams {
    const Element *q, *k, *v, *dout;
    const float *lse, *delta;
    Result *dk, *dv;
    const int *tiles, *spans;
    Strides q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides;
    StatisticStrides statistic_strides;
    float scale;
    int tile_count, owners, heads_per_owner, group, l2_heads;
};
