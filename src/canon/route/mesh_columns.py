"""The kind of a call on a column of a mesh: the tokens of its rows, and its part of the heads."""

from canon.masks.layout import Layout
from canon.masks.rows import united
from canon.route.algorithm import Declaration, Shapes


def of_column(layout: Layout, shapes: Shapes, rank: int, columns: int) -> tuple[Layout, Shapes]:
    """Return the layout of the rows, and the shapes of q, k and v after the exchange."""
    rows = united(layout, columns)
    tokens = rows.size(rank // columns)
    shapes = tuple(type(x)((x[0], tokens, x[2] // columns, x[3])) for x in shapes)
    return rows, shapes


def check_heads(declaration: Declaration, shapes: Shapes, ranks: int, columns: int) -> None:
    """Raise ValueError unless each rank of a row gets equally many heads of q, k and v."""
    if declaration.tensors[1:] != ("k", "v"):
        raise ValueError(
            f"{declaration.name}: the heads of a latent travel together, so a mesh with 'heads' "
            "cannot share them: pass a ProcessGroup or a DeviceMesh of one dimension"
        )
    key_heads = shapes[1][2]
    if key_heads % columns:
        most = max(n for n in range(1, columns) if key_heads % n == 0 and ranks % n == 0)
        raise ValueError(
            f"{declaration.name}: the {columns} ranks of a row cannot share {key_heads} key heads: "
            f"pass a mesh of {ranks // most} x {most} ranks ('tokens', 'heads'), the most heads "
            "that they can"
        )
