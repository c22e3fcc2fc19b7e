"""Hypothesis strategies for bands, masks and layouts, and for the intervals and ranges that cut
them.
"""

from itertools import pairwise

from hypothesis import strategies as st

from canon import Band, Layout, Mask

bounds = st.none() | st.integers(-12, 12)


def check(mask, matrix):
    """Assert that a mask has the cells of a matrix, in sorted tight bands that share none."""
    checked = Mask(mask.bands, mask.queries, mask.keys)
    assert checked == mask
    assert (checked.bands, hash(checked), checked.digest) == (mask.bands, hash(mask), mask.digest)
    assert all(type(band) is Band and band == Band(*band) for band in mask.bands), "tight"
    assert mask.dense().equal(matrix)
    assert mask.area == matrix.sum()


@st.composite
def intervals(draw, low=0, high=9):
    """Draw (start, stop) with low <= start <= stop <= high."""
    start, stop = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
    return start, stop


@st.composite
def bands(draw):
    """Draw a band of at most 9 queries and 9 keys, possibly empty."""
    return Band(*draw(intervals()), *draw(intervals()), draw(bounds), draw(bounds))


@st.composite
def ranges_inside(draw, size, step=1):
    """Draw a range between 0 and ``size``."""
    start, stop = draw(intervals(0, size))
    return range(start, stop, step)


KINDS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


@st.composite
def planned(draw, n, ranks):
    """Draw any layout of step 1: pieces cut anywhere, on any rank, in any order."""
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=5))})
    pieces = draw(st.permutations([range(a, b) for a, b in pairwise(cuts)]))
    held = [[] for _ in range(ranks)]
    for piece in pieces:
        held[draw(st.integers(0, ranks - 1))].append(piece)
    return Layout(held, n)


@st.composite
def layouts(draw, n=None, ranks=None):
    """Draw a layout of any kind; often with more ranks than tokens, seldom with a number of ranks
    that divides.
    """
    n = draw(st.integers(0, 23)) if n is None else n
    ranks = draw(st.integers(1, 7)) if ranks is None else ranks
    kind = draw(st.sampled_from([*KINDS, "planned"]))
    return draw(planned(n, ranks)) if kind == "planned" else KINDS[kind](n, ranks)


@st.composite
def trees(draw, most=9):
    """Draw parents, lengths and starts of a tree in depth-first order,
    with empty nodes and gaps.
    """
    sizes = st.lists(st.sampled_from([0, 1, 1, 2, 5]), max_size=most)
    parents, path, lengths = [], [-1], draw(sizes)
    for node in range(len(lengths)):
        path = path[: draw(st.integers(1, len(path)))]
        parents.append(path[-1])
        path.append(node)
    gaps = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in lengths]
    starts = [sum(lengths[:i]) + sum(gaps[: i + 1]) for i in range(len(lengths))]
    return parents, lengths, starts


@st.composite
def square_masks(draw, n):
    """Draw an n x n mask of every kind, also with queries that see nothing and keys that are not
    seen.
    """
    kind = draw(st.sampled_from(["window", "documents", "block_causal", "ranges", "tree"]))
    if kind == "window":
        sides = st.none() | st.integers(0, n)
        return Mask.window(n, draw(sides), draw(sides))
    if kind == "documents":
        # repeated ends are empty documents
        inner = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
        return Mask.documents([0, *inner, n], causal=draw(st.booleans()))
    if kind == "tree":
        parents, lengths, starts = draw(trees())
        kept = [node for node, start in enumerate(starts) if start + lengths[node] <= n]
        return Mask.tree(
            [*parents[: len(kept)], -1], [*lengths[: len(kept)], 0], [*starts[: len(kept)], n]
        )
    if kind == "block_causal":
        tokens = {"min_size": n, "max_size": n}
        blocks = draw(st.lists(st.integers(0, 3), **tokens))
        return Mask.block_causal(
            blocks, None, *(draw(st.none() | st.lists(st.booleans(), **tokens)) for _ in "qk")
        )
    a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    kinds = [draw(st.integers(0, 3)) for _ in range(2)]
    return Mask.ranges([(0, a), (a, b)], [(a, n), (0, b)], kinds, queries=n, keys=n)


@st.composite
def masks(draw):
    """Draw a square mask or a band, shifted and cropped."""
    n = draw(st.integers(0, 40))
    band = Band(
        0,
        n,
        0,
        draw(st.integers(0, 30)),
        lo := draw(st.integers(-30, 30)),
        lo + draw(st.integers(0, 40)),
    )
    mask = draw(
        square_masks(n)
        | st.just(Mask([band], n + draw(st.integers(0, 9)), band.k_stop + draw(st.integers(0, 9))))
    )
    mask = mask.shift(draw(st.integers(0, 5)), draw(st.integers(0, 5)))
    return mask.crop(queries=range(draw(st.integers(0, mask.queries)), mask.queries))
