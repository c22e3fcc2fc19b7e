/* Work tables in C: those that `work_tables.py` describes. `schedule.c` continues this file.
 *
 *   bands(bands of a mask) -> `band_array`, and area(bands) -> `area`
 *   table(bands, size, rows, columns, small, boxes, only_visits)
 *       -> (visits, number of tiles[, tiles, spans])         of the cheaper cut into tiles, as bytearrays: at
 *                                                            multiples of `rows`, or at ends of bands, too
 *
 * Arrays are contiguous: int64 (bands, tiles) and int32 (spans).
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
/* a / b for b > 0, rounded down: a division takes longer than all else of a piece. */
static i64 floored(i64 a, i64 b) { return b & (b - 1) ? a / b - (a % b < 0) : a >> __builtin_ctzll(b); }
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
enum { RUN = 16 };

/* Sort `index` (0 to n - 1) by key, stably: by insertion, but only within runs after n moves; then merge pairs of runs
 * until all are in order. Spans and costs are often nearly sorted. */
#define SORT(name, type)                                                                     \
  static int name(const type *key, i64 n, i64 *index) {                                      \
    i64 *other = array(n, sizeof(i64)), *from = index, *to = other, at, moves = 0;           \
    if (!other) return -1;                                                                   \
    for (i64 i = 0; i < n; i++) {                                                            \
      for (at = i; at && (at % RUN || moves < n) && key[index[at - 1]] > key[i]; at--, moves++) \
        index[at] = index[at - 1];                                                           \
      index[at] = i;                                                                         \
    }                                                                                        \
    for (i64 width = RUN; width < n; width *= 2) {                                           \
      for (at = width; at < n && key[from[at - 1]] <= key[from[at]]; at += width);           \
      if (at >= n) break;                                                                    \
      for (i64 left = 0; left < n; left += 2 * width) {                                      \
        i64 middle = minimum(left + width, n), right = minimum(left + 2 * width, n);         \
        i64 a = left, b = middle;                                                            \
        if (b == right || key[from[b - 1]] <= key[from[b]]) { /* already in order */         \
          memcpy(to + left, from + left, (right - left) * sizeof(i64));                      \
          continue;                                                                          \
        }                                                                                    \
        for (at = left; at < right; at++)                                                    \
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

/* ------------------------------------------------------------------ bands */
static PyObject *bands(PyObject *self, PyObject *given) {
  i64 n = PyTuple_Check(given) ? PyTuple_GET_SIZE(given) : 0;
  PyObject *made = PyByteArray_FromStringAndSize(NULL, BAND * n * sizeof(i64));
  for (i64 i = 0; made && i < n; i++) {
    PyObject *band = PyTuple_GET_ITEM(given, i);
    for (int field = 0; field < BAND; field++)
      ((i64 *)PyByteArray_AS_STRING(made))[field * n + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(band, field));
  }
  if (PyErr_Occurred()) Py_CLEAR(made);
  return made;
}

/* Return the cells on the first `diagonals` diagonals from a corner. */
static i64 corner(i64 queries, i64 keys, i64 diagonals) {
  i64 sizes[3] = {diagonals, diagonals - queries, diagonals - keys}, cells[3];
  for (int i = 0; i < 3; i++) cells[i] = maximum(sizes[i], 0) * (sizes[i] + 1) / 2;
  return cells[0] - cells[1] - cells[2];
}

static PyObject *area(PyObject *self, PyObject *arguments) {
  Py_buffer given;
  if (!PyArg_ParseTuple(arguments, "y*", &given)) return NULL;
  i64 n = given.len / (BAND * sizeof(i64)), sum = 0;
  for (i64 i = 0; i < n; i++) {
    const i64 *band = (i64 *)given.buf + i;
    i64 q_start = band[Q_START * n], q_stop = band[Q_STOP * n], k_start = band[K_START * n], k_stop = band[K_STOP * n];
    i64 queries = q_stop - q_start, keys = k_stop - k_start;
    sum += queries * keys - corner(queries, keys, band[LO * n] - (k_start - q_stop + 1));
    sum -= corner(queries, keys, k_stop - 1 - q_start - band[HI * n]);
  }
  PyBuffer_Release(&given);
  return PyLong_FromLongLong(sum);
}

/* ------------------------------------------------------------------ the cut */
typedef struct {
  const i64 *bands; /* (6, n) */
  i64 n, size, rows, columns, small, boxes;
} Problem;

typedef struct {
  int32_t band, tile, first, last, begin, end;
} Piece;

static i64 band_field(const Problem *p, i64 band, int field) { return p->bands[field * p->n + band]; }

/* Write the first rows of tiles that restart where bands begin or end, if a whole tile fits before. Return their number.
 * `starts` has room for the rows over `rows`, and for two cuts a band. */
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

/* Count the pieces, of a band in a tile, and their visits, in small tiles; write them to `pieces` unless it is NULL. */
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

/* Add up to three spans of a piece: partial, full, partial. They sort by tile, kind of tile, column, and then in
 * this order: all first spans, all second, all third. Return the number of spans. */
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

/* Write the place of each tile among those sorted by work, the most first, stably. */
static int sort_by_work(const i64 *work, i64 tiles, i64 *place) {
  i64 most = 0, at = 0;
  for (i64 tile = 0; tile < tiles; tile++) most = maximum(most, work[tile]);
  i64 *next = zeros(most + 1, sizeof(i64));
  if (!next) return -1;
  for (i64 tile = 0; tile < tiles; tile++) next[work[tile]]++;
  for (i64 some = most; some >= 0; some--) at += next[some], next[some] = at - next[some];
  for (i64 tile = 0; tile < tiles; tile++) place[tile] = next[work[tile]]++;
  return 0;
}

/* Fill tiles (sorted by work) and spans of the table from its pieces; return the number of spans, or -1. */
static i64 fill(const Problem *p, const i64 *starts, i64 tiles, const Piece *pieces, i64 number, i64 *made, int32_t *rows) {
  Span *spans = array(3 * number, sizeof(Span));
  i64 *keys = array(3 * number, sizeof(i64)), *index = array(3 * number, sizeof(i64));
  i64 *work = zeros(tiles, sizeof(i64)), *place = array(tiles, sizeof(i64));
  i64 kept = 0, at = 0;
  if (!spans || !keys || !index || !work || !place) return -1;
  for (i64 i = 0; i < number; i++) {
    kept = classify(p, starts, tiles, pieces + i, i, kept, spans, keys);
    work[pieces[i].tile] += ceiled(pieces[i].end - pieces[i].begin, p->small);
  }
  if (sort_integers(keys, kept, index) || sort_by_work(work, tiles, place)) return -1;
  for (i64 tile = 0; tile < tiles; tile++) {
    i64 *one = made + TILE * place[tile];
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
  return kept;
}

static PyObject *filled(const Problem *p, const i64 *starts, i64 tiles, i64 number, double visits) {
  i64 unused, spans = -1, row = RECORD * sizeof(int32_t);
  Piece *pieces = array(number, sizeof(Piece));
  PyObject *made = PyByteArray_FromStringAndSize(NULL, TILE * tiles * sizeof(i64));
  PyObject *rows = PyByteArray_FromStringAndSize(NULL, 3 * number * row);
  if (pieces && made && rows) {
    cut(p, starts, tiles, pieces, &unused);
    spans = fill(p, starts, tiles, pieces, number, (i64 *)PyByteArray_AS_STRING(made), (int32_t *)PyByteArray_AS_STRING(rows));
  }
  if (spans >= 0 && !PyByteArray_Resize(rows, spans * row)) return Py_BuildValue("dLNN", visits, (long long)tiles, made, rows);
  Py_XDECREF(made), Py_XDECREF(rows);
  return NULL;
}

static PyObject *table(PyObject *self, PyObject *arguments) {
  Py_buffer bands;
  long long size, rows, columns, small, boxes;
  int only_visits;
  if (!PyArg_ParseTuple(arguments, "y*LLLLLp", &bands, &size, &rows, &columns, &small, &boxes, &only_visits)) return NULL;
  Problem p = {bands.buf, bands.len / (BAND * sizeof(i64)), size, rows, columns, small, boxes};
  i64 even = size > 0 ? ceiled(size, rows) : 0, number = -1, visits[2], pieces[2];
  i64 *starts = array(2 * even + 2 * p.n + 2, sizeof(i64)), *at_ends = starts + even;
  PyObject *result = NULL;
  if (starts && (number = cut_starts(&p, at_ends)) >= 0) {
    for (i64 i = 0; i < even; i++) starts[i] = rows * i;
    pieces[0] = cut(&p, starts, even, NULL, visits);
    pieces[1] = cut(&p, at_ends, number, NULL, visits + 1);
    double ratio = (double)(columns / small), both[2] = {visits[0] / ratio, visits[1] / ratio};
    int best = number + both[1] < even + both[0];
    result = only_visits ? Py_BuildValue("dL", both[best], (long long)(best ? number : even))
                         : filled(&p, best ? at_ends : starts, best ? number : even, pieces[best], both[best]);
  }
  release();
  PyBuffer_Release(&bands);
  return result;
}
