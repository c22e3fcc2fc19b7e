/* Chunks on ranks in C: swaps and relief of `canon.reference.planner`. Continues `chunks.c`.
 *
 * A rank has two prefix sums over cells: `missing`, of those that none of its chunks needs, and `once`, of those
 * that exactly one needs. So the keys that a chunk would add to a rank, or take away, are differences of entries.
 */
typedef struct {
  const Chunks *c;
  i64 *held;                        /* (ranks, slots), ascending */
  i64 *load, *received, *cost;      /* of each rank */
  i64 *sent, *moved;                /* of each rank */
  i64 *missing, *once;              /* (ranks, cells + 1) */
  i64 *sole_needs, *sends, *holder; /* of each chunk */
  i64 *demand;                      /* of each cell: the ranks that need it */
  i64 *count;                       /* room for cells + 1 */
  i64 *to_other, *to_me;            /* room for slots */
  char *has_small, *settled;        /* of each rank; (ranks, ranks) */
  char *mine_needs, *theirs_needs;  /* (slots, cells) */
  i64 *change, *stamp, turn;        /* of each rank, in a relief */
  Keyed *order;                     /* room for ranks */
} State;

typedef struct {
  i64 peak;
  i128 worth;
} Score;

static int is_less(Score a, Score b) { return a.peak != b.peak ? a.peak < b.peak : a.worth < b.worth; }

static State new_state(const Chunks *c, Memory *memory) {
  State s = {.c = c};
  i64 **of_ranks[] = {&s.load, &s.received, &s.cost, &s.sent, &s.moved, &s.change, &s.stamp};
  i64 **of_chunks[] = {&s.held, &s.sole_needs, &s.sends, &s.holder};
  for (int i = 0; i < 7; i++) *of_ranks[i] = zeros(memory, c->ranks, sizeof(i64));
  for (int i = 0; i < 4; i++) *of_chunks[i] = zeros(memory, c->total, sizeof(i64));
  s.missing = zeros(memory, c->ranks * (c->width + 1), sizeof(i64));
  s.once = zeros(memory, c->ranks * (c->width + 1), sizeof(i64));
  s.demand = zeros(memory, c->width, sizeof(i64)), s.count = zeros(memory, c->width + 1, sizeof(i64));
  s.to_other = zeros(memory, c->slots, sizeof(i64)), s.to_me = zeros(memory, c->slots, sizeof(i64));
  s.has_small = zeros(memory, c->ranks, 1), s.settled = zeros(memory, c->ranks * c->ranks, 1);
  s.mine_needs = zeros(memory, c->slots * c->width, 1), s.theirs_needs = zeros(memory, c->slots * c->width, 1);
  s.order = zeros(memory, c->ranks, sizeof(Keyed));
  return s;
}

static i64 *missing_of(const State *s, i64 rank) { return s->missing + rank * (s->c->width + 1); }
static i64 *once_of(const State *s, i64 rank) { return s->once + rank * (s->c->width + 1); }

/* Make the sums of a rank from its chunks. `is_new`: it has none yet. */
static void update(State *s, i64 rank, int is_new) {
  const Chunks *c = s->c;
  i64 *held = s->held + rank * c->slots, *missing = missing_of(s, rank), *once = once_of(s, rank), needed = 0, own = 0;
  qsort(held, c->slots, sizeof(i64), by_value);
  memset(s->count, 0, (c->width + 1) * sizeof(i64));
  s->load[rank] = s->has_small[rank] = 0;
  for (i64 slot = 0; slot < c->slots; slot++) {
    i64 chunk = held[slot];
    for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++)
      s->count[c->needs[i].first]++, s->count[c->needs[i].last]--;
    s->load[rank] += c->work[chunk], own += c->own[chunk];
    s->has_small[rank] |= c->small[chunk];
    s->holder[chunk] = rank;
  }
  for (i64 cell = 0, before = 0; cell < c->width; cell++) {
    i64 was_missing = missing[cell + 1] - before;
    before = missing[cell + 1];
    needed += s->count[cell];
    s->demand[cell] += (needed > 0) - (!is_new && !was_missing);
    missing[cell + 1] = missing[cell] + (needed ? 0 : c->cells[cell]);
    once[cell + 1] = once[cell] + (needed == 1 ? c->cells[cell] : 0);
  }
  for (i64 slot = 0; slot < c->slots; slot++) s->sole_needs[held[slot]] = between(c, once, held[slot]);
  s->received[rank] = c->need_of_all - missing[c->width] - own;
  s->cost[rank] = maximum(s->load[rank], s->received[rank]);
}

