/* Work tables and tile schedules in C: what `work_tables.py` and `tile_scheduler.py` define in NumPy, bit for bit.
 *
 *   table(bands, size, rows, columns, small, boxes, only_visits)
 *       -> (visits, number of tiles[, tiles, spans])         `_best_cut` and `_table`, as bytearrays
 *   write_schedule(work, tiles, spans, order, cost, sets, together, pack, heads, repeat, full_first, ctas, late, last_sets,
 *                  sms, short, gain)
 *       fills `work`: `_serialised`, `_full_first`, `_late_ctas_get_short_ones` or `_even_ends`
 *
 * Arrays are contiguous: int64 (bands, tiles, order), int32 (spans, work) and float64 (cost). Sums are in the order of
 * `np.cumsum`. Products of floats are volatile, so that no compiler contracts one into a fused multiply-add.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { Q_START, Q_STOP, K_START, K_STOP, LO, HI, BAND };                          /* of a band */
enum { START, STOP, BEGIN, FULL, END, TILE };                                    /* of a tile */
enum { FIRST_TOKEN, STOP_TOKEN, BATCH, HEAD, FIRST_SPAN, SPANS_END, BATCH_HEAD, FIRST_COLUMN, RECORD }; /* `tile_queue` */
enum { COLUMN, TILES, ROW_START, ROW_STOP, WORK_TILES_END = 0, TICKETS = 7, MOST_TRIES = 8 };

typedef int64_t i64;

static i64 minimum(i64 a, i64 b) { return a < b ? a : b; }
static i64 maximum(i64 a, i64 b) { return a > b ? a : b; }
static i64 floored(i64 a, i64 b) { return a / b - (a % b < 0); } /* b > 0 */
static i64 ceiled(i64 a, i64 b) { return -floored(-a, b); }

/* Memory of a call. It is kept for the next one, whose pages are then mapped: no call releases the GIL. */
enum { MOST_BLOCKS = 32, KEPT = 1 << 24 };
static struct {
  char *kept;
  size_t size, used, wanted;
  void *more[MOST_BLOCKS];
  int blocks;
} memory;

/* Return uninitialised memory until `release`, or NULL. */
static void *array(i64 number, size_t size) {
  size_t bytes = ((number > 0 ? (size_t)number : 1) * size + 63) / 64 * 64;
  memory.wanted += bytes;
  if (memory.used + bytes <= memory.size) return memory.kept + (memory.used += bytes) - bytes;
  void *made = memory.blocks < MOST_BLOCKS ? PyMem_Malloc(bytes) : NULL;
  if (made) memory.more[memory.blocks++] = made;
  else PyErr_NoMemory();
  return made;
}

static void *zeros(i64 number, size_t size) {
  void *made = array(number, size);
  return made ? memset(made, 0, (number > 0 ? (size_t)number : 1) * size) : NULL;
}

static void release(void) {
  while (memory.blocks) PyMem_Free(memory.more[--memory.blocks]);
  if (memory.wanted > memory.size && memory.wanted <= KEPT) {
    PyMem_Free(memory.kept);
    memory.kept = PyMem_Malloc(memory.wanted);
    memory.size = memory.kept ? memory.wanted : 0;
  }
  memory.used = memory.wanted = 0;
}

/* ------------------------------------------------------------------ stable sorting */
/* Sort `index` (0 to n - 1) by key, stably. */
#define SORT(name, type)                                                                     \
  static int name(const type *key, i64 n, i64 *index) {                                      \
    i64 *other = array(n, sizeof(i64)), *from = index, *to = other;                          \
    if (!other) return -1;                                                                   \
    for (i64 i = 0; i < n; i++) index[i] = i;                                                \
    for (i64 width = 1; width < n; width *= 2) {                                             \
      for (i64 left = 0; left < n; left += 2 * width) {                                      \
        i64 middle = minimum(left + width, n), right = minimum(left + 2 * width, n);         \
        i64 a = left, b = middle;                                                            \
        if (b == right || key[from[b - 1]] <= key[from[b]]) { /* already in order */         \
          memcpy(to + left, from + left, (right - left) * sizeof(i64));                      \
          continue;                                                                          \
        }                                                                                    \
        for (i64 at = left; at < right; at++)                                                \
          to[at] = b == right || (a < middle && key[from[a]] <= key[from[b]]) ? from[a++] : from[b++]; \
      }                                                                                      \
      i64 *swap = from;                                                                      \
      from = to, to = swap;                                                                  \
    }                                                                                        \
    if (from != index) memcpy(index, from, n * sizeof(i64));                                 \
    return 0;                                                                                \
  }
