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

static void *array(i64 number, size_t size) {
  void *made = PyMem_Calloc(number > 0 ? number : 1, size);
  if (!made) PyErr_NoMemory();
  return made;
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
    PyMem_Free(other);                                                                       \
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
  i64 band, tile, first, last, begin, end;
} Piece;

static i64 band_field(const Problem *p, i64 band, int field) { return p->bands[field * p->n + band]; }

/* Write `_cut_starts` to `starts`, which has room for the rows over `rows`, and for two cuts a band. Return their number. */
static i64 cut_starts(const Problem *p, i64 *starts) {
  i64 number = 2 * p->n + 2, tiles = -1;
  i64 *ends = array(2 * number, sizeof(i64)), *sorted = ends + number, *index = array(number, sizeof(i64));
  if (ends && index) {
    memcpy(ends, p->bands, 2 * p->n * sizeof(i64));
    ends[number - 1] = p->size;
    if (!sort_integers(ends, number, index)) {
      tiles = 0;
      for (i64 i = 0; i < number; i++) sorted[i] = ends[index[i]];
      i64 at = 0;
      while (sorted[at] < p->size) {
        i64 target = minimum(sorted[at] + p->rows, p->size), next = at;
        while (sorted[next] < target) next++;
        for (i64 row = sorted[at]; row < sorted[next]; row += p->rows) starts[tiles++] = row;
        at = next;
      }
    }
  }
  PyMem_Free(ends);
  PyMem_Free(index);
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
      if (pieces) pieces[number] = (Piece){band, tile, first, last, begin, end};
      number++;
    }
  }
  return number;
}

/* ------------------------------------------------------------------ the table */
typedef struct {
  i64 key, piece;
  int32_t column, number;
} Span;

/* Return up to three spans of a piece, partial, full, partial, at `spans`, `stride` apart; 0 tiles: none. */
static void classify(const Problem *p, const i64 *starts, i64 tiles, const Piece *x, Span *spans, i64 stride, i64 piece) {
  i64 start = band_field(p, x->band, K_START), stop = band_field(p, x->band, K_STOP);
  i64 lo = band_field(p, x->band, LO), hi = band_field(p, x->band, HI);
  i64 all_begin = maximum(start, x->last - 1 + lo), all_end = minimum(stop, x->first + hi + 1);
  int whole = x->first == starts[x->tile] && x->last == (x->tile + 1 < tiles ? starts[x->tile + 1] : p->size);
  if (p->boxes) whole = whole && x->last - x->first == p->rows;
  i64 count = ceiled(x->end - x->begin, p->small), full_from = ceiled(all_begin - x->begin, p->small);
  i64 full = whole ? maximum(0, floored(all_end - x->begin - full_from * p->small, p->columns)) : 0;
  if (full <= 0) full_from = count;
  i64 full_to = full_from + full * (p->columns / p->small);
  i64 from[3] = {0, full_from, full_to}, number[3] = {full_from, full, count - full_to};
  for (int kind = 0; kind < 3; kind++) {
    i64 column = x->begin + p->small * from[kind];
    spans[kind * stride] = (Span){((2 * x->tile + (kind == 1)) << 31) + column, piece, (int32_t)column, (int32_t)number[kind]};
  }
}

