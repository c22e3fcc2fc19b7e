"""The forward kernel for Hopper: each CTA processes one work tile (queries of one head, or of PACK
heads) after another. Read `forward_plain` first.

    loader        K 0   Q    V 0   K 1   V 1   K 2   ...   K n   V n | next work tile: K 0   Q   ...
    warpgroup     wait for K j:   issue S = Q K^T (tile j), rescale O, issue O += P V (tile j - 1)
                  wait for S:     P = exp(S - m)         while O += P V runs (ROWS = 192: after)
                  wait for O:     release V (tile j - 1), go to tile j + 1

The MMA with V is one tile late, even across work tiles. Barriers are those of `forward_plain`;
q.free follows a work tile's last S, or with a stale maximum its verified sums.

Partial spans come first (STALE_MAXIMUM: last; KEY_ORDER: in the order of keys). Compile-time
switches:

    ROWS            128; 192 (three warpgroups) if a query sees many tiles (`LONG_TABLE`), never
                    with rank_invariant; exponentials then wait for the MMA with V (P_AFTER_O)
    STALE_MAXIMUM   if a query sees many tiles, or with rank_invariant: `stale_maximum` replaces
                    `step` after a work tile's first tile
    KEY_ORDER       with rank_invariant: some tiles have several bands (`key_order`)
    EARLY_RESCALE   if dv is up to 128: O is rescaled during the next MMA of S
    REPEAT          only if a number on the device says so (`few_queries`)

Source: Shah et al., FlashAttention-3 (2024), sections 3.1 and 3.2."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from canon.fast.kernels.gluon.epilogue import even_strides, row_offset, store_tile
from canon.fast.kernels.gluon.forward_pipeline import (
    Buffers,
    Constants,
    Output,
    Tile,
    Warpgroup,
    issue_output,
    issue_scores,
    release_operands,
    visible_scores,
)
from canon.fast.kernels.gluon.layouts import mma_layout, per_row_layout
from canon.fast.kernels.gluon.ptx import (
    declare_registers,
    ping_pong_arrive,
    ping_pong_wait,
    zero_rows,
)
from canon.fast.kernels.gluon.softcap import factor_of_capped
from canon.fast.kernels.gluon.softmax import (
    SoftmaxState,
    empty_state,
    exponentials,
    finite_or_zero,
    highest_kept,
    rescale_output,
    rescale_sums,
    results_of_sums,
    row_maximum,
)
from canon.fast.kernels.gluon.stale_maximum import visit_span_stale
from canon.fast.kernels.gluon.tile_queue import (
    SPAN,
    allocate_published,
    batch_head_of,
    claim_work_tile,
    columns_of,
    first_tile,
    first_work_tile,
    is_partial,
    next_tile,
    position_of,
    publish,
    publish_end,
    receive,
    spans_of,
)
from canon.fast.kernels.gluon.tile_ring import (
    Ring,
    allocate_tiles,
    first_position,
    load_tile,
    make_barriers,
)


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, work, counter, buffers, group, c):
    """Load K and V of every visited tile, and Q after the first K (the loader)."""
    q, k, v = buffers.q, buffers.k, buffers.v
    BUFFERS: gl.constexpr = q.tiles.shape[0] // c.WARPGROUPS
    TOKENS: gl.constexpr = q.tiles.shape[2]
    STAGES: gl.constexpr = k.tiles.shape[0]
    BN: gl.constexpr = k.tiles.shape[2]
    t, done = 0, 0  # visited tiles, work tiles
    work_tile = first_work_tile()
    if c.REPEAT:
        work_tile = gl.where(gl.load(counter + 1) != 0, work_tile, 0)
    while work_tile > 0:
        first, _, batch, head = position_of(work, work_tile)
        key_head = head // group
        span, span_end, column, left = first_tile(work, work_tile)
        fresh = True
        while span < span_end:
            slot = t % STAGES
            parity = t // STAGES & 1
            mbarrier.wait(k.free.index(slot), parity ^ 1)
            load_tile(k_desc, batch, column, key_head, k, slot)
            if fresh:  # after K: the last S of a previous work tile frees the buffer
                for w in gl.static_range(c.WARPGROUPS):
                    b = w * BUFFERS + done % BUFFERS
                    mbarrier.wait(q.free.index(b), (done // BUFFERS & 1) ^ 1)
                    publish(buffers.published.index(b), work_tile)
                    load_tile(q_desc, batch, first + w * TOKENS, head, q, b)
            fresh = False
            mbarrier.wait(v.free.index(slot), parity ^ 1)
            load_tile(v_desc, batch, column, key_head, v, slot)
            t += 1
            span, column, left = next_tile(work, span, column, left, span_end, BN)
        work_tile = claim_work_tile(work, counter)
        done += 1
    for w in gl.static_range(c.WARPGROUPS):
        b = w * BUFFERS + done % BUFFERS
        publish_end(
            buffers.published.index(b), q.full.index(b), q.free.index(b), (done // BUFFERS & 1) ^ 1
        )


@gluon.jit
def attend(wg):
    """Compute this warpgroup's rows of every work tile."""
    state = empty_state(wg)
    previous, done = 0, 0
    ring = first_position()
    if wg.c.STALE_MAXIMUM:
        declare_registers(state.p, wg.INDEX)
    if wg.INDEX == wg.c.WARPGROUPS - 1:
        ping_pong_arrive(wg.INDEX, wg.c.WARPGROUPS)  # the first warpgroup goes first
    work_tile = receive(
        wg.published.index(wg.INDEX * wg.BUFFERS), wg.q.full.index(wg.INDEX * wg.BUFFERS), 0
    )
    while work_tile > 0:
        # the first tile, which ends the previous work tile
        q_buffer = wg.INDEX * wg.BUFFERS + done % wg.BUFFERS
        row = gl.load(wg.work + work_tile) + wg.INDEX * wg.TOKENS
        span_first, span_end = spans_of(wg.work, work_tile)
        column, stop = columns_of(wg.work, span_first, wg.BN)
        tile = Tile(q_buffer, row, span_first, span_end, column, stop)
        state, ring = step(state, wg, ring, tile, previous, is_partial(wg.work, span_first), True)
        # all other tiles
        for span in range(span_first, span_end, SPAN):
            column, stop = columns_of(wg.work, span, wg.BN)
            partial = is_partial(wg.work, span)
            column += gl.where(span == span_first, wg.BN, 0)
            tile = Tile(q_buffer, row, span, span_end, column, stop)
            if wg.c.STALE_MAXIMUM:
                state, ring = visit_span_stale(state, wg, ring, tile, partial)
            else:
                state, ring = visit_span(state, wg, ring, tile, partial)
        done += 1
        q_buffer = wg.INDEX * wg.BUFFERS + done % wg.BUFFERS
        previous = work_tile
        work_tile = receive(
            wg.published.index(q_buffer), wg.q.full.index(q_buffer), done // wg.BUFFERS & 1
        )
    # the last MMA with V
    if previous > 0:
        o = issue_output(rescale_output(state.o, state.shrink), state.p, wg, ring, False)
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        write_result(o, state, wg, previous)
    if wg.INDEX == 0:
        # take the last arrival of the last warpgroup: the barrier ends balanced
        ping_pong_wait(wg.INDEX)