SORT(sort_integers, i64)
SORT(sort_floats, double)

/* ------------------------------------------------------------------ the cut */
typedef struct {
  const i64 *bands; /* (6, n) */
  i64 n, size, rows, columns, small, boxes;
} Problem;

typedef struct {
  int32_t band, tile, first, last, begin, end;
} Piece;

static i64 band_field(const Problem *p, i64 band, int field) { return p->bands[field * p->n + band]; }

/* Write `_cut_starts` to `starts`, which has room for the rows over `rows`, and for two cuts a band. Return their number. */
static i64 cut_starts(const Problem *p, i64 *starts) {
  i64 number = 2 * p->n + 2, tiles = 0, at = 0;
  i64 *ends = array(number, sizeof(i64)), *index = array(number, sizeof(i64));
  if (!ends || !index) return -1;
  memcpy(ends, p->bands, 2 * p->n * sizeof(i64));
  ends[number - 2] = 0, ends[number - 1] = p->size;
  if (sort_integers(ends, number, index)) return -1;
  while (ends[index[at]] < p->size) {
    i64 row = ends[index[at]], target = minimum(row + p->rows, p->size);
    while (ends[index[at]] < target) at++;
    for (; row < ends[index[at]]; row += p->rows) starts[tiles++] = row;
  }
  return tiles;
}

