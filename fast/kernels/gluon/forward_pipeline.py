"""State of the forward kernel's pipeline, and the two MMAs of each visited tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from canon.fast.kernels.gluon.layouts import contracted_width, mma_layout
from canon.fast.kernels.gluon.masking import mask_hidden
from canon.fast.kernels.gluon.ptx import ping_pong_arrive, ping_pong_wait
from canon.fast.kernels.gluon.softcap import capped
from canon.fast.kernels.gluon.tile_queue import SPAN
from canon.fast.kernels.gluon.tile_ring import Ring, aggregate, issue_contraction


@aggregate
class Buffers:
    """The rings of Q (BUFFERS tiles for each warpgroup), K and V, and the published work tiles."""

    q: Ring
    k: Ring
    v: Ring
    published: gl.shared_memory_descriptor


@aggregate
class Output:
    """Pointers to out and lse, tokens of a sequence, strides of out."""

    out: gl.tensor
    lse: gl.tensor
    tokens: gl.tensor
    stride_t: gl.tensor
    stride_h: gl.tensor


@aggregate
class Constants:
    """WARPGROUPS, widths and switches, SOFTCAP (None or the limit)."""

    WARPGROUPS: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr
    SOFTCAP: gl.constexpr
    STALE_MAXIMUM: gl.constexpr
    KEY_ORDER: gl.constexpr
    REPEAT: gl.constexpr


@aggregate
class Warpgroup:
    """Warpgroup INDEX: M rows (TOKENS tokens of PACK heads), BN columns of a tile, BUFFERS of Q,
    STAGES of K and V.
    """

    q: Ring
    k: Ring
    v: Ring
    published: gl.shared_memory_descriptor
    output: Output
    work: gl.tensor
    scale_log2: gl.tensor
    INDEX: gl.constexpr
    c: Constants
    TOKENS: gl.constexpr
    PACK: gl.constexpr
    M: gl.constexpr
    BN: gl.constexpr
    DV_PAD: gl.constexpr
    BUFFERS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, output, work, scale_log2, INDEX, c):
        self.q = buffers.q
        self.k = buffers.k
        self.v = buffers.v
        self.published = buffers.published
        self.output = output
        self.work = work
        self.scale_log2 = scale_log2
        self.INDEX = gl.constexpr(INDEX)
        self.c = c
        self.TOKENS = gl.constexpr(buffers.q.tiles.shape[2])
        self.PACK = gl.constexpr(buffers.q.tiles.shape[3])
        self.M = gl.constexpr(buffers.q.tiles.shape[2] * buffers.q.tiles.shape[3])
        self.BN = gl.constexpr(buffers.k.tiles.shape[2])
        self.DV_PAD = gl.constexpr(buffers.v.tiles.shape[4])
        self.BUFFERS = gl.constexpr(buffers.q.tiles.shape[0] // c.WARPGROUPS)
        self.STAGES = gl.constexpr(buffers.k.tiles.shape[0])


@aggregate
class Tile:
    """A visited tile: buffer of Q, first token, its span and the end of the spans, first column,
    and the end of the span.
    """

    q_buffer: gl.tensor
    row: gl.tensor
    span: gl.tensor
    span_end: gl.tensor
    column: gl.tensor
    stop: gl.tensor

    @gluon.jit
    def at(self, column):
        return Tile(self.q_buffer, self.row, self.span, self.span_end, column, self.stop)

    @gluon.jit
    def is_last(self, BN: gl.constexpr):
        return (self.span + SPAN == self.span_end) & (self.column + BN == self.stop)


@gluon.jit
def issue_scores(wg, ring, tile, IN_TURN: gl.constexpr = True):
    """Issue S = Q K^T once K has arrived (IN_TURN: and the previous warpgroup has issued)."""
    q, k = wg.q.operand(tile.q_buffer), wg.k.operand(ring.slot)
    mbarrier.wait(wg.k.full.index(ring.slot), ring.parity)
    if IN_TURN:
        ping_pong_wait(wg.INDEX)
    nothing = gl.zeros([wg.M, wg.BN], gl.float32, mma_layout(wg.BN))
    return issue_contraction(q, k, nothing, contracted_width(wg.c.D, q.shape[1]))


@gluon.jit
def visible_scores(s, wg, tile, partial):
    """Return the capped scores of a tile; if ``partial``, hidden ones are -inf."""
    s = capped(s, wg.scale_log2, wg.c.SOFTCAP)
    if partial:
        s = mask_hidden(
            s, wg.work, tile.span, tile.row, tile.column, float("-inf"), wg.PACK, wg.c.KEY_ORDER
        )
    return s


@gluon.jit
def issue_output(o, p, wg, ring, IN_TURN: gl.constexpr = True):
    """Issue o += p V of the previous tile. In the very first step the result is unused."""
    o = hopper.warpgroup_mma(p, wg.v.operand(ring.previous), o, is_async=True)
    if IN_TURN:
        ping_pong_arrive(wg.INDEX, wg.c.WARPGROUPS)
    return o


@gluon.jit
def release_operands(wg, ring, tile, is_last):
    """Release K of this tile, and Q after the work tile's last tile."""
    mbarrier.arrive(wg.k.free.index(ring.slot), count=1)
    if is_last:
        mbarrier.arrive(wg.q.free.index(tile.q_buffer), count=1)
