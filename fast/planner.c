/* Plans of layouts in C: those of `canon.reference.planner`, chunk for chunk. Continues `assignment.c`.
 *
 *   assign(bands, tokens, sequences, ranks, chunk, slacks, cells_per_us, tokens_per_us, swaps_per_chunk)
 *       -> the chunks of each rank, ascending: int64 (ranks, slots), as a bytearray
 *
 * `bands` (6, n); `slacks` (3, 2): numerators and denominators, of which the last is the accepted imbalance.
 */
/* ------------------------------------------------------------------ starts */
/* Write the chunks of each rank (ranks, slots). `order`: the largest first. */
static void greedy(const Chunks *c, const Keyed *order, i64 limit, char *needed, i64 *rank_state, i64 *held) {
  i64 *load = rank_state, *whole = load + c->ranks, *used = whole + c->ranks, *has_small = used + c->ranks;
  i64 complete = 0, left = 0, smallest = -order[c->total - 1].key;
  memset(needed, 0, c->ranks * c->width);
  memset(rank_state, 0, 4 * c->ranks * sizeof(i64));
  for (i64 i = 0; i < c->total; i++) left += c->area[i];
  for (i64 place = 0; place < c->total; place++) {
    i64 chunk = order[place].number, area = c->area[chunk], best = -1, least = 0, fewest = -1;
    left -= area;
    i64 reserve = smallest + floored(left / maximum(1, c->total - place - 1) - smallest, RESERVE);
    for (i64 rank = 0; rank < c->ranks; rank++) {
      i64 then = load[rank] + area + (c->slots - used[rank] - 1) * reserve, added = INT64_MAX;
      if (used[rank] == c->slots || (c->small[chunk] && has_small[rank])) continue;
      if (!c->small[chunk] && c->small_ones && whole[rank] >= c->slots - 1 &&
          (has_small[rank] || complete >= c->ranks - c->small_ones))
        continue;
      if (then <= limit) {
        const char *row = needed + rank * c->width;
        added = 0;
        for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++)
          for (i64 cell = c->needs[i].first; cell < c->needs[i].last; cell++) added += row[cell] ? 0 : c->cells[cell];
      }
      if (best < 0 || added < fewest || (added == fewest && then < least)) best = rank, fewest = added, least = then;
    }
    held[best * c->slots + used[best]++] = chunk;
    load[best] += area;
    if (c->small[chunk]) has_small[best] = 1;
    else complete += ++whole[best] == c->slots;
    for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++)
      memset(needed + best * c->width + c->needs[i].first, 1, c->needs[i].last - c->needs[i].first);
  }
}

/* Deal chunks in order to ranks 0, 1, ... and, with two halves, then to ..., 1, 0; the empty ones last. */
static void dealt(const Chunks *c, int halves, i64 *used, i64 *held) {
  i64 empty = c->total - c->count, number = 0;
  int empty_first = halves == 1 || c->slots == 1;
  memset(used, 0, c->ranks * sizeof(i64));
  for (int half = 0; half < halves; half++)
    for (i64 i = 0; i < c->ranks; i++) {
      i64 rank = half ? c->ranks - 1 - i : i;
      i64 count = c->slots - (empty_first ? rank < empty : rank >= c->ranks - empty);
      i64 own = halves == 1 ? count : half ? count / 2 : (count + 1) / 2;
      while (own--) held[rank * c->slots + used[rank]++] = number++;
    }
  for (i64 rank = 0; rank < c->ranks; rank++)
    while (used[rank] < c->slots) held[rank * c->slots + used[rank]++] = number++;
}

/* ------------------------------------------------------------------ the plan */
/* Write the chunks of each rank to `held`. */
static void plan(const Problem *p, const Chunks *c, i64 *held, Memory *memory) {
  State s = new_state(c, memory);
  Keyed *order = zeros(memory, c->total, sizeof(Keyed));
  i64 *rank_state = zeros(memory, 4 * c->ranks, sizeof(i64)), *start = zeros(memory, c->total, sizeof(i64));
  char *needed = zeros(memory, c->ranks * c->width, 1);
  Score best = {0, 0}, now;
  if (memory->full) return;
  for (i64 i = 0; i < c->total; i++) order[i] = (Keyed){-c->area[i], i};
  qsort(order, c->total, sizeof(Keyed), by_key);
  for (int i = 0; i < STARTS; i++) {
    const i64 *slack = p->slacks[minimum(i, SLACKS - 1)];
    i64 limit = (i128)c->bound * slack[0] / slack[1];
    if (i < SLACKS) greedy(c, order, limit, needed, rank_state, start);
    else dealt(c, i == SLACKS ? 2 : 1, rank_state, start);
    assign_all(&s, start);
    now = score(&s);
    if (!i || is_less(now, best)) best = now, memcpy(held, s.held, c->total * sizeof(i64));
  }
  assign_all(&s, held);
  for (i64 swaps = p->swaps_per_chunk * c->count; swaps > 0;) {
    swaps -= swap(&s, minimum(swaps, BATCH * c->ranks));
    now = score(&s);
    if (!is_less(now, best)) break;
    best = now, memcpy(held, s.held, c->total * sizeof(i64));
  }
  assign_all(&s, held);
  for (i64 i = 0; i < p->swaps_per_chunk * c->ranks && relieve(&s); i++);
  memcpy(held, s.held, c->total * sizeof(i64));
}

static PyObject *assign(PyObject *self, PyObject *arguments) {
  Py_buffer bands, slacks;
  long long tokens, sequences, ranks, chunk, cells_per_us, tokens_per_us, swaps_per_chunk;
  if (!PyArg_ParseTuple(arguments, "y*LLLLy*LLL", &bands, &tokens, &sequences, &ranks, &chunk, &slacks, &cells_per_us,
                        &tokens_per_us, &swaps_per_chunk))
    return NULL;
  Problem p = {bands.buf, bands.len / (6 * sizeof(i64)), tokens, sequences, ranks, chunk, cells_per_us, tokens_per_us,
               swaps_per_chunk, {{0}}};
  PyObject *made = NULL;
  if (slacks.len != sizeof(p.slacks)) PyErr_SetString(PyExc_ValueError, "slacks has another size");
  else {
    memcpy(p.slacks, slacks.buf, sizeof(p.slacks));
    made = PyByteArray_FromStringAndSize(NULL, ranks * ceiled(ceiled(tokens, chunk), ranks) * sizeof(i64));
  }
  if (made) {
    i64 *held = (i64 *)PyByteArray_AS_STRING(made);
    Memory memory = {.number = 0};
    Chunks chunks = {0};
    Py_BEGIN_ALLOW_THREADS
    fill_chunks(&p, &chunks, &memory);
    if (!memory.full) plan(&p, &chunks, held, &memory);
    while (memory.number) free(memory.blocks[--memory.number]);
    Py_END_ALLOW_THREADS
    if (memory.full) {
      Py_CLEAR(made);
      PyErr_NoMemory();
    }
  }
  PyBuffer_Release(&bands), PyBuffer_Release(&slacks);
  return made;
}

static PyMethodDef methods[] = {
    {"assign", assign, METH_VARARGS, "Return the chunks of each rank."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "canon_planner", NULL, -1, methods};

PyMODINIT_FUNC PyInit_canon_planner(void) { return PyModule_Create(&module); }