static i64 tiles_before(const i64 *starts, i64 number, i64 row, int inclusive) { /* starts below `row`, or up to it */
  i64 low = 0, high = number;
  while (low < high) {
    i64 middle = (low + high) / 2;
    if (starts[middle] < row || (inclusive && starts[middle] == row)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* Count the pieces of `_cut` and their visits, in small tiles; write them to `pieces` unless it is NULL. */
static i64 cut(const Problem *p, const i64 *starts, i64 tiles, Piece *pieces, i64 *visits) {
  i64 number = 0;
  *visits = 0;
  for (i64 band = 0; band < p->n; band++) {
    i64 q_start = band_field(p, band, Q_START), q_stop = band_field(p, band, Q_STOP), k_start = band_field(p, band, K_START);
    i64 k_stop = band_field(p, band, K_STOP), lo = band_field(p, band, LO), hi = band_field(p, band, HI);
    for (i64 tile = tiles_before(starts, tiles, q_start, 1) - 1; tile < tiles && starts[tile] < q_stop; tile++) {
      i64 stop = tile + 1 < tiles ? starts[tile + 1] : p->size;
      i64 first = maximum(q_start, starts[tile]), last = minimum(q_stop, stop);
      i64 begin = maximum(k_start, first + lo), end = minimum(k_stop, last + hi);
      if (p->boxes) begin = floored(begin, p->boxes) * p->boxes;
      *visits += ceiled(end - begin, p->small);
      if (pieces)
        pieces[number] = (Piece){(int32_t)band, (int32_t)tile, (int32_t)first, (int32_t)last, (int32_t)begin, (int32_t)end};
      number++;
    }
  }
  return number;
}

/* ------------------------------------------------------------------ the table */
typedef struct {
  int32_t piece, column, number, is_full;
} Span;

/* Add up to three spans of a piece: partial, full, partial. They sort by tile, kind of tile, column, and then in the order of
 * NumPy's array: all first spans, all second, all third. Return the number of spans. */
static i64 classify(const Problem *p, const i64 *starts, i64 tiles, const Piece *x, i64 piece, i64 number, Span *spans, i64 *keys) {
  i64 start = band_field(p, x->band, K_START), stop = band_field(p, x->band, K_STOP);
  i64 lo = band_field(p, x->band, LO), hi = band_field(p, x->band, HI);
  i64 all_begin = maximum(start, x->last - 1 + lo), all_end = minimum(stop, x->first + hi + 1);
  int whole = x->first == starts[x->tile] && x->last == (x->tile + 1 < tiles ? starts[x->tile + 1] : p->size);
  if (p->boxes) whole = whole && x->last - x->first == p->rows;
  i64 count = ceiled(x->end - x->begin, p->small), full_from = ceiled(all_begin - x->begin, p->small);
  i64 full = whole ? maximum(0, floored(all_end - x->begin - full_from * p->small, p->columns)) : 0;
  if (full <= 0) full_from = count;
  i64 full_to = full_from + full * (p->columns / p->small);
  i64 from[3] = {0, full_from, full_to}, size[3] = {full_from, full, count - full_to};
  for (int kind = 0; kind < 3; kind++) {
    i64 column = x->begin + p->small * from[kind];
    if (!size[kind]) continue;
    keys[number] = ((((2 * (i64)x->tile + (kind == 1)) << 31) + column) << 2) + kind;
    spans[number++] = (Span){(int32_t)piece, (int32_t)column, (int32_t)size[kind], kind == 1};
  }
  return number;
}

/* Sort the tiles by work, the most first, stably. */
static int sort_by_work(const i64 *work, i64 tiles, i64 *order) {
  i64 most = 0, at = 0;
  for (i64 tile = 0; tile < tiles; tile++) most = maximum(most, work[tile]);
  i64 *place = zeros(most + 1, sizeof(i64));
  if (!place) return -1;
  for (i64 tile = 0; tile < tiles; tile++) place[work[tile]]++;
  for (i64 some = most; some >= 0; some--) at += place[some], place[some] = at - place[some];
  for (i64 tile = 0; tile < tiles; tile++) order[place[work[tile]]++] = tile;
  return 0;
}

/* Fill tiles (sorted by work) and spans of the table from its pieces; return the number of spans, or -1. */
static i64 fill(const Problem *p, const i64 *starts, i64 tiles, const Piece *pieces, i64 number, i64 *made, int32_t *rows) {
  Span *spans = array(3 * number, sizeof(Span));
  i64 *keys = array(3 * number, sizeof(i64)), *index = array(3 * number, sizeof(i64));
  i64 *work = zeros(tiles, sizeof(i64)), *order = array(tiles, sizeof(i64)), *unsorted = array(TILE * tiles, sizeof(i64));
  i64 kept = 0, at = 0;
  if (!spans || !keys || !index || !work || !order || !unsorted) return -1;
  for (i64 i = 0; i < number; i++) {
    kept = classify(p, starts, tiles, pieces + i, i, kept, spans, keys);
    work[pieces[i].tile] += ceiled(pieces[i].end - pieces[i].begin, p->small);
  }
  if (sort_integers(keys, kept, index) || sort_by_work(work, tiles, order)) return -1;
  for (i64 tile = 0; tile < tiles; tile++) {
    i64 *one = unsorted + TILE * tile;
    one[START] = starts[tile], one[STOP] = tile + 1 < tiles ? starts[tile + 1] : p->size, one[BEGIN] = one[FULL] = at;
    for (; at < kept && pieces[spans[index[at]].piece].tile == tile; at++) {
      const Span *span = spans + index[at];
      int32_t *row = rows + RECORD * at;
      row[COLUMN] = span->column, row[TILES] = span->number;
      for (int field = 0; field < BAND; field++)
        row[ROW_START + field] = span->is_full ? 0 : (int32_t)band_field(p, pieces[span->piece].band, field);
      if (p->boxes && !span->is_full) row[ROW_STOP] = pieces[span->piece].last;
      one[FULL] += !span->is_full;
    }
    one[END] = at;
  }
  for (i64 tile = 0; tile < tiles; tile++) memcpy(made + TILE * tile, unsorted + TILE * order[tile], TILE * sizeof(i64));
  return kept;
}

static PyObject *filled(const Problem *p, const i64 *starts, i64 tiles, double visits) {
  i64 unused, number = cut(p, starts, tiles, NULL, &unused), spans = -1;
  Piece *pieces = array(number, sizeof(Piece));
  PyObject *made = PyByteArray_FromStringAndSize(NULL, TILE * tiles * sizeof(i64));
  PyObject *rows = PyByteArray_FromStringAndSize(NULL, 3 * number * RECORD * sizeof(int32_t)), *result = NULL;
  if (pieces && made && rows) {
    cut(p, starts, tiles, pieces, &unused);
    spans = fill(p, starts, tiles, pieces, number, (i64 *)PyByteArray_AS_STRING(made), (int32_t *)PyByteArray_AS_STRING(rows));
    if (spans >= 0 && !PyByteArray_Resize(rows, spans * RECORD * sizeof(int32_t)))
      result = Py_BuildValue("dLOO", visits, (long long)tiles, made, rows);
  }
  Py_XDECREF(made);
  Py_XDECREF(rows);
  return result;
}

static PyObject *table(PyObject *self, PyObject *arguments) {
  Py_buffer bands;
  long long size, rows, columns, small, boxes;
  int only_visits;
  if (!PyArg_ParseTuple(arguments, "y*LLLLLp", &bands, &size, &rows, &columns, &small, &boxes, &only_visits)) return NULL;
  Problem p = {bands.buf, bands.len / (BAND * sizeof(i64)), size, rows, columns, small, boxes};
  i64 even = size > 0 ? ceiled(size, rows) : 0, number = -1, visits[2];
  i64 *starts = array(2 * even + 2 * p.n + 2, sizeof(i64)), *at_ends = starts + even;
  PyObject *result = NULL;
  if (starts && (number = cut_starts(&p, at_ends)) >= 0) {
    for (i64 i = 0; i < even; i++) starts[i] = rows * i;
    cut(&p, starts, even, NULL, visits);
    cut(&p, at_ends, number, NULL, visits + 1);
    double ratio = (double)(columns / small), both[2] = {visits[0] / ratio, visits[1] / ratio};
    int best = number + both[1] < even + both[0];
    result = only_visits ? Py_BuildValue("dL", both[best], (long long)(best ? number : even))
                         : filled(&p, best ? at_ends : starts, best ? number : even, both[best]);
  }
  release();
  PyBuffer_Release(&bands);
  return result;
}

/* ------------------------------------------------------------------ the schedule */
typedef struct {
  i64 n, sets, together; /* tiles in `order`; sets of heads; work tiles of a set that share a tile */
  const double *cost;    /* in `order` */
  i64 *by_cost;          /* places in `order`, shortest first */
  i64 sms;
  double share, gain; /* SHORT and GAIN of `tile_scheduler` */
} Order;

typedef struct {
  int32_t tile, owner; /* of a work tile: the place in `order`, and which heads */
} Place;

static i64 places(const Order *o) { return o->sets * o->n * o->together; }

/* Write the places in their order, but not the `moved` ones (NULL: none), and leave a gap of `width` work tiles. */
static void places_in_order(const Order *o, const char *moved, i64 gap, i64 width, Place *to) {
  i64 at = 0, place = 0;
  for (i64 set = 0; set < o->sets; set++)
    for (i64 tile = 0; tile < o->n; tile++)
      for (i64 head = 0; head < o->together; head++, place++) {
        if (moved && moved[place]) continue;
        if (at == gap) at += width;
        to[at++] = (Place){(int32_t)tile, (int32_t)(set * o->together + head)};
      }
}

static i64 number_of(const Order *o, Place x) {
  return ((i64)x.owner / o->together * o->n + x.tile) * o->together + x.owner % o->together;
}

/* Write the order of `_late_ctas_get_short_ones` for `ctas` CTAs, of which the last `late` start late. */
static int late_order(const Order *o, i64 ctas, i64 late, Place *order) {
  char *moved = zeros(places(o), 1);
  i64 found = 0;
  if (!moved) return -1;
  for (i64 i = 0; found < 2 * late; i++)
    for (i64 owner = 0; owner < o->sets * o->together && found < 2 * late; owner++, found++)
      if (found % 2 == 0) {
        Place x = {(int32_t)o->by_cost[i], (int32_t)owner};
        order[ctas - late + found / 2] = x;
        moved[number_of(o, x)] = 1;
      }
  places_in_order(o, moved, ctas - late, late, order);
  return 0;
}

/* Write the order of `_short_ones_last` from `first_set` on. `total`: of all costs. */
static int short_ones_last(const Order *o, i64 first_set, double total, Place *order) {
  i64 number = places(o), last = number, first = first_set * o->together, stop = o->sets * o->together;
  volatile double limit = o->share * total;
  double sum = 0;
  char *moved = zeros(number, 1);
  if (!moved) return -1;
  for (i64 i = 0, next; i < o->n && sum <= limit; i = next) { /* all tiles of one cost, in the order of their places */
    i64 begin = last;
    for (next = i; next < o->n && o->cost[o->by_cost[next]] == o->cost[o->by_cost[i]];) next++;
    for (i64 set = first; set < stop; set += o->together)
      for (i64 tile = i; tile < next; tile++)
        for (i64 owner = set; owner < set + o->together; owner++)
          if ((sum += o->cost[o->by_cost[i]]) <= limit) {
            Place x = {(int32_t)o->by_cost[tile], (int32_t)owner};
            moved[number_of(o, x)] = 1;
            begin--;
          }
    last = begin;
    for (i64 set = first; set < stop; set += o->together)
      for (i64 tile = i; tile < next; tile++)
        for (i64 owner = set; owner < set + o->together; owner++) {
          Place x = {(int32_t)o->by_cost[tile], (int32_t)owner};
          if (moved[number_of(o, x)]) order[begin++] = x;
        }
  }
  places_in_order(o, moved, number, 0, order);
  return 0;
}

/* `_latest` of the work tiles in this order. */
static double latest(const Order *o, const Place *order) {
  double sum = 0, found = 0;
  for (i64 i = 0; i < places(o); i++) {
    double cost = o->cost[order[i].tile];
    sum += cost;
    double end = (sum - cost) / (double)o->sms + cost;
    if (!i || end > found) found = end;
  }
  return found;
}

/* `_time`: a heap of the times at which the multiprocessors end. */
static double time_of(const Order *o, const Place *order) {
  double ends[o->sms], found = 0;
  memset(ends, 0, sizeof(ends));
  for (i64 i = 0; i < places(o); i++) {
    double end = ends[0] + o->cost[order[i].tile];
    int at = 0, child;
    if (end > found) found = end;
    while ((child = 2 * at + 1) < o->sms) {
      if (child + 1 < o->sms && ends[child + 1] < ends[child]) child++;
      if (ends[child] >= end) break;
      ends[at] = ends[child], at = child;
    }
    ends[at] = end;
  }
  return found;
}

static i64 tries(const Order *o, i64 last_sets) { return o->sets <= last_sets ? 1 : last_sets - 1; }

/* Change the order to that of `_even_ends`, where it gains. */
static int even_order(const Order *o, i64 last_sets, Place *order) {
  Place *room = array(tries(o, last_sets) * places(o), sizeof(Place));
  double total = 0, before, times[MOST_TRIES], best;
  if (!room) return -1;
  for (i64 i = 0; i < places(o); i++) total += o->cost[order[i].tile];
  volatile double least = total / (double)o->sms, gain = o->gain * least, half = o->gain / 2 * least;
  if (o->sets == 1 || latest(o, order) - least <= gain) return 0;
  if ((before = time_of(o, order)) - least <= gain) return 0;
  volatile double enough = least + half, gained = before - gain;
  i64 tried = 0;
  do {
    Place *some = room + tried * places(o);
    i64 number = o->sets <= last_sets ? o->sets : 2 + tried;
    if (short_ones_last(o, o->sets - number, total, some)) return -1;
    double bound = latest(o, some);
    times[tried] = bound <= (enough < gained ? enough : gained) ? bound : time_of(o, some);
  } while (times[tried++] > enough && tried < tries(o, last_sets));
  best = times[0];
  for (i64 i = 1; i < tried; i++) best = times[i] < best ? times[i] : best;
  i64 fewest = 0;
  while (times[fewest] > best + half) fewest++;
  if (before - times[fewest] > gain) memcpy(order, room + fewest * places(o), places(o) * sizeof(Place));
  return 0;
}

typedef struct {
  const i64 *tiles, *order;
  const int32_t *spans;
  i64 sets, together, pack, heads, repeat;
  int full_first;
} Schedule;

static int write_work_tiles(const Schedule *s, const Order *o, const Place *order, i64 first_span, int32_t *work) {
  int32_t *of_tile = zeros(RECORD * (o->n + s->sets * s->together), sizeof(int32_t)), *of_head = of_tile + RECORD * o->n;
  if (!of_tile) return -1;
  for (i64 i = 0; i < o->n; i++) {
    const i64 *tile = s->tiles + TILE * s->order[i];
    int32_t *record = of_tile + RECORD * i;
    record[FIRST_TOKEN] = (int32_t)tile[START], record[STOP_TOKEN] = (int32_t)tile[STOP];
    record[FIRST_SPAN] = (int32_t)(first_span + RECORD * s->repeat * tile[BEGIN]);
    record[SPANS_END] = (int32_t)(first_span + RECORD * s->repeat * tile[END]);
    record[FIRST_COLUMN] = work[record[FIRST_SPAN] + COLUMN];
  }
  for (i64 i = 0; i < s->sets * s->together; i++) {
    i64 owner = s->pack * i;
    int32_t *record = of_head + RECORD * i;
    record[BATCH] = (int32_t)(owner / s->heads), record[HEAD] = (int32_t)(owner % s->heads), record[BATCH_HEAD] = (int32_t)owner;
  }
  for (i64 i = 0; i < places(o); i++) {
    const int32_t *tile = of_tile + RECORD * order[i].tile, *owner = of_head + RECORD * order[i].owner;
    for (int field = 0; field < RECORD; field++) work[RECORD * (i + 1) + field] = tile[field] | owner[field];
  }
  return 0;
}

static void write_spans(const Schedule *s, i64 tiles, int32_t *to) {
  for (i64 i = 0; i < tiles; i++) {
    const i64 *tile = s->tiles + TILE * i;
    i64 partial = tile[FULL] - tile[BEGIN], full = tile[END] - tile[FULL], size = RECORD * sizeof(int32_t);
    for (i64 copy = 0; copy < s->repeat; copy++) {
      int32_t *at = to + RECORD * (s->repeat * tile[BEGIN] + copy * (partial + full));
      memcpy(at + (s->full_first ? RECORD * full : 0), s->spans + RECORD * tile[BEGIN], partial * size);
      memcpy(at + (s->full_first ? 0 : RECORD * partial), s->spans + RECORD * tile[FULL], full * size);
    }
  }
}

static PyObject *write_schedule(PyObject *self, PyObject *arguments) {
  Py_buffer work, tiles, spans, order, cost;
  long long sets, together, pack, heads, repeat, ctas, late, last_sets, sms;
  double share, gain;
  int full_first;
  if (!PyArg_ParseTuple(arguments, "w*y*y*y*y*LLLLLpLLLLdd", &work, &tiles, &spans, &order, &cost, &sets, &together, &pack,
                        &heads, &repeat, &full_first, &ctas, &late, &last_sets, &sms, &share, &gain))
    return NULL;
  Schedule s = {tiles.buf, order.buf, spans.buf, sets, together, pack, heads, repeat, full_first};
  Order o = {order.len / sizeof(i64), sets, together, cost.buf, NULL, sms, share, gain};
  i64 number = places(&o), first_span = RECORD * (1 + number), need = first_span + repeat * (i64)(spans.len / sizeof(int32_t));
  Place *made = array(number, sizeof(Place));
  int32_t *to = work.buf;
  o.by_cost = array(o.n, sizeof(i64));
  if ((i64)(work.len / sizeof(int32_t)) != need) PyErr_SetString(PyExc_ValueError, "work has another size");
  else if (tries(&o, last_sets) > MOST_TRIES) PyErr_SetString(PyExc_ValueError, "too many sets of heads are tried");
  else if (made && o.by_cost && !((late || last_sets) && sort_floats(o.cost, o.n, o.by_cost))) {
    memset(to, 0, RECORD * sizeof(int32_t));
    to[WORK_TILES_END] = (int32_t)first_span, to[TICKETS] = (int32_t)need;
    write_spans(&s, tiles.len / (TILE * sizeof(i64)), to + first_span);
    if (late) late_order(&o, ctas, late, made);
    else places_in_order(&o, NULL, number, 0, made);
    if (!late && last_sets && number) even_order(&o, last_sets, made);
    if (number && !PyErr_Occurred()) write_work_tiles(&s, &o, made, first_span, to);
  }
  release();
  PyBuffer_Release(&work), PyBuffer_Release(&tiles), PyBuffer_Release(&spans), PyBuffer_Release(&order), PyBuffer_Release(&cost);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"table", table, METH_VARARGS, "Return visits, tiles and spans of the cheaper cut."},
    {"write_schedule", write_schedule, METH_VARARGS, "Write the numbers that `tile_queue` reads."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "canon_tables", NULL, -1, methods};

PyMODINIT_FUNC PyInit_canon_tables(void) { return PyModule_Create(&module); }
