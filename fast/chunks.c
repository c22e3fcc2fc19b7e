/* The chunks of a mask in C, as `canon.reference.planner` defines them. `planner.c` continues this file.
 *
 * Keys are cut into *cells*. Arrays are int64 and contiguous.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { Q_START, Q_STOP, K_START, K_STOP, LO, HI };
enum { RESERVE = 8, BATCH = 2, WEIGHT = 5, PARTNERS = 8, SLACKS = 3, STARTS = 5, MOST_BLOCKS = 64 };

typedef int64_t i64;
typedef __int128 i128;

static i64 minimum(i64 a, i64 b) { return a < b ? a : b; }
static i64 maximum(i64 a, i64 b) { return a > b ? a : b; }
static i64 floored(i64 a, i64 b) { return a / b - (a % b < 0); } /* b > 0 */
static i64 ceiled(i64 a, i64 b) { return -floored(-a, b); }

/* Memory of a call: zeros, freed together. `full` once an allocation has failed. */
typedef struct {
  void *blocks[MOST_BLOCKS];
  int number, full;
} Memory;

static void *zeros(Memory *memory, i64 number, size_t size) {
  void *made = memory->number < MOST_BLOCKS ? calloc(number > 0 ? number : 1, size) : NULL;
  if (made) memory->blocks[memory->number++] = made;
  else memory->full = 1;
  return made;
}

typedef struct {
  i64 first, last;
} Interval; /* of tokens, then of cells */

typedef struct {
  i64 key;
  i64 number;
} Keyed;

static int by_key(const void *a, const void *b) { /* then by number, so the order is stable */
  const Keyed *x = a, *y = b;
  return x->key != y->key ? (x->key > y->key) - (x->key < y->key) : (x->number > y->number) - (x->number < y->number);
}
static int by_value(const void *a, const void *b) { return (*(i64 *)a > *(i64 *)b) - (*(i64 *)a < *(i64 *)b); }

/* ------------------------------------------------------------------ chunks */
typedef struct {
  const i64 *bands; /* (6, n) */
  i64 n, tokens, sequences, ranks, chunk, cells_per_us, tokens_per_us, swaps_per_chunk; /* tokens of a sequence */
  i64 slacks[SLACKS][2];
} Problem;

typedef struct {
  i64 ranks, slots, total, count, width, small_ones, bound, allowed, need_of_all, cells_per_us;
  i64 *area, *work, *own, *need; /* of each chunk */
  char *small;
  i64 *begin;          /* of each chunk, and behind the last: its intervals needs[begin[i]:begin[i + 1]] */
  Interval *needs;     /* of cells */
  i64 *cells, *owner;  /* of each cell: its size, and the chunk that holds it */
} Chunks;

static i64 sum_of(i64 start, i64 stop) { return (stop * (stop - 1) - start * (start - 1)) / 2; }

static i64 sum_min(i64 start, i64 stop, i64 offset, i64 most) { /* of min(i + offset, most) */
  i64 bend = minimum(maximum(most - offset, start), stop);
  return sum_of(start, bend) + (bend - start) * offset + (stop - bend) * most;
}

static i64 sum_max(i64 start, i64 stop, i64 offset, i64 least) { /* of max(i + offset, least) */
  i64 bend = minimum(maximum(least - offset, start), stop);
  return sum_of(bend, stop) + (stop - bend) * offset + (bend - start) * least;
}

/* Count the pairs of a band and a chunk with a common row; add their areas, and write their keys unless NULL. */
static i64 overlaps(const Problem *p, i64 *area, Interval *keys, Keyed *order) {
  i64 number = 0;
  for (i64 band = 0; band < p->n; band++) {
    const i64 *b = p->bands + band;
    i64 q_start = b[Q_START * p->n], q_stop = b[Q_STOP * p->n], lo = b[LO * p->n], hi = b[HI * p->n];
    for (i64 row = q_start, stop; row < q_stop; row = stop, number++) {
      i64 sequence = row / p->tokens, chunk = row % p->tokens / p->chunk;
      stop = minimum(minimum(q_stop, (sequence + 1) * p->tokens), sequence * p->tokens + (chunk + 1) * p->chunk);
      if (!keys) continue;
      i64 column = b[K_START * p->n], column_stop = b[K_STOP * p->n];
      area[chunk] += sum_min(row, stop, hi + 1, column_stop) - sum_max(row, stop, lo, column);
      keys[number] = (Interval){maximum(column, row + lo), minimum(column_stop, stop + hi)};
      order[number] = (Keyed){chunk, number};
    }
  }
  return number;
}

static int by_first(const void *a, const void *b) {
  const Interval *x = a, *y = b;
  return (x->first > y->first) - (x->first < y->first);
}

