"""Hypothesis strategies for bands, and for the intervals and ranges that cut them."""

from hypothesis import strategies as st

from canon import Band

bounds = st.none() | st.integers(-12, 12)


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
