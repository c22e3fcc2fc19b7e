// Work tiles of the work table, and the order in which a CTA visits tiles.
#pragma once

#include "params.cuh"

constexpr int TILE_FIELDS = 5;
constexpr int SPAN_FIELDS = 8;  // first column, number of tiles; the band's row start, stop, column start, stop, lo, hi
constexpr int EVERY_TOKEN = 1 << 30;

// The rows start:stop of one head. Spans partial:full need their band's mask, spans full:end do not.
struct WorkTile {
    int start, stop, partial, full, end;
    int batch, head;
};

// Return this CTA's work tile. Consecutive CTAs take the same tile of `l2_heads` heads, which share tensors in L2; the longest
// first. Gradient kernels call it before and after their loop, to save registers.
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

// A visited tile: span after span, each tile once for each of `heads` heads.
struct Visit {
    int span, column, stop;     // first column of the tile, end of the span
    int head;                   // from the owner's first head
    int band_start, band_stop;  // columns outside may hold NaN: load 0

    DEVICE void enter(const WorkTile& tile, const int* spans) {
        if (span >= tile.end) return;  // the end of the visits
        const int* entry = spans + (int64)span * SPAN_FIELDS;
        const bool is_full = span >= tile.full;
        column = read_constant(entry);
        stop = column + COLUMNS * read_constant(entry + 1);
        band_start = is_full ? 0 : read_constant(entry + 4);
        band_stop = is_full ? EVERY_TOKEN : read_constant(entry + 5);
    }

    DEVICE void next(const WorkTile& tile, const int* spans, int heads) {
        if (++head < heads) return;
        head = 0;
        column += COLUMNS;
        if (column < stop) return;
        ++span;
        enter(tile, spans);
    }
};

// A ring of visits in shared memory, which saves 8 registers. One thread writes visit j + STAGES while tile j is computed.
struct Visits {
    static constexpr int SLOTS = STAGES + 1, BYTES = 32;
    uint32 ring;

    DEVICE uint32 place(int slot) const { return ring + slot * BYTES; }

    DEVICE static int following(int slot) { return slot + 1 == SLOTS ? 0 : slot + 1; }

    // Write the first STAGES visits, visible after a barrier.
    DEVICE void begin(const WorkTile& tile, const int* spans, int heads) const {
        if (thread_index() != 0) return;
        Visit visit = {tile.partial, 0, 0, 0, 0, 0};
        visit.enter(tile, spans);
        for (int slot = 0; slot < STAGES; ++slot, visit.next(tile, spans, heads)) write(slot, visit);
    }

    // Write the visit that follows that of `slot`.
    DEVICE void proceed(int slot, const WorkTile& tile, const int* spans, int heads) const {
        if (thread_index() != 0) return;
        Visit visit = read_all(slot);
        visit.next(tile, spans, heads);
        write(following(slot), visit);
    }

    DEVICE void write(int slot, const Visit& visit) const {
        write_shared(place(slot), {(uint32)visit.span, (uint32)visit.column, (uint32)visit.stop, (uint32)visit.head});
        write_shared(place(slot) + 16, (uint32)visit.band_start);
        write_shared(place(slot) + 20, (uint32)visit.band_stop);
    }

    // Return a visit without the columns of its band.
    DEVICE Visit read(int slot) const {
        uint32 x[4];
        read_shared(x, place(slot));
        return {(int)x[0], (int)x[1], (int)x[2], (int)x[3], 0, 0};
    }

    DEVICE Visit read_all(int slot) const {
        int band[2];
        read_shared(band, place(slot) + 16);
        Visit visit = read(slot);
        visit.band_start = band[0], visit.band_stop = band[1];
        return visit;
    }
};

constexpr int VISIT_BYTES = Visits::SLOTS * Visits::BYTES;