@gluon.jit
def visit_span(state, wg, ring, tile, partial):
    """Add the tiles of a span from ``tile`` on. Return the state and the ring position."""
    partial_stop = gl.where(partial, tile.stop, tile.column)
    for column in range(tile.column, partial_stop, wg.BN):
        state, ring = step(state, wg, ring, tile.at(column), 0, True, False)
    for column in range(partial_stop, tile.stop, wg.BN):
        state, ring = step(state, wg, ring, tile.at(column), 0, False, False)
    return state, ring


@gluon.jit
def step(state, wg, ring, tile, previous, partial, FIRST: gl.constexpr):
    """Add one tile. Return the state and the ring position. FIRST: also write O of the work tile
    ``previous``.
    """
    P_AFTER_O: gl.constexpr = wg.c.WARPGROUPS == 3
    # wider heads have no registers to spare
    EARLY_RESCALE: gl.constexpr = wg.DV_PAD <= 128
    # S of this tile and O += P V of the one before
    no_shrink = gl.full([wg.M], 1.0, gl.float32, per_row_layout(wg.BN))
    is_last = tile.is_last(wg.BN)
    s = issue_scores(wg, ring, tile)
    o = state.o
    if EARLY_RESCALE:
        o = rescale_output(o, state.shrink)
    o = issue_output(o, state.p, wg, ring)
    if not FIRST:
        limit = highest_kept(state.m, state.l, wg.BN)
    s, o = hopper.warpgroup_mma_wait(1, deps=[s, o])
    release_operands(wg, ring, tile, is_last)

    # the new maximum, or the old one
    s = visible_scores(s, wg, tile, partial)
    m = row_maximum(s) * factor_of_capped(wg.scale_log2, wg.c.SOFTCAP)
    if not FIRST:
        m = gl.where(m > limit, m, state.m)
    m_finite = finite_or_zero(m)
    if FIRST:
        shrink = no_shrink
    else:
        shrink = gl.exp2(state.m - m_finite)
    if P_AFTER_O:
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(
            wg.v.free.index(ring.previous), count=1, pred=previous > 0 if FIRST else True
        )
    # P and its sums, while O += P V runs
    p, l = exponentials(s, m_finite, wg)
    # V is needed in the next step. But the compiler moves no code across this wait, a loop, so the
    # wait for o (if not P_AFTER_O) stays below the exponentials.
    mbarrier.wait(wg.v.full.index(ring.slot), ring.parity)
    if not P_AFTER_O:
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(
            wg.v.free.index(ring.previous), count=1, pred=previous > 0 if FIRST else True
        )
    # O is complete: write it, or rescale it
    if FIRST:
        if previous > 0:
            write_result(o, state, wg, previous)
        o = gl.zeros([wg.M, wg.DV_PAD], gl.float32, mma_layout(wg.DV_PAD))
    else:
        l += rescale_sums(state.l, shrink)
        if not EARLY_RESCALE:
            o, shrink = rescale_output(o, shrink), no_shrink
    excess = gl.zeros_like(l) if wg.c.STALE_MAXIMUM else state.excess
    return SoftmaxState(o, p, m, l, excess, shrink), ring.next(wg.STAGES)