static void assign_all(State *s, const i64 *held) {
  memcpy(s->held, held, s->c->total * sizeof(i64));
  memset(s->demand, 0, s->c->width * sizeof(i64));
  memset(s->settled, 0, s->c->ranks * s->c->ranks);
  for (i64 rank = 0; rank < s->c->ranks; rank++) update(s, rank, 1);
}

static Score scored(const Chunks *c, i64 peak, i64 moved, i128 received) {
  i128 traffic = (i128)c->ranks * moved + WEIGHT * received;
  return (Score){maximum(peak, c->allowed), (i128)peak * (traffic / c->cells_per_us)};
}

/* Return the score, and note what each rank sends and moves. */
static Score score(State *s) {
  const Chunks *c = s->c;
  i64 peak = 0, most = 0;
  i128 received = 0;
  memset(s->sends, 0, c->total * sizeof(i64));
  memset(s->sent, 0, c->ranks * sizeof(i64));
  for (i64 cell = 0; cell < c->width; cell++) s->sends[c->owner[cell]] += c->cells[cell] * (s->demand[cell] - 1);
  for (i64 chunk = 0; chunk < c->total; chunk++) s->sent[s->holder[chunk]] += s->sends[chunk];
  for (i64 rank = 0; rank < c->ranks; rank++) {
    s->moved[rank] = maximum(s->received[rank], s->sent[rank]);
    most = maximum(most, s->moved[rank]), peak = maximum(peak, maximum(s->load[rank], s->moved[rank]));
    received += s->received[rank];
  }
  return scored(c, peak, most, received);
}

/* Return whether both ranks keep at most one small chunk. */
static int keeps_one_small(const State *s, i64 rank, i64 other, i64 give, i64 take) {
  const char *small = s->c->small;
  if (small[give] && !small[take] && s->has_small[other]) return 0;
  return small[give] || !small[take] || !s->has_small[rank];
}

static void exchange(State *s, i64 rank, i64 x, i64 other, i64 y) {
  i64 *mine = s->held + rank * s->c->slots + x, *theirs = s->held + other * s->c->slots + y, chunk = *mine;
  *mine = *theirs, *theirs = chunk;
  update(s, rank, 0), update(s, other, 0);
}

/* ------------------------------------------------------------------ swaps */
/* Add the keys that both chunks need, and no other chunk of the rank of each, to `here` and `there`. */
static void add_shared(const State *s, i64 rank, i64 other, i64 give, i64 take, i64 *here, i64 *there) {
  const Chunks *c = s->c;
  const i64 *mine = once_of(s, rank), *theirs = once_of(s, other);
  for (i64 i = c->begin[give], j = c->begin[take]; i < c->begin[give + 1] && j < c->begin[take + 1];) {
    i64 first = maximum(c->needs[i].first, c->needs[j].first), last = minimum(c->needs[i].last, c->needs[j].last);
    if (first < last) *here += mine[last] - mine[first], *there += theirs[last] - theirs[first];
    if (c->needs[i].last < c->needs[j].last) i++;
    else j++;
  }
}

