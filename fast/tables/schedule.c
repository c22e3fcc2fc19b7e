/* Tile schedules of the Hopper kernels, for `tile_scheduler.py`. Continues `tables.c`.
 *
 *   order(tiles, spans, repeat, partial, fixed, regions)
 *       -> (order, cost, visited tiles)      of tiles with spans, as bytearrays; the cost is that of `tile_costs`
 *   write_schedule(work, tiles, spans, order, cost, sets, together, pack, heads, repeat, full_first, ctas, late,
 *                  last_sets, sms, short, gain)
 *       fills `work`: the header, the work tiles and the spans that `tile_queue` reads
 *
 * Arrays are contiguous: int64 (tiles, order), int32 (spans, work) and float64 (cost). Products of floats are volatile:
 * fused multiply-adds of some compilers would give another order, and other bits of ordered dq.
 */

/* ------------------------------------------------------------------ the order */
/* Write the active tiles to `order`, the longest first, and their costs. Regions of rows follow one another, that of the
 * longest tile first. */
static i64 longest_first(const i64 *tiles, i64 n, const double *cost, i64 regions, i64 *order, double *in_order) {
  i64 *by_cost = array(n, sizeof(i64)), *region = array(n, sizeof(i64)), most = 1, active = 0;
  i64 *ranked = array(regions + 1, sizeof(i64)), *place = zeros(regions + 1, sizeof(i64));
  double *negated = array(n, sizeof(double)), *longest = zeros(regions + 1, sizeof(double));
  if (!by_cost || !region || !ranked || !place || !negated || !longest) return -1;
  for (i64 i = 0; i < n; i++) most = maximum(most, tiles[TILE * i + STOP]);
  for (i64 i = 0; i < n; i++) {
    region[i] = tiles[TILE * i + START] * regions / most;
    negated[i] = -cost[i];
    if (negated[i] < longest[region[i]]) longest[region[i]] = negated[i];
    place[region[i]] += tiles[TILE * i + END] > tiles[TILE * i + BEGIN];
  }
  if (sort_floats(longest, regions + 1, ranked) || sort_floats(negated, n, by_cost)) return -1;
  for (i64 i = 0; i <= regions; i++) active += place[ranked[i]], place[ranked[i]] = active - place[ranked[i]];
  for (i64 i = 0; i < n; i++) {
    i64 tile = by_cost[i];
    if (tiles[TILE * tile + END] == tiles[TILE * tile + BEGIN]) continue;
    i64 at = place[region[tile]]++;
    order[at] = tile, in_order[at] = cost[tile];
  }
  return active;
}

/* Return the order of the active tiles, their costs, and the tiles that all spans visit. */
static PyObject *order(PyObject *self, PyObject *arguments) {
  Py_buffer tiles, spans;
  long long repeat, regions;
  double partial, fixed;
  if (!PyArg_ParseTuple(arguments, "y*y*LddL", &tiles, &spans, &repeat, &partial, &fixed, &regions)) return NULL;
  i64 n = tiles.len / (TILE * sizeof(i64)), visited = 0, active = -1, *made = array(n, sizeof(i64));
  const int32_t *span = spans.buf;
  double *cost = zeros(n, sizeof(double)), *in_order = array(n, sizeof(double));
  if (made && cost && in_order) {
    for (i64 i = 0; i < n; i++) {
      const i64 *tile = (i64 *)tiles.buf + TILE * i;
      i64 some = 0, full = 0;
      for (i64 at = tile[BEGIN]; at < tile[FULL]; at++) some += span[RECORD * at + TILES];
      for (i64 at = tile[FULL]; at < tile[END]; at++) full += span[RECORD * at + TILES];
      volatile double product = partial * (double)some, sum = product + (double)full, each = (double)repeat * sum;
      cost[i] = each + fixed;
      visited += some + full;
    }
    active = longest_first(tiles.buf, n, cost, maximum(regions, 1), made, in_order);
  }
  PyObject *result = active < 0 ? NULL
                                : Py_BuildValue("NNL", PyByteArray_FromStringAndSize((char *)made, active * sizeof(i64)),
                                                PyByteArray_FromStringAndSize((char *)in_order, active * sizeof(double)),
                                                (long long)visited);
  release();
  PyBuffer_Release(&tiles), PyBuffer_Release(&spans);
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

/* Move every second short work tile to the last `late` of `ctas` CTAs, which start late if NCCL holds SMs. */
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

/* Write the order with the shortest work tiles from `first_set` on at the end, `share` of the `total` cost, the longest of
 * them first. */
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

/* Return an upper bound of `time_of`. */
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

/* Return when the last multiprocessor ends, if each claims the next work tile when it ends one: by a heap of their times. */
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

/* Move the shortest work tiles to the end, if that saves more than `gain` of the time: of all sets if they are at most
 * `last_sets`, else of as few (at least two) as come within half of `gain` of the best. */
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
    int32_t record[RECORD]; /* in registers: `work` might overlap the others */
    for (int field = 0; field < RECORD; field++) record[field] = tile[field] | owner[field];
    memcpy(work + RECORD * (i + 1), record, sizeof(record));
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
    {"bands", bands, METH_O, "Return the bands of a mask, field by field."},
    {"area", area, METH_VARARGS, "Return the number of visible cells."},
    {"table", table, METH_VARARGS, "Return visits, tiles and spans of the cheaper cut."},
    {"order", order, METH_VARARGS, "Return the order of the active tiles, their costs, and all visited tiles."},
    {"write_schedule", write_schedule, METH_VARARGS, "Write the numbers that `tile_queue` reads."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "canon_schedule", NULL, -1, methods};

PyMODINIT_FUNC PyInit_canon_schedule(void) { return PyModule_Create(&module); }
