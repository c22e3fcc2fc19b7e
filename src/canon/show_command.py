"""`canon show`: draw a mask, a layout or a plan into a file. It needs matplotlib.

canon show mask --causal 4096 --blocks 300:876,2000:2576 --out images.svg
canon show mask --window 4096,512 --prefix 4096,64 --out union.svg
canon show layout --causal 65536 --layout zigzag --ranks 8 --out layout.png
canon show plan --documents 4096,1024,300 --ranks 8 --out plan.svg
"""

import argparse
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from canon.masks.layout import Layout
from canon.masks.mask import Mask

MISUSED = 2
NAMES = "a name that ends in .svg, .png or .pdf"
LAYOUTS = ("dispatch", "zigzag", "contiguous", "striped")
# option: metavar, help, mask of its numbers
MASKS: dict[str, tuple[str, str, Callable[..., Mask]]] = {
    "causal": ("TOKENS", "each token sees itself and all earlier ones", Mask.causal),
    "full": ("TOKENS", "each token sees all tokens", Mask.full),
    "window": (
        "TOKENS,LEFT[,RIGHT]",
        "each token sees LEFT tokens before it and RIGHT after it (default: 0)",
        lambda n, left, right=0: Mask.window(n, left, right),
    ),
    "prefix": (
        "TOKENS,PREFIX",
        "causal; the first PREFIX tokens see each other",
        Mask.prefix,
    ),
    "documents": (
        "LENGTH[,LENGTH...]",
        "packed documents of these lengths, causal inside each",
        lambda *lengths: Mask.documents([0, *accumulate(lengths)]),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    whats = parser.add_subparsers(dest="what", required=True, metavar="mask|layout|plan")
    for what, purpose in (
        ("mask", "the visible cells, with one colour for each band"),
        ("layout", "the rows of a mask in the colours of their ranks, and the work of each rank"),
        ("plan", "the tokens, the work and the traffic of each rank"),
    ):
        command = whats.add_parser(what, help=purpose, description=purpose)
        command.add_argument(
            "--out",
            type=Path,
            required=True,
            metavar="FILE",
            help=NAMES,
        )
        masks = command.add_argument_group("masks", "several make their union")
        for name, (metavar, text, _) in MASKS.items():
            masks.add_argument(f"--{name}", type=numbers, metavar=metavar, help=text)
        masks.add_argument(
            "--blocks",
            type=blocks,
            default=[],
            metavar="START:STOP[,...]",
            help="the tokens of each block also see each other, such as those of an image",
        )
        if what != "mask":
            command.add_argument(
                "--ranks", type=int, required=True, metavar="N", help="ranks that hold the tokens"
            )
            command.add_argument(
                "--layout",
                choices=LAYOUTS,
                default="dispatch",
                help="default: dispatch, which fits the mask",
            )


def numbers(text: str) -> list[int]:
    """Return the numbers of "4096,1024"."""
    return [int(number) for number in text.split(",")]


def blocks(text: str) -> list[tuple[int, int]]:
    """Return the pairs of "300:876,2000:2576"."""
    pairs = [block.split(":") for block in text.split(",")]
    return [(int(start), int(stop)) for start, stop in pairs]


def run(arguments: argparse.Namespace) -> int:
    """Return the exit status: 0, or 2 for invalid arguments or without matplotlib."""
    try:
        if not arguments.out.suffix:
            raise ValueError(f"--out {arguments.out}: expected {NAMES}")
        drawn(arguments).savefig(arguments.out, bbox_inches="tight")
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"canon show: {error}", file=sys.stderr)
        return MISUSED
    print(arguments.out)
    return 0


def drawn(arguments: argparse.Namespace) -> Any:
    """Return the figure. Raises ModuleNotFoundError, ValueError or TypeError."""
    from canon.show.style import plt

    plt.switch_backend("agg")  # a file needs no display
    mask = mask_of(arguments)
    if arguments.what == "mask":
        return mask.plot().figure
    layout = layout_of(mask, arguments)
    if arguments.what == "layout":
        return layout.plot(mask)
    from canon.fast import plan_report
    from canon.show.plan_figures import plot_plan

    return plot_plan(mask, layout, plan_report(mask, layout))


def mask_of(arguments: argparse.Namespace) -> Mask:
    """Return the union of the masks, with the blocks."""
    masks = []
    for name, (metavar, _, make) in MASKS.items():
        if (given := getattr(arguments, name)) is None:
            continue
        try:
            masks.append(make(*given))
        except TypeError as error:
            got = ",".join(map(str, given))
            raise ValueError(f"--{name} takes {metavar}, got {got}") from error
    if not masks:
        raise ValueError(f"give one or more of the masks --{', --'.join(MASKS)}")
    starts, stops = zip(*arguments.blocks, strict=True) if arguments.blocks else ((), ())
    return Mask.union(*masks).with_blocks(starts, stops)


def layout_of(mask: Mask, arguments: argparse.Namespace) -> Layout:
    """Return the layout that ``--layout`` names."""
    if arguments.layout != "dispatch":
        return getattr(Layout, arguments.layout)(mask.queries, arguments.ranks)
    from canon.fast import dispatch

    return dispatch(mask, arguments.ranks)
