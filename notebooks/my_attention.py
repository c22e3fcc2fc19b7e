"""My own Canon: the functions of `canon.reference`, with those that I have written in their place.

The notebooks leave some functions to you. `mine` puts yours here, under its name, and all other
functions of this module use it from then on. If the folder `my_functions` exists, it also keeps the
source there, for the next notebook and for the shell:

    canon check my_attention --only merge

`make course` writes the notebooks with holes, and makes the folder. Without it, all functions are
those of the reference."""

import argparse
import io
import logging
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import replace
from inspect import getsource, unwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console

if not torch.cuda.is_available():
    # read when a kernel is defined: it runs on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl  # noqa: F401 - a kept `forward_kernel` uses it

from canon.faces import (
    public_attention,
    public_group_collectives,
    public_magi,
    public_parts,
    public_ring,
    public_strided,
)
from canon.fast.kernels import interpreter
from canon.masks.band import Band
from canon.masks.layout import Layout
from canon.masks.mask import Mask
from canon.masks.plan_cache import PLANS
from canon.reference import (
    backward,
    group_collectives,
    local,
    magi,
    mesh,
    owner_computes,
    ring,
    strided,
    tiles,
)
from canon.route.algorithm import Algorithm, Declaration, Side

FOLDER = Path(__file__).parent / "my_functions"
interpreter.repair()
# after an error it asks for a new process group, which each run of threads has
logging.getLogger("canon.ranks.agreement").setLevel(logging.CRITICAL)


class Row(NamedTuple):
    """A function to write: the notebook that leaves it to you, and the options of `canon check` for
    its rows.
    """

    notebook: str
    options: str


ROWS = {
    "merged": Row("00_softmax_in_pieces", "--only merge/"),
    "zigzag": Row("01_masks_and_layouts", "--only zigzag_attention/"),
    "ring_forward": Row(
        "02_ring_and_zigzag", "--only 'ring_attention/*/causal' --features forward"
    ),
    "ring_backward": Row("02_ring_and_zigzag", "--only 'ring_attention/*/causal'"),
    "pick": Row("02_ring_and_zigzag", "--only attention_forward/"),
    "strided_forward": Row("03_strided", "--only strided_attention/"),
    "start_cast": Row("04_magi", "--only group_cast/"),
    "scores": Row("08_backward", "--only attention_backward/"),
    "forward_kernel": Row(
        "09_grouped_heads", "--only attention/causal --features forward,causal,one-mask,finite"
    ),
    "to_column": Row("12_two_dimensions", "--only '*/columns'"),
}


def _here(function: Callable) -> Callable:
    """Return the function with the names of this module: it calls your functions."""
    if not isinstance(function, FunctionType):
        return function
    placed = FunctionType(
        function.__code__, globals(), function.__name__, function.__defaults__, function.__closure__
    )
    placed.__kwdefaults__, placed.__doc__ = function.__kwdefaults__, function.__doc__
    return placed


def _bring(modules: Iterable[ModuleType]) -> None:
    """Bring all names of modules of the reference here. Their functions then call yours."""
    for module in modules:
        globals().update(
            {name: value for name, value in vars(module).items() if not name.startswith("__")}
        )
    for module in modules:
        for name, value in vars(module).items():
            plain = unwrap(value) if isinstance(value, FunctionType) else value
            if getattr(plain, "__globals__", None) is vars(module):
                globals()[name] = _here(plain)


_bring((tiles, backward, local, owner_computes, ring, strided, group_collectives, magi, mesh))


# ----------------------------------------- functions to write that the reference names otherwise
def zigzag(n: int, ranks: int) -> list[list[range]]:
    """Return the tokens of each rank in a zigzag layout."""
    return [list(held) for held in Layout.zigzag(n, ranks).ranges_per_rank]


def pick(band: Band, queries: range, keys: range) -> Band:
    """Return the band between ``queries`` and ``keys``, numbered from 0."""
    return band.pick(queries, keys)


def start_cast(x, plan, stage, group):
    """Return the sent rows, the received rows and the request of a group cast in flight."""
    cast = group_collectives.GroupCast(x, plan, stage, group)
    return cast.sent, cast.received, cast.work


def scores(tile: Any, queries: slice, keys: slice, visible):
    """Return p, slope * ds and the visible cells of one tile, and its q, k and dout."""
    return backward._Backward._scores(tile, queries, keys, visible)


forward_kernel: Any = None  # without yours, `attention` computes with the tiles of the reference


# ---------------------------------------------------------------------- given: their callers
class _PickedMask(NamedTuple):
    """A mask with a crop that calls `pick`."""

    bands: list[Band]
    queries: int
    keys: int

    def crop(self, queries: range | None = None, keys: range | None = None) -> "_PickedMask":
        rows, columns = queries or range(self.queries), keys or range(self.keys)
        found = [pick(band, rows, columns) for band in self.bands]
        return _PickedMask([band for band in found if band.area], len(rows), len(columns))

    def dense(self):
        return Mask(self.bands, self.queries, self.keys).dense()


_tiles_of = visible_tiles  # of the reference


def visible_tiles(mask, device, by_keys=False, whole_tiles=False):
    """Yield the tiles of a mask, as `canon.reference.tiles` does."""
    picked = _PickedMask(list(mask.bands), mask.queries, mask.keys)
    return _tiles_of(picked, device, by_keys, whole_tiles)


class GroupCast:
    """A group cast in flight."""

    def __init__(self, x, plan, stage, group):
        self.sent, self.received, self.work = start_cast(x, plan, stage, group)

    def wait(self):
        """Wait for the exchange and return the received rows."""
        self.work.wait()
        return self.received


