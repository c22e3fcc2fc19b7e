// Comparisons with the band of a partial tile.
#pragma once

#include "mma.cuh"
#include "work_tile.cuh"

// The columns that a lane's rows (lane / 4 + 8 r of its warp) see: left <= column < right, from the tile's first column.
struct Visible {
    int left[2 * M], right[2 * M];

    // `row`: first row of the warp. A span is two aligned reads of 16 bytes.
    DEVICE Visible(const int* spans, const Visit& visit, int row, int lane) {
        int ends[4], band[4];
        read_constants(ends, spans + (int64)visit.span * SPAN_FIELDS);
        read_constants(band, spans + (int64)visit.span * SPAN_FIELDS + 4);
        for (int r = 0; r < 2 * M; ++r) {
            int i = row + lane / 4 + 8 * r;
            bool in_band = i >= ends[2] && i < ends[3];
            int first = i + band[2], last = i + band[3] + 1;
            left[r] = (first > band[0] ? first : band[0]) - visit.column;
            right[r] = (last < band[1] ? last : band[1]) - visit.column;
            if (!in_band) right[r] = left[r];
        }
    }

    // Return whether no row of the warp sees a column.
    DEVICE bool none() const {
        bool outside = true;
        for (int r = 0; r < 2 * M; ++r) outside &= right[r] <= left[r] || right[r] <= 0 || left[r] >= COLUMNS;
        return all_lanes(outside);
    }

    // Return whether every row of the warp sees every column.
    DEVICE bool all() const {
        bool inside = true;
        for (int r = 0; r < 2 * M; ++r) inside &= left[r] <= 0 && right[r] >= COLUMNS;
        return all_lanes(inside);
    }

    DEVICE bool sees(int r, int column) const { return column >= left[r] && column < right[r]; }
};

// Replace invisible elements by `value`. The first accumulator belongs to column `first` of the tile.
template <int N>
DEVICE void hide(Accumulator<N>& x, const Visible& visible, int first, float value) {
    int column = first + 2 * (thread_index() % 4);
    x.each([&](float& score, int i, int n, int e) {
        if (!visible.sees(2 * i + e / 2, column + 8 * n + e % 2)) score = value;
    });
}