/* Make the best swap of two ranks. Return whether one gains. */
static int swap_pair(State *s, i64 rank, i64 other) {
  const Chunks *c = s->c;
  const i64 *mine = s->held + rank * c->slots, *theirs = s->held + other * c->slots;
  i64 here_least = INT64_MAX, there_least = INT64_MAX, best_x = -1, best_y = -1, best_change = 0;
  int shares = 0;
  for (i64 i = 0; i < c->slots; i++) {
    s->to_other[i] = between(c, missing_of(s, other), mine[i]);
    s->to_me[i] = between(c, missing_of(s, rank), theirs[i]);
    shares |= s->to_other[i] < c->need[mine[i]];
    here_least = minimum(here_least, s->to_other[i] - s->sole_needs[mine[i]]);
    there_least = minimum(there_least, s->to_me[i] - s->sole_needs[theirs[i]]);
  }
  i64 best_peak = maximum(maximum(s->cost[rank], s->cost[other]), c->allowed);
  if (best_peak == c->allowed && !(shares && here_least + there_least < 0)) return 0;
  for (i64 x = 0; x < c->slots; x++)
    for (i64 y = 0; y < c->slots; y++) {
      i64 give = mine[x], take = theirs[y], work = c->work[take] - c->work[give], own = c->own[take] - c->own[give];
      i64 here = s->to_me[y] - s->sole_needs[give], there = s->to_other[x] - s->sole_needs[take];
      i64 load = maximum(maximum(s->load[rank] + work, s->load[other] - work), c->allowed);
      for (int exact = 0; exact < 2; exact++) { /* shared keys only add: most swaps do not need them */
        if (exact) add_shared(s, rank, other, give, take, &here, &there);
        i64 peak = maximum(load, maximum(s->received[rank] - own + here, s->received[other] + own + there));
        if (peak > best_peak || (peak == best_peak && here + there >= best_change)) break;
        if (!exact && !keeps_one_small(s, rank, other, give, take)) break;
        if (exact) best_peak = peak, best_change = here + there, best_x = x, best_y = y;
      }
    }
  if (best_x < 0) return 0;
  exchange(s, rank, best_x, other, best_y);
  return 1;
}

/* Swap chunks until a round has no gain, up to `most` times. Return the number of swaps. */
static i64 swap(State *s, i64 most) {
  i64 ranks = s->c->ranks, swaps = 0, before;
  do {
    before = swaps;
    for (i64 rank = 0; rank < ranks; rank++)
      for (i64 other = rank + 1; other < ranks && swaps < most; other++) {
        if (s->settled[rank * ranks + other]) continue;
        if (!swap_pair(s, rank, other)) {
          s->settled[rank * ranks + other] = 1;
          continue;
        }
        swaps++;
        memset(s->settled + rank * ranks, 0, ranks), memset(s->settled + other * ranks, 0, ranks);
        for (i64 i = 0; i < ranks; i++) s->settled[i * ranks + rank] = s->settled[i * ranks + other] = 0;
      }
  } while (swaps < most && swaps > before);
  return swaps;
}

/* ------------------------------------------------------------------ relief */
static void write_needs(const Chunks *c, const i64 *held, char *needs) {
  memset(needs, 0, c->slots * c->width);
  for (i64 slot = 0; slot < c->slots; slot++)
    for (i64 i = c->begin[held[slot]]; i < c->begin[held[slot] + 1]; i++)
      memset(needs + slot * c->width + c->needs[i].first, 1, c->needs[i].last - c->needs[i].first);
}

static void add_sent(State *s, i64 rank, i64 keys) {
  if (s->stamp[rank] != s->turn) s->stamp[rank] = s->turn, s->change[rank] = 0;
  s->change[rank] += keys;
}

/* Return the largest of what any rank moves after the changes of this turn. */
static i64 moved_then(const State *s, i64 rank, i64 received, i64 other, i64 received_there) {
  i64 most = 0, rest = -1;
  for (i64 i = 0; i < s->c->ranks; i++) { /* in `order`, those that move most come first */
    i64 some = s->order[i].number, keys = some == rank ? received : some == other ? received_there : s->received[some];
    if (s->stamp[some] == s->turn) most = maximum(most, maximum(keys, s->sent[some] + s->change[some]));
    else if (rest < 0) rest = s->moved[some];
  }
  return maximum(most, rest);
}