/* Sort some intervals, and unite those that overlap or touch. Return how many are left. */
static i64 united(Interval *some, i64 number) {
  i64 kept = 0;
  qsort(some, number, sizeof(Interval), by_first);
  for (i64 i = 0; i < number; i++)
    if (kept && some[i].first <= some[kept - 1].last) some[kept - 1].last = maximum(some[kept - 1].last, some[i].last);
    else some[kept++] = some[i];
  return kept;
}

static i64 place_of(const i64 *edges, i64 number, i64 token) {
  i64 low = 0, high = number;
  while (low < high) {
    i64 middle = (low + high) / 2;
    if (edges[middle] < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* Cut the keys into cells at the ends of all needs and chunks. */
static void cut_into_cells(const Problem *p, Chunks *c, i64 needs, Memory *memory) {
  i64 pieces = c->count * p->sequences, number = 0, unique = 0;
  i64 *edges = zeros(memory, 2 * needs + pieces + 1, sizeof(i64));
  if (memory->full) return;
  for (i64 i = 0; i < needs; i++) edges[number++] = c->needs[i].first, edges[number++] = c->needs[i].last;
  for (i64 piece = 0; piece < pieces; piece++)
    edges[number++] = piece / c->count * p->tokens + piece % c->count * p->chunk;
  edges[number++] = p->sequences * p->tokens;
  qsort(edges, number, sizeof(i64), by_value);
  for (i64 i = 0; i < number; i++)
    if (!i || edges[i] != edges[unique - 1]) edges[unique++] = edges[i];
  c->width = unique - 1;
  c->cells = zeros(memory, c->width, sizeof(i64)), c->owner = zeros(memory, c->width, sizeof(i64));
  if (memory->full) return;
  for (i64 cell = 0; cell < c->width; cell++) {
    c->cells[cell] = (edges[cell + 1] - edges[cell]) * p->cells_per_us;
    c->owner[cell] = edges[cell] % p->tokens / p->chunk;
    c->need_of_all += c->cells[cell];
    c->own[c->owner[cell]] += c->cells[cell];
  }
  for (i64 chunk = 0; chunk < c->total; chunk++)
    for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++) {
      Interval *x = c->needs + i;
      *x = (Interval){place_of(edges, unique, x->first), place_of(edges, unique, x->last)};
      for (i64 cell = x->first; cell < x->last; cell++) c->need[chunk] += c->cells[cell];
    }
}

static void fill_chunks(const Problem *p, Chunks *c, Memory *memory) {
  c->count = ceiled(p->tokens, p->chunk);
  c->ranks = p->ranks, c->slots = ceiled(c->count, p->ranks), c->cells_per_us = p->cells_per_us;
  c->total = c->ranks * c->slots;
  i64 pairs = overlaps(p, NULL, NULL, NULL), most = pairs + c->count * p->sequences, at = 0, needs = 0, sum = 0;
  Interval *keys = zeros(memory, pairs, sizeof(Interval));
  Keyed *order = zeros(memory, pairs, sizeof(Keyed));
  c->area = zeros(memory, 4 * c->total, sizeof(i64)), c->work = c->area + c->total;
  c->own = c->work + c->total, c->need = c->own + c->total;
  c->small = zeros(memory, c->total, 1), c->begin = zeros(memory, c->total + 1, sizeof(i64));
  c->needs = zeros(memory, most, sizeof(Interval));
  if (memory->full) return;
  overlaps(p, c->area, keys, order);
  qsort(order, pairs, sizeof(Keyed), by_key);
  for (i64 chunk = 0; chunk < c->total; chunk++) {
    i64 start = minimum(chunk * p->chunk, p->tokens), stop = minimum(start + p->chunk, p->tokens), number = 0;
    Interval *own = c->needs + needs;
    for (i64 sequence = 0; start < stop && sequence < p->sequences; sequence++)
      own[number++] = (Interval){sequence * p->tokens + start, sequence * p->tokens + stop};
    for (; at < pairs && order[at].key == chunk; at++) own[number++] = keys[order[at].number];
    c->begin[chunk] = needs;
    needs += united(own, number);
    c->small[chunk] = stop - start < p->chunk;
    c->small_ones += c->small[chunk];
    c->work[chunk] = c->area[chunk] * p->tokens_per_us;
    sum += c->area[chunk], c->bound = maximum(c->bound, c->area[chunk]);
  }
  c->begin[c->total] = needs;
  c->bound = maximum(c->bound, ceiled(sum, c->ranks));
  c->allowed = (i64)((i128)c->bound * p->slacks[SLACKS - 1][0] / p->slacks[SLACKS - 1][1]) * p->tokens_per_us;
  cut_into_cells(p, c, needs, memory);
}

static i64 between(const Chunks *c, const i64 *prefix, i64 chunk) {
  i64 sum = 0;
  for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++)
    sum += prefix[c->needs[i].last] - prefix[c->needs[i].first];
  return sum;
}
