"""Draw masks and layouts of random cases, as Python expressions."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random


def size(draw: Random, most: int) -> int:
    """Return a number of tokens."""
    if draw.random() < 0.06:
        return draw.choice([0, 1, 1, 2])
    return max(1, round(3 * (most / 3) ** draw.random()))


def square(draw: Random, n: int, parts: bool = True, only: frozenset[str] = frozenset()) -> str:
    """Return a mask of n queries and n keys, of the kinds ``only``, if any."""
    left, right = (draw.choice([None, -1, 0, draw.randint(0, n)]) for _ in range(2))
    kinds: dict[str, Callable[[], str]] = {
        "full": lambda: f"Mask.full({n})",
        "causal": lambda: f"Mask.causal({n})",
        "window": lambda: f"Mask.window({n}, left={left}, right={right})",
        "documents": lambda: _documents(draw, n, plain=bool(only)),
        "prefix": lambda: f"Mask.prefix({n}, {draw.randint(0, n)})",
        "block_causal": lambda: f"Mask.block_causal({_blocks(draw, n)}{_validity(draw, n, 'qk')})",
        "ranges": lambda: ranges(draw, n, n),
        "tree": lambda: _tree(draw, n),
        "concat": lambda: _concat(draw, n, lambda size: square(draw, size, False)),
        "blocks": lambda: f"{square(draw, n, False)}.with_blocks{_intervals(draw, n)}",
        "union": lambda: f"Mask.union({square(draw, n, False)}, {square(draw, n, False)})",
    }
    names = sorted(only) or [*kinds, "documents", "documents"]
    of_parts = {"concat", "blocks", "union"}
    return kinds[draw.choice([name for name in names if parts or name not in of_parts])]()


def any_mask(draw: Random, n: int) -> str:
    """Return a mask with n queries."""
    kind = draw.choice(
        ["square", "square", "square", "causal", "ranges", "blocks", "crop", "shift", "concat"]
    )
    keys = size(draw, max(3, 2 * n))
    if kind == "causal":
        return f"Mask.causal({n}, {keys})"
    if kind == "ranges":
        return ranges(draw, n, keys)
    if kind == "blocks":
        validity = _validity(draw, n, "q") + _validity(draw, keys, "k")
        return f"Mask.block_causal({_blocks(draw, n)}, {_blocks(draw, keys)}{validity})"
    if kind == "crop":
        q, k = (sorted(draw.randint(0, n) for _ in range(2)) for _ in range(2))
        return f"{square(draw, n)}.crop(range({q[0]}, {q[1]}), range({k[0]}, {k[1]}))"
    if kind == "shift":
        return f"{square(draw, n)}.shift({draw.randint(-n // 3, 20)}, {draw.randint(-n // 3, 20)})"
    if kind == "concat":
        return _concat(draw, n, lambda size: ranges(draw, size, draw.randint(0, 2 * size)))
    return square(draw, n)


def _documents(draw: Random, n: int, plain: bool) -> str:
    ends = [0, *sorted(draw.randint(0, n) for _ in range(draw.choice([0, 1, 2, 3, 5, 9]))), n]
    if draw.random() < 0.3:  # empty documents
        ends = sorted([*ends, draw.choice(ends), draw.choice(ends)])
    if draw.random() < 0.1:  # many short documents: query heads share a tile
        ends = [*range(0, n, draw.randint(1, 7) if n < 60 else draw.randint(3, 16)), n]
    if plain:
        return f"Mask.documents({ends})"
    window = tuple(draw.choice([None, draw.randint(0, max(1, n // 3))]) for _ in range(2))
    options = "" if draw.random() < 0.7 else ", causal=False"
    options += f", window={window}" if draw.random() < 0.4 else ""
    return f"Mask.documents({ends}{options})"


def _tree(draw: Random, n: int) -> str:
    starts = sorted(draw.randint(0, n) for _ in range(draw.choice([1, 2, 5, 9, 20])))
    lengths = [
        draw.choice([stop - start] * 3 + [draw.randint(0, stop - start)])
        for start, stop in pairwise([*starts, n])
    ]
    parents, path = [], [-1]
    for node in range(len(starts)):
        path = path[: draw.randint(max(1, len(path) - 3), len(path))]
        parents.append(path[-1])
        path.append(node)
    return f"Mask.tree({[*parents, -1]}, {[*lengths, 0]}, {[*starts, n]})"


def _parts(draw: Random, n: int, count: int) -> Iterable[tuple[int, int]]:
    return pairwise([0, *sorted(draw.randint(0, n) for _ in range(count)), n])


def _runs(draw: Random, n: int, most: int, values: Callable[[], int]) -> str:
    runs = [(values(), b - a) for a, b in _parts(draw, n, draw.randint(0, most)) if b > a]
    return " + ".join(f"[{value}] * {length}" for value, length in runs) or "[]"


def _intervals(draw: Random, n: int) -> tuple[list[int], list[int]]:
    cuts = sorted({draw.randint(0, n) for _ in range(draw.randint(0, 6))})
    pairs = [pair for pair in pairwise(cuts) if draw.random() < 0.6]
    return [start for start, _ in pairs], [stop for _, stop in pairs]


def _blocks(draw: Random, n: int) -> str:
    return _runs(draw, n, 5, lambda: draw.randint(-1, 4))


def _validity(draw: Random, n: int, sides: str) -> str:
    arguments = [
        f", {side}_valid={_runs(draw, n, 4, lambda: draw.randint(0, 1))}" for side in sides
    ]
    return "".join(argument for argument in arguments if draw.random() < 0.5)


def ranges(draw: Random, queries: int, keys: int) -> str:
    """Return `Mask.ranges` with all four types, as disjoint cells of a grid."""
    rows, columns, kinds = [], [], []
    for start, stop in _parts(draw, queries, draw.randint(0, 3)):
        if start == stop:
            continue
        edges = sorted({draw.randint(0, keys) for _ in range(draw.randint(1, 4))})
        for left, right in pairwise(edges):
            if draw.random() < 0.8:
                rows.append([start, stop])
                columns.append([left, right])
                kinds.append(draw.randint(0, 3))
    return f"Mask.ranges({rows}, {columns}, {kinds}, queries={queries}, keys={keys})"


def _concat(draw: Random, n: int, part: Callable[[int], str]) -> str:
    parts = [part(b - a) for a, b in _parts(draw, n, draw.randint(1, 2))]
    return f"Mask.concat([{', '.join(parts)}])"


def tiled_layout(draw: Random, mask: str, n: int, ranks: int, _: str | None) -> str:
    """Return a layout of whole tiles."""
    kind = draw.choice(["contiguous", "zigzag", "planned", "tiles"])
    if kind == "planned":
        return f"dispatch({mask}, {ranks}, rank_invariant=True)"
    if kind != "tiles":
        return f"Layout.{kind}({n}, {ranks}, 128)"
    held: list[list[range]] = [[] for _ in range(ranks)]
    for start in range(0, n, 128):
        draw.choice(held).append(range(start, min(n, start + 128)))
    for pieces in held:
        draw.shuffle(pieces)
        pieces.sort(key=lambda piece: len(piece) < 128)  # a short piece is the last one
    return f"Layout({held}, {n})"


def layout_of(draw: Random, mask: str, n: int, ranks: int, fixed: str | None) -> str:
    """Return a layout of the kind ``fixed`` or any, with uneven and empty shards."""
    kinds = ["contiguous", "zigzag", "striped", "planned", "runs", "runs", "steps"]
    kind = fixed or draw.choice(kinds)
    if kind in {"contiguous", "zigzag", "striped"}:
        return f"Layout.{kind}({n}, {ranks})"
    if kind == "planned":
        chunk = max(1, n // draw.choice([ranks, 2 * ranks, 8 * ranks]))
        rates = "" if draw.random() < 0.3 else ", imbalance=1.0, cells_per_us=1, tokens_per_us=1000"
        return f"dispatch({mask}, {ranks}, chunk={chunk}{rates})"
    held: list[list[range]] = [[] for _ in range(ranks)]
    holders = draw.sample(held, draw.choice([ranks, draw.randint(1, ranks)]))
    step = draw.randint(2, 5) if kind == "steps" else 1
    for residue in range(min(step, n)):
        tokens = range(residue, n, step)
        for start, stop in _parts(draw, len(tokens), draw.randint(0, ranks)):
            draw.choice(holders).extend([tokens[start:stop]] * (start < stop))
    for pieces in held:
        draw.shuffle(pieces)
    return f"Layout({held}, {n})"