class _Backward(backward._Backward):
    def _scores(self, queries, keys, visible):
        return scores(self, queries, keys, visible)


def local_forward(call, q, k, v):
    """Return out and lse: by `forward_kernel` for a causal mask, if it is written, else by tiles of
    PyTorch.

    With ``rank_invariant`` the sums have the tiles of the reference.
    """
    whole = call.options["rank_invariant"]
    if forward_kernel is None or call.mask != Mask.causal(q.shape[1]) or whole:
        options = {"scale": call.scale, "out_dtype": q.dtype, "whole_tiles": whole}
        return tiled_forward(q, k, v, call.mask, **options)
    return launch(q, k, v, call.scale)


def launch(q, k, v, scale, tile=64):
    """Run `forward_kernel` with one program for each tile of queries of each head. Widths are
    padded to a power of two.
    """
    (b, t, h, _), width = q.shape, max(16, triton.next_power_of_2(max(q.shape[-1], v.shape[-1])))
    padded = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    heads_first = [x.transpose(1, 2).contiguous() for x in padded]
    out, lse = torch.empty_like(heads_first[0]), q.new_empty(b, h, t, dtype=torch.float32)
    share = h // k.shape[2]
    forward_kernel[triton.cdiv(t, tile), b * h](
        *heads_first, out, lse, t, scale, SHARE=share, D=width, TILE=tile
    )
    return out[..., : v.shape[-1]].transpose(1, 2).contiguous(), lse


# ---------------------------------------------------------------------- the public functions
def _later(name: str) -> Callable:
    """Return a function that calls the present function ``name`` of this module."""
    return lambda *given, **options: globals()[name](*given, **options)


def _algorithm(declaration: Declaration, schedule: str, **more: Any) -> Algorithm:
    return Algorithm(
        _MINE, declaration, _later(f"{schedule}_forward"), _later(f"{schedule}_backward"), **more
    )


_OVER_MESH = _later("mesh_forward"), _later("mesh_backward")
_MINE = Side("my_attention", local.under_sink, over_mesh=_OVER_MESH)
_ZIGZAG = replace(public_ring.ZIGZAG, layout=lambda n, ranks: Layout(zigzag(n, ranks), n))
attention = public_attention.attention(_algorithm(public_attention.ATTENTION, "local"))
attention_forward = public_parts.attention_forward(_later("tiled_forward"))
attention_backward = public_parts.attention_backward(_later("gradients"))
merge = public_parts.merge(_later("merged"))
ring_attention = public_ring.ring_attention(_algorithm(public_ring.RING, "ring"))
zigzag_attention = public_ring.zigzag_attention(_algorithm(_ZIGZAG, "ring"))
strided_attention = public_strided.strided_attention(
    _algorithm(
        public_strided.STRIDED,
        "strided",
        plan=strided.strided_plan,
        invariant=(strided.invariant_forward, strided.invariant_backward),
    )
)
magi_attention = public_magi.magi_attention(
    _algorithm(
        public_magi.MAGI,
        "magi",
        plan=magi.magi_plan,
        kept_rows=magi.kept_rows,
        invariant=(magi.invariant_forward, magi.invariant_backward),
    )
)
group_cast = public_group_collectives.group_cast(_later("_group_cast"))
__all__ = [
    "attention",
    "attention_backward",
    "attention_forward",
    "group_cast",
    "magi_attention",
    "merge",
    "ring_attention",
    "strided_attention",
    "zigzag_attention",
]


# ---------------------------------------------------------------------- your functions
def mine(function: Callable) -> Callable:
    """Put ``function`` in the place of the one with its name, and return it. It may use all names
    of this module.

    If the folder `my_functions` exists, keep the source of a written function there, and print
    whether it was kept."""
    plain = getattr(function, "fn", function)  # of a Triton kernel
    name = plain.__name__
    if name not in ROWS:
        raise NameError(
            f"my_attention has no place for {name!r}: expected one of {', '.join(ROWS)}"
        )
    source = getsource(plain)
    if FOLDER.is_dir():
        path, empty = FOLDER / f"{name}.py", "raise NotImplementedError" in source
        if not empty:
            path.write_text(source.replace("@mine\n", "", 1))
        unwritten = "used in this notebook, but not kept: it raises NotImplementedError"
        print(f"{name}: {unwritten if empty else f'kept in {path}, not checked yet'}")
    PLANS.clear()  # calls with an older layout
    globals()[name] = _here(function)
    return globals()[name]


def check(options: str) -> None:
    """Print the command `canon check my_attention` with these options, and its table. Raise
    AssertionError unless all agree, or if a function is not written.
    """
    from canon.check import check_command, module_import

    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    console = Console(file=io.StringIO(), width=160, force_terminal=False, force_jupyter=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stderr(io.StringIO()),
        # the names of this module are those of the reference
        mock.patch.object(module_import, "remarks", return_value=[]),
    ):
        # ranks of this process call your functions
        here = ["--world", "threads", "--record", f"{folder}/record.json"]
        status = check_command.run(
            parser.parse_args(["my_attention", *shlex.split(options), *here]), console
        )
    lines = map(str.rstrip, console.file.getvalue().splitlines())
    shown = [line for line in lines if not line.startswith(("No GPU in use", "Skipped", "Record:"))]
    print(f"$ canon check my_attention {options}", *shown, sep="\n")
    # the check declines cases of a function that is not written
    agrees = status == 0 and not any("NotImplementedError" in line for line in shown)
    assert agrees, (
        f"canon check my_attention {options}: {shown[-1] if shown else 'invalid options'}"
    )


for _path in sorted(FOLDER.glob("*.py")):
    exec(compile(_path.read_text(), _path, "exec"), globals())
