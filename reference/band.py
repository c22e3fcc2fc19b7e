"""A band: a rectangle of queries and keys, cut by two diagonals. Masks are sums of bands.

    keys         k_start        k_stop
                    |  . . . . . |          query i sees key j  iff  q_start <= i < q_stop,
    q_start  -      |x x . . . . |                                   k_start <= j < k_stop  and
                    |x x x . . . |                                   lo <= j - i <= hi.
                    |. x x x . . |
    q_stop   -      |. . x x x . |          (here lo = -1 and hi = +1, counted from the corner)

Causal attention is hi = 0, a left window of w keys is lo = -w, full attention has neither bound. Everything
that context parallelism does to a mask turns bands into bands: a range of the queries or of the keys changes
the rectangle, local coordinates add an offset to lo and hi, and every W-th token divides them by W.

Source: this form replaces the four slice types of MagiAttention (Zewei Tao and Yunpeng Huang, SandAI, 2025),
which are four choices of lo and hi.
"""

from typing import NamedTuple

from canon.reference.arguments import whole

_INTS = frozenset({int, type(None)})


class _Bounds(NamedTuple):
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int


class Band(_Bounds):
    """Query i sees key j iff q_start <= i < q_stop, k_start <= j < k_stop and lo <= j - i <= hi.

    ``lo=None`` and ``hi=None`` mean no bound. A band is kept tight: the rectangle and the bounds shrink to what
    its cells reach, so that two bands with the same cells are equal, every query from q_start to q_stop sees a
    key and every key from k_start to k_stop is seen. A band without cells is (0, 0, 0, 0, 0, -1).

    A band is the tuple of its six numbers: immutable, and cheap to compare, to sort and to hash.
    Raises TypeError for a number that is not whole.
    """

    __slots__ = ()

    def __new__(
        cls, q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int | None = None, hi: int | None = None
    ):
        given = q_start, q_stop, k_start, k_stop, lo, hi
        if not _INTS.issuperset(map(type, given)) or None in given[:4]:
            names = zip(_Bounds._fields, given, strict=True)
            return cls(
                *(None if value is None and name in ("lo", "hi") else whole(name, value) for name, value in names)
            )
        lowest, highest = k_start - q_stop + 1, k_stop - 1 - q_start  # what j - i reaches in the rectangle
        lo = lowest if lo is None else max(lo, lowest)
        hi = highest if hi is None else min(hi, highest)
        if q_start >= q_stop or k_start >= k_stop or lo > hi:
            return super().__new__(cls, 0, 0, 0, 0, 0, -1)
        # Three unknowns i, j and 0 with a bound on each difference: a bound can only be tightened through the third.
        tight = (
            max(q_start, k_start - hi),
            min(q_stop, k_stop - lo),
            max(k_start, q_start + lo),
            min(k_stop, q_stop + hi),
            lo,
            hi,
        )
        return super().__new__(cls, *tight)

    def __repr__(self) -> str:
        return f"Band(q {self.q_start}:{self.q_stop}, k {self.k_start}:{self.k_stop}, {self.lo} <= j-i <= {self.hi})"

    @property
    def area(self) -> int:
        """The number of cells, in closed form: the rectangle less the two corners that the diagonals cut off."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        below = self.lo - (self.k_start - self.q_stop + 1)  # diagonals under lo, from the lower left corner
        above = (self.k_stop - 1 - self.q_start) - self.hi  # diagonals over hi, from the upper right corner
        return queries * keys - _corner(queries, keys, below) - _corner(queries, keys, above)

    def intersect(self, other: "Band") -> "Band":
        """The cells that both bands hold."""
        return Band(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            max(self.lo, other.lo),
            min(self.hi, other.hi),
        )

    def shift(self, queries: int = 0, keys: int = 0) -> "Band":
        """The band moved down by ``queries`` and right by ``keys``."""
        return Band(
            self.q_start + queries,
            self.q_stop + queries,
            self.k_start + keys,
            self.k_stop + keys,
            self.lo + keys - queries,
            self.hi + keys - queries,
        )

    def pick(self, queries: range, keys: range) -> "Band":
        """The band between ``queries`` and ``keys``, each counted from 0: rows and columns of a matrix, sliced.

        Both ranges have one step W >= 1: i = queries.start + W i' and j = keys.start + W j' give
        lo <= (keys.start - queries.start) + W (j' - i') <= hi. Raises ValueError for other steps.
        """
        if queries.step != keys.step or queries.step < 1:
            raise ValueError(f"pick needs two ascending ranges of one step, got {queries} and {keys}")
        step, offset = queries.step, keys.start - queries.start
        return Band(
            max(0, -((queries.start - self.q_start) // step)),
            min(len(queries), -((queries.start - self.q_stop) // step)),
            max(0, -((keys.start - self.k_start) // step)),
            min(len(keys), -((keys.start - self.k_stop) // step)),
            -((offset - self.lo) // step),
            (self.hi - offset) // step,
        )

    def join(self, other: "Band") -> "Band | None":
        """One band with exactly the cells of two disjoint ones, or None where no band has them."""
        hull = Band(
            min(self.q_start, other.q_start),
            max(self.q_stop, other.q_stop),
            min(self.k_start, other.k_start),
            max(self.k_stop, other.k_stop),
            min(self.lo, other.lo),
            max(self.hi, other.hi),
        )
        return hull if hull.area == self.area + other.area else None  # the hull holds both: equal areas, equal cells


def _corner(rows: int, columns: int, diagonals: int) -> int:
    """Cells of a rows x columns rectangle on the first ``diagonals`` diagonals, counted from one corner."""
    return _triangle(diagonals) - _triangle(diagonals - rows) - _triangle(diagonals - columns)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def joined(bands: list[Band]) -> list[Band]:
    """The same cells in fewer bands: neighbours along the keys, then along the queries, become one where they can.

    What was cut at a seam between two ranks, and is whole again in a gathered buffer, comes out whole.
    """
    for order in (lambda x: (x.q_start, x.q_stop, x.k_start), lambda x: (x.q_start, x.k_start)):
        merged: list[Band] = []
        for band in sorted(bands, key=order):
            both = merged[-1].join(band) if merged else None
            merged[-1:] = [both] if both else [*merged[-1:], band]
        bands = merged
    return bands