/* Return the score after a swap of chunk x of `rank` and chunk y of `other`. `rest`: the load of other ranks. */
static Score relieved(State *s, i64 rank, i64 x, i64 other, i64 y, i64 load, i64 rest, i128 all_received) {
  const Chunks *c = s->c;
  i64 give = s->held[rank * c->slots + x], take = s->held[other * c->slots + y];
  i64 own = c->own[take] - c->own[give], received = s->received[rank] - own, received_there = s->received[other] + own;
  s->turn++;
  add_sent(s, rank, s->sends[take] - s->sends[give]), add_sent(s, other, s->sends[give] - s->sends[take]);
  for (int theirs = 0; theirs < 2; theirs++) { /* cells of the chunk that leaves one of the ranks */
    i64 chunk = theirs ? take : give;
    const char *comes = theirs ? s->mine_needs + x * c->width : s->theirs_needs + y * c->width;
    const i64 *once = once_of(s, theirs ? other : rank), *missing = missing_of(s, theirs ? rank : other);
    i64 *loses = theirs ? &received_there : &received, *gains = theirs ? &received : &received_there;
    for (i64 i = c->begin[chunk]; i < c->begin[chunk + 1]; i++)
      for (i64 cell = c->needs[i].first; cell < c->needs[i].last; cell++) {
        if (comes[cell]) continue; /* both chunks need it, so both ranks do */
        int lost = once[cell + 1] != once[cell], gained = missing[cell + 1] != missing[cell];
        if (lost) *loses -= c->cells[cell];
        if (gained) *gains += c->cells[cell];
        if (lost == gained) continue;
        i64 owner = c->owner[cell], holder = owner == give ? other : owner == take ? rank : s->holder[owner];
        add_sent(s, holder, gained ? c->cells[cell] : -c->cells[cell]);
      }
  }
  i64 moved = moved_then(s, rank, received, other, received_there);
  all_received += received + received_there - s->received[rank] - s->received[other];
  return scored(c, maximum(maximum(load, rest), moved), moved, all_received);
}

/* Make the best swap of the rank that moves most, if it improves the score. Return whether one does. */
static int relieve(State *s) {
  const Chunks *c = s->c;
  Score best = score(s);
  i128 received = 0;
  i64 best_other = -1, best_x = 0, best_y = 0, limit = best.peak;
  for (i64 i = 0; i < c->ranks; i++) s->order[i] = (Keyed){s->moved[i], i}, received += s->received[i];
  qsort(s->order, c->ranks, sizeof(Keyed), by_key); /* the partners, that move least, first */
  i64 rank = 0; /* the first of those that move most */
  while (s->moved[rank] < s->order[c->ranks - 1].key) rank++;
  i64 partners[PARTNERS], number = 0;
  for (i64 i = 0; i < c->ranks && number < PARTNERS; i++)
    if (s->order[i].number != rank) partners[number++] = s->order[i].number;
  for (i64 i = 0; i < c->ranks; i++) s->order[i] = (Keyed){-s->moved[i], i};
  qsort(s->order, c->ranks, sizeof(Keyed), by_key);
  write_needs(c, s->held + rank * c->slots, s->mine_needs);
  for (i64 i = 0; i < number; i++) {
    i64 other = partners[i], rest = 0;
    const i64 *mine = s->held + rank * c->slots, *theirs = s->held + other * c->slots;
    for (i64 some = 0; some < c->ranks; some++)
      if (some != rank && some != other) rest = maximum(rest, s->load[some]);
    write_needs(c, theirs, s->theirs_needs);
    for (i64 x = 0; x < c->slots; x++)
      for (i64 y = 0; y < c->slots; y++) {
        i64 work = c->work[theirs[y]] - c->work[mine[x]];
        i64 load = maximum(s->load[rank] + work, s->load[other] - work);
        if (load > limit || !keeps_one_small(s, rank, other, mine[x], theirs[y])) continue;
        Score some = relieved(s, rank, x, other, y, load, rest, received);
        if (is_less(some, best)) best = some, best_other = other, best_x = x, best_y = y;
      }
  }
  if (best_other < 0) return 0;
  exchange(s, rank, best_x, best_other, best_y);
  return 1;
}