/* Fill tiles (sorted by work) and spans of the table from its pieces; return the number of spans, or -1. */
static i64 fill(const Problem *p, const i64 *starts, i64 tiles, const Piece *pieces, i64 number, i64 *made, int32_t *rows) {
  Span *spans = array(3 * number, sizeof(Span));
  i64 *keys = array(6 * number, sizeof(i64)), *index = keys + 3 * number, *work = array(7 * tiles, sizeof(i64));
  i64 kept = -1;
  if (spans && keys && work) {
    i64 *unsorted = work + 2 * tiles, *order = work + tiles;
    for (i64 i = 0; i < number; i++) {
      classify(p, starts, tiles, pieces + i, spans + i, number, i);
      work[pieces[i].tile] -= ceiled(pieces[i].end - pieces[i].begin, p->small);
    }
    kept = 0;
    for (i64 i = 0; i < 3 * number; i++)
      if (spans[i].number) spans[kept] = spans[i], keys[kept] = spans[kept].key, kept++;
    if (sort_integers(keys, kept, index) || sort_integers(work, tiles, order)) kept = -1;
    i64 at = 0;
    for (i64 tile = 0; tile < tiles && kept >= 0; tile++) {
      i64 *one = unsorted + TILE * tile;
      one[START] = starts[tile], one[STOP] = tile + 1 < tiles ? starts[tile + 1] : p->size, one[BEGIN] = one[FULL] = at;
      for (; at < kept && keys[index[at]] >> 32 == tile; at++) {
        const Span *span = spans + index[at];
        int32_t *row = rows + RECORD * at;
        int is_full = span->key >> 31 & 1;
        row[COLUMN] = span->column, row[TILES] = span->number;
        for (int field = 0; field < BAND; field++)
          row[ROW_START + field] = is_full ? 0 : (int32_t)band_field(p, pieces[span->piece].band, field);
        if (p->boxes && !is_full) row[ROW_STOP] = (int32_t)pieces[span->piece].last;
        one[FULL] += !is_full;
      }
      one[END] = at;
    }
    for (i64 tile = 0; tile < tiles; tile++) memcpy(made + TILE * tile, unsorted + TILE * order[tile], TILE * sizeof(i64));
  }
  PyMem_Free(spans);
  PyMem_Free(keys);
  PyMem_Free(work);
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
  PyMem_Free(pieces);
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
  PyMem_Free(starts);
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

static i64 places(const Order *o) { return o->sets * o->n * o->together; }
static double cost_at(const Order *o, i64 place) { return o->cost[(uint32_t)place / (uint32_t)o->together % (uint32_t)o->n]; }
static int32_t place_of(const Order *o, i64 set, i64 tile, i64 head) { return (int32_t)((set * o->n + tile) * o->together + head); }

/* Write the order of `_late_ctas_get_short_ones` for `ctas` CTAs, of which the last `late` start late. */
static int late_order(const Order *o, i64 ctas, i64 late, int32_t *order) {
  i64 found = 0, at = 0;
  int32_t total = (int32_t)places(o);
  char *moved = array(total, 1);
  if (!moved) return -1;
  for (i64 i = 0; found < 2 * late; i++)
    for (i64 set = 0; set < o->sets && found < 2 * late; set++)
      for (i64 head = 0; head < o->together && found < 2 * late; head++, found++)
        if (found % 2 == 0) {
          int32_t place = place_of(o, set, o->by_cost[i], head);
          order[ctas - late + found / 2] = place;
          moved[place] = 1;
        }
  for (int32_t place = 0; place < total; place++)
    if (!moved[place]) {
      if (at == ctas - late) at = ctas;
      order[at++] = place;
    }
  PyMem_Free(moved);
  return 0;
}

/* Write the order of `_short_ones_last` from `first` on. `total`: of all costs. */
static int short_ones_last(const Order *o, i64 first_set, double total, int32_t *order) {
  i64 number = places(o), at = 0, last = number, set, tile, head;
  volatile double limit = o->share * total;
  double sum = 0;
  char *moved = array(number, 1);
  if (!moved) return -1;
  for (i64 i = 0, next; i < o->n; i = next) { /* all tiles of one cost, in the order of their places */
    for (next = i; next < o->n && o->cost[o->by_cost[next]] == o->cost[o->by_cost[i]];) next++;
    for (set = first_set; set < o->sets; set++)
      for (tile = i; tile < next; tile++)
        for (head = 0; head < o->together; head++)
          if ((sum += o->cost[o->by_cost[i]]) <= limit) moved[place_of(o, set, o->by_cost[tile], head)] = 1;
    i64 begin = last;
    for (set = first_set; set < o->sets; set++)
      for (tile = i; tile < next; tile++)
        for (head = 0; head < o->together; head++) begin -= moved[place_of(o, set, o->by_cost[tile], head)];
    last = begin;
    for (set = first_set; set < o->sets; set++)
      for (tile = i; tile < next; tile++)
        for (head = 0; head < o->together; head++)
          if (moved[place_of(o, set, o->by_cost[tile], head)]) order[begin++] = place_of(o, set, o->by_cost[tile], head);
    if (sum > limit) break;
  }
  for (int32_t place = 0; place < number; place++)
    if (!moved[place]) order[at++] = place;
  PyMem_Free(moved);
  return 0;
}

/* `_latest` of the work tiles in this order; NULL: of their places. */
static double latest(const Order *o, const int32_t *order) {
  double sum = 0, found = 0;
  for (i64 i = 0; i < places(o); i++) {
    double cost = cost_at(o, order ? order[i] : i);
    sum += cost;
    double end = (sum - cost) / (double)o->sms + cost;
    if (!i || end > found) found = end;
  }
  return found;
}

/* `_time`: a heap of the times at which the multiprocessors end. */
static double time_of(const Order *o, const int32_t *order) {
  double ends[o->sms], found = 0;
  memset(ends, 0, sizeof(ends));
  for (i64 i = 0; i < places(o); i++) {
    double end = ends[0] + cost_at(o, order ? order[i] : i);
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

/* Write the order of `_even_ends`. Return 1, 0 if the order stays, or -1. `room`: for an order of each try. */
static int even_order(const Order *o, i64 last_sets, int32_t *order, int32_t *room) {
  double total = 0, before, times[MOST_TRIES], best;
  for (i64 i = 0; i < places(o); i++) total += cost_at(o, i);
  volatile double least = total / (double)o->sms, gain = o->gain * least, half = o->gain / 2 * least;
  if (o->sets == 1 || latest(o, NULL) - least <= gain) return 0;
  if ((before = time_of(o, NULL)) - least <= gain) return 0;
  volatile double enough = least + half, gained = before - gain;
  i64 tried = 0;
  do {
    int32_t *some = room + tried * places(o);
    i64 number = o->sets <= last_sets ? o->sets : 2 + tried;
    if (short_ones_last(o, o->sets - number, total, some)) return -1;
    double bound = latest(o, some);
    times[tried] = bound <= (enough < gained ? enough : gained) ? bound : time_of(o, some);
  } while (times[tried++] > enough && tried < tries(o, last_sets));
  best = times[0];
  for (i64 i = 1; i < tried; i++) best = times[i] < best ? times[i] : best;
  i64 fewest = 0;
  while (times[fewest] > best + half) fewest++;
  if (!(before - times[fewest] > gain)) return 0;
  memcpy(order, room + fewest * places(o), places(o) * sizeof(int32_t));
  return 1;
}

typedef struct {
  const i64 *tiles, *order;
  const int32_t *spans;
  i64 sets, together, pack, heads, repeat;
  int full_first;
} Schedule;

/* Write the work tiles in the order of `places_of`; NULL: of their places. */
static int write_work_tiles(const Schedule *s, const Order *o, const int32_t *places_of, i64 first_span, int32_t *work) {
  int32_t *of_tile = array(RECORD * (o->n + s->sets * s->together), sizeof(int32_t)), *of_head = of_tile + RECORD * o->n;
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
  int32_t *record = work + RECORD;
  uint32_t together = (uint32_t)s->together, number = (uint32_t)places(o), n = (uint32_t)o->n;
  for (uint32_t i = 0; i < number; i++, record += RECORD) {
    uint32_t place = places_of ? (uint32_t)places_of[i] : i, rest = place / together, head = place - rest * together;
    uint32_t set = rest / n;
    const int32_t *tile = of_tile + RECORD * (rest - set * n), *owner = of_head + RECORD * (set * together + head);
    for (int field = 0; field < RECORD; field++) record[field] = tile[field] | owner[field];
  }
  PyMem_Free(of_tile);
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
  int full_first, moved = 0;
  if (!PyArg_ParseTuple(arguments, "w*y*y*y*y*LLLLLpLLLLdd", &work, &tiles, &spans, &order, &cost, &sets, &together, &pack,
                        &heads, &repeat, &full_first, &ctas, &late, &last_sets, &sms, &share, &gain))
    return NULL;
  Schedule s = {tiles.buf, order.buf, spans.buf, sets, together, pack, heads, repeat, full_first};
  Order o = {order.len / sizeof(i64), sets, together, cost.buf, NULL, sms, share, gain};
  i64 number = places(&o), first_span = RECORD * (1 + number), need = first_span + repeat * (i64)(spans.len / sizeof(int32_t));
  int32_t *places_of = array((late ? 1 : last_sets ? 1 + tries(&o, last_sets) : 0) * number, sizeof(int32_t));
  int32_t *to = work.buf;
  o.by_cost = array(o.n, sizeof(i64));
  if ((i64)(work.len / sizeof(int32_t)) != need) PyErr_SetString(PyExc_ValueError, "work has another size");
  else if (tries(&o, last_sets) > MOST_TRIES) PyErr_SetString(PyExc_ValueError, "too many sets of heads are tried");
  else if (places_of && o.by_cost && !((late || last_sets) && sort_floats(o.cost, o.n, o.by_cost))) {
    if (late) moved = late_order(&o, ctas, late, places_of) ? -1 : 1;
    else if (last_sets && number) moved = even_order(&o, last_sets, places_of, places_of + number);
    memset(to, 0, RECORD * sizeof(int32_t));
    to[WORK_TILES_END] = (int32_t)first_span, to[TICKETS] = (int32_t)need;
    write_spans(&s, tiles.len / (TILE * sizeof(i64)), to + first_span);
    if (moved >= 0 && number) write_work_tiles(&s, &o, moved ? places_of : NULL, first_span, to);
  }
  PyMem_Free(places_of);
  PyMem_Free(o.by_cost);
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
