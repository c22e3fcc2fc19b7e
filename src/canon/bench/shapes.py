"""Read shapes of the benches from text: sizes and a mask.

1,16384,32,8,128,causal             b sequences, n tokens, h query heads, g key heads, d wide; mask
1,65536,64,8,128,documents:4096     packed documents of 4096 tokens on average, causal inside
2,1024,8,1,256,prefix:768           the first 768 tokens see each other, the rest is causal
1,32768,64,8,128,pack:0             packed documents of published lengths (`packs`)
1,40960,32,8,128,tree:8192+32x1024  a trunk of 8192 tokens and 32 branches of 1024
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from canon.bench.packs import sampled_packs
from canon.masks.mask import Mask

KERNELS = [  # shapes on which peers have been measured before
    "1,16384,32,8,128,causal",
    "1,16384,32,8,128,full",
    "8,2048,32,8,128,causal",
    "1,65536,32,8,128,causal",
    "4,8192,16,16,128,causal",
    "1,16384,32,32,64,causal",
    "1,16384,16,16,256,causal",
    "2,1024,8,1,256,full",
    "1,65536,64,8,128,documents:4096",
]
MASKS = (
    "causal, full, full:KEYS, window:LEFT, prefix:TOKENS, documents:MEAN, pack:NUMBER, tree:A+BxC"
)


@dataclass(frozen=True)
class Shape:
    """b sequences of n tokens with one mask, h query heads, g key heads, d wide."""

    b: int
    n: int
    h: int
    g: int
    d: int
    mask_name: str
    mask: Mask

    def __str__(self) -> str:
        return f"B{self.b} S{self.n} Hq{self.h} Hk{self.g} D{self.d} {self.mask_name}"

    @property
    def kind(self) -> str:
        return self.mask_name.partition(":")[0]

    @property
    def numbers(self) -> list[int]:
        return _numbers(self.mask_name)

    @cached_property
    def lengths(self) -> list[int]:
        if self.kind not in PACKED:
            return []
        ends = PACKED[self.kind](self.n, *self.numbers)
        return [stop - start for start, stop in pairwise(ends)]

    @property
    def keys(self) -> int:
        return self.mask.keys

    @property
    def operations(self) -> float:
        return 4.0 * self.b * self.h * self.d * self.mask.area

    def inputs(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        draw = torch.Generator(device).manual_seed(0)
        sizes = [(self.n, self.h), (self.keys, self.g), (self.keys, self.g), (self.n, self.h)]
        return [
            torch.randn(self.b, *x, self.d, generator=draw, dtype=dtype, device=device)
            for x in sizes
        ]


def documents(n: int, mean: int, seed: int = 0) -> list[int]:
    """Return cu_seqlens of documents of exponentially distributed lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (
        -torch.log(torch.rand(4 * n // mean + 16, generator=draw, dtype=torch.float64)) * mean
    ).long() + 1
    ends = [0, *lengths.cumsum(0).tolist()]
    return [*(end for end in ends if end < n), n]


def _numbers(name: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", name)]


def _pack(n: int, number: int) -> list[int]:
    return sampled_packs(n, number + 1)[-1]


def _tree(n: int, trunk: int, branches: int, tokens: int) -> Mask | None:
    if not trunk * branches * tokens or trunk + branches * tokens != n:
        return None
    return Mask.tree([-1] + [0] * branches, [trunk] + [tokens] * branches)


# The pattern of a name, and its mask from n and the numbers; None if they do not fit n.
KINDS: dict[str, Callable[..., Mask | None]] = {
    r"causal": Mask.causal,
    r"full(:\d+)?": Mask.full,
    r"window:\d+": lambda n, left: Mask.window(n, left, 0),
    r"prefix:\d+": lambda n, end: Mask.prefix(n, end) if end <= n else None,
    r"tree:\d+\+\d+x\d+": _tree,
    r"documents:\d+": lambda n, mean: Mask.documents(documents(n, mean)) if mean else None,
    r"pack:\d+": lambda n, number: Mask.documents(_pack(n, number)),
}
PACKED = {"documents": documents, "pack": _pack}


def mask_of(n: int, name: str) -> Mask:
    """Return the mask of n queries with one of the names in `MASKS`. Raises ValueError."""
    found = (make(n, *_numbers(name)) for kind, make in KINDS.items() if re.fullmatch(kind, name))
    if (mask := next(found, None)) is not None:
        return mask
    raise ValueError(f"mask {name!r}: expected one of {MASKS}; a prefix or a tree of {n} tokens")


def shape_of(text: str) -> Shape:
    """Return the shape ``"b,n,h,g,d,mask"``, by default causal. Raises ValueError."""
    *numbers, name = [word.strip() for word in text.split(",")]
    if name.isdigit():
        numbers, name = [*numbers, name], "causal"
    if (
        len(numbers) != 5
        or not all(x.isdigit() and int(x) for x in numbers)
        or int(numbers[2]) % int(numbers[3])
    ):
        raise ValueError(
            f"shape {text!r}: expected b,n,h,g,d or b,n,h,g,d,mask with h a multiple of g, for "
            "example 1,16384,32,8,128,causal"
        )
    b, n, h, g, d = map(int, numbers)
    return Shape(b, n, h, g, d, name, mask_of(n, name))
