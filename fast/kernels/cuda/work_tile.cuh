// Work tiles: the part of the work table (fast/tiles.py) that a CTA computes, and the order in which it visits tiles.
#pragma once

#include "params.cuh"

constexpr int TILE_FIELDS = 5;
constexpr int SPAN_FIELDS = 8;  // first column, number of tiles; the band's row start, stop, column start, stop, lo, hi
constexpr int EVERY_TOKEN = 1 << 30;

// The rows start:stop of one head. Spans partial:full need comparisons with their band, spans full:end do not.
struct WorkTile {
    int start, stop, partial, full, end;
    int batch, head;
};

// Return the work tile of this CTA. Consecutive CTAs take the same tile of `l2_heads` heads, so that tensors which these
// heads share stay in the L2 cache. Each head starts with its longest tile.
// The gradient kernels call it before and after their loop: then the loop needs no registers for the fields that only the end uses.
DEVICE WorkTile cta_work_tile(const int* tiles, int count, int heads, int l2_heads) {
    int cta = cta_index();
    int batch_head = cta / (count * l2_heads) * l2_heads + cta % l2_heads;
    const int* entry = tiles + cta % (count * l2_heads) / l2_heads * TILE_FIELDS;
    WorkTile tile;
    tile.start = read_constant(entry);
    tile.stop = read_constant(entry + 1);
    tile.partial = read_constant(entry + 2);
    tile.full = read_constant(entry + 3);
    tile.end = read_constant(entry + 4);
    tile.batch = batch_head / heads;
    tile.head = batch_head % heads;
    return tile;
}

// A tile that a stage of shared memory holds. No span from `WorkTile::end` on exists: it is the end of the visits.
struct Visit {
    int span, column;  // the span, and the first column of the tile

    DEVICE explicit Visit(uint32 place) {
        int both[2];
        read_shared(both, place);
        span = both[0], column = both[1];
    }
};

constexpr int VISIT_BYTES = 8;

// A walk over the tiles that a work tile visits, span after span. Each tile is visited once for each of `heads` heads. Loads
// follow the walk. It writes each `Visit` to shared memory, where the MMAs find it STAGES - 1 tiles later.
struct Walk {
    int span, full, end;
    int column, stop;           // first column of the tile, end of the span
    int head;
    int band_start, band_stop;  // columns of the band: others may hold NaN and are loaded as 0

    DEVICE Walk(const int* spans, const WorkTile& tile) : span(tile.partial), full(tile.full), end(tile.end), head(0) {
        enter(spans);
    }

    DEVICE bool active() const { return span < end; }

    DEVICE void announce(uint32 place) const {
        if (thread_index() != 0) return;
        write_shared(place, (uint32)span);
        write_shared(place + 4, (uint32)column);
    }

    DEVICE void next(const int* spans, int heads) {
        if (++head < heads) return;
        head = 0;
        column += COLUMNS;
        if (column < stop) return;
        ++span;
        enter(spans);
    }

    DEVICE void enter(const int* spans) {
        if (!active()) return;
        const int* entry = spans + (int64)span * SPAN_FIELDS;
        const bool is_full = span >= full;
        column = read_constant(entry);
        stop = column + COLUMNS * read_constant(entry + 1);
        band_start = is_full ? 0 : read_constant(entry + 4);
        band_stop = is_full ? EVERY_TOKEN : read_constant(entry + 5);
    }
};