@gluon.jit
def write_result(o, state, wg, work_tile):
    """Divide the complete o by the sums, and write ``out`` and ``lse``."""
    output = wg.output
    first, stop, batch, head = position_of(wg.work, work_tile)
    batch_head = batch_head_of(wg.work, work_tile)
    first += wg.INDEX * wg.TOKENS
    left = stop - first
    divisor = state.l - state.excess if wg.c.STALE_MAXIMUM else state.l
    inverse, lse = results_of_sums(state.m, state.l, divisor, per_row_layout(wg.BN))
    r = gl.arange(0, wg.M, per_row_layout(wg.BN))
    start = output.lse + (batch_head.to(gl.int64) * output.tokens + first)
    gl.store(start + (r // wg.PACK + r % wg.PACK * output.tokens), lse, mask=r // wg.PACK < left)
    inverse = gl.expand_dims(gl.convert_layout(inverse, per_row_layout(o.shape[1])), 1)
    o = zero_rows(o * inverse, inverse)
    strides = even_strides(output.tokens, output.stride_t, output.stride_h)
    start = output.out + row_offset(batch, first, head, strides)
    store_tile(start, o, batch_head, left, output.stride_t, output.stride_h, wg.c.DV, wg.PACK)


@gluon.jit(do_not_specialize=["tokens", "group"], do_not_specialize_on_alignment=["lse"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    work,
    counter,
    scale_log2,  # > 0
    tokens,
    stride_t,
    stride_h,
    group,
    D: gl.constexpr,
    DV: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    STALE_MAXIMUM: gl.constexpr,
    KEY_ORDER: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MATH_REGISTERS: gl.constexpr,
    REPEAT: gl.constexpr = False,
):
    """Write what `forward_plain_kernel` does. ``counter`` is 0 at launch, or not read."""
    WARPGROUPS: gl.constexpr = ROWS // 64
    c = Constants(WARPGROUPS, D, DV, SOFTCAP, STALE_MAXIMUM, KEY_ORDER, REPEAT)
    q_tiles = allocate_tiles(q_desc, WARPGROUPS * BUFFERS)
    published = allocate_published(WARPGROUPS * BUFFERS)
    k_tiles, v_tiles = allocate_tiles(k_desc, STAGES), allocate_tiles(v_desc, STAGES)
    q = Ring(
        q_tiles, make_barriers(WARPGROUPS * BUFFERS, 1), make_barriers(WARPGROUPS * BUFFERS, 1)
    )
    k = Ring(k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, WARPGROUPS))
    v = Ring(v_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, WARPGROUPS))
    fence_async_shared()
    buffers = Buffers(q, k, v, published)
    output = Output(out, lse, tokens, gl.to_tensor(stride_t), gl.to_tensor(stride_h))
    loaded = (q_desc, k_desc, v_desc, work, counter, buffers, group, c)
    wg0 = Warpgroup(buffers, output, work, scale_log2, 0, c)
    wg1 = Warpgroup(buffers, output, work, scale_log2, 1, c)
    wg2 = Warpgroup(buffers, output, work, scale_log2, 2, c)
    gl.warp_specialize(
        [
            (load_tiles, loaded),
            (attend, (wg0,)),
            (attend, (wg1,)),
            (attend, (wg2,)),
        ][: 1 + WARPGROUPS],
        [4] * WARPGROUPS,
        [MATH_REGISTERS] * WARPGROUPS,
    )
