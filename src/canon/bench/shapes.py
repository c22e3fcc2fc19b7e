"""Read shapes of the benches from text: sizes and a mask.

1,16384,32,8,128,causal             b sequences of n tokens, h query heads, g key heads, d wide; the
                                    mask
1,65536,64,8,128,documents:4096     packed documents of 4096 tokens on average, causal inside
2,1024,8,1,256,prefix:768           the first 768 tokens see each other, the rest is causal
1,1000,8,1,256,blocks:600+300+100   a token sees its block and those before it
1,32768,64,8,128,pack:0             packed documents of the lengths that MagiAttention publishes
                                    (`packs`)
1,40960,32,8,128,tree:8192+32x1024  a trunk of 8192 tokens and 32 branches of 1024
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canon.bench.packs import sampled_packs
from canon.masks.band import Band
from canon.masks.mask import Mask

KERNELS = [  # shapes on which peers have been measured before; the last one is packed
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
SWEEP_TOKENS = 131_072  # b * n of every shape of a sweep
SWEEP_WIDTH = 2048  # h * d of every shape of a sweep
# (b * h, n) on which "auto" must choose well: the device is full at first, then has few heads, then
# few tiles.
AUTO = [
    (256, 512), (32, 512), (256, 1024), (128, 2048), (16, 2048), (128, 4096),
    (64, 8192), (8, 8192), (32, 16384), (16, 32768), (8, 65536), (8, 131072),
]  # fmt: skip
PARTIAL = ["1,16384,32,8,128", "1,16384,32,32,64", "1,16384,16,16,256"]
MASKS = (
    "causal, full, full:KEYS, window:LEFT, prefix:TOKENS, blocks:A+B, documents:MEAN, "
    "pack:NUMBER, tree:A+BxC"
)


@dataclass(frozen=True)
class Shape:
    """b sequences of n tokens, h query heads and g key heads, d wide; one mask for all."""

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
    def keys(self) -> int:
        return self.mask.keys

    @property
    def operations(self) -> float:
        """FLOPs of the forward pass on visible cells."""
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


def packed(n: int, name: str) -> list[int] | None:
    """Return the cu_seqlens of ``documents:MEAN`` and ``pack:NUMBER``,
    and None for another mask.
    """
    kind, _, number = name.partition(":")
    if kind == "documents" and number.isdigit() and int(number):
        return documents(n, int(number))
    if kind == "pack" and number.isdigit():
        return sampled_packs(n, int(number) + 1)[-1]
    return None


def blocks(n: int, name: str) -> list[int] | None:
    """Return the block of each of n tokens for ``blocks:A+B``, and None for another mask or sum of
    lengths.
    """
    kind, _, text = name.partition(":")
    lengths = text.split("+")
    if kind != "blocks" or not all(x.isdigit() for x in lengths) or sum(map(int, lengths)) != n:
        return None
    return [block for block, length in enumerate(lengths) for _ in range(int(length))]


def tree(n: int, name: str) -> tuple[int, int, int] | None:
    """Return trunk, branches and tokens of a branch for ``tree:A+BxC``, and None for another mask
    or number of tokens.
    """
    kind, _, text = name.partition(":")
    numbers = text.replace("x", "+", 1).split("+")
    if kind != "tree" or len(numbers) != 3 or not all(x.isdigit() and int(x) for x in numbers):
        return None
    trunk, branches, tokens = map(int, numbers)
    return (trunk, branches, tokens) if trunk + branches * tokens == n else None


def mask_of(n: int, name: str) -> Mask:
    """Return the mask of n queries with one of the names in `MASKS`. Raises ValueError."""
    kind, _, number = name.partition(":")
    if kind == "causal" and not number:
        return Mask.causal(n)
    if kind == "full" and (number.isdigit() or not number):
        keys = int(number or n)
        return Mask([Band(0, n, 0, keys)], n, keys)
    if kind == "window" and number.isdigit():
        return Mask.window(n, int(number), 0)
    if kind == "prefix" and number.isdigit() and int(number) <= n:
        return Mask.prefix(n, int(number))
    if (of_blocks := blocks(n, name)) is not None:
        return Mask.block_causal(of_blocks)
    if sizes := tree(n, name):
        trunk, branches, tokens = sizes
        return Mask.tree([-1] + [0] * branches, [trunk] + [tokens] * branches)
    if cu_seqlens := packed(n, name):
        return Mask.documents(cu_seqlens)
    raise ValueError(
        f"mask {name!r}: expected one of {MASKS}; a prefix, blocks or a tree of {n} tokens"
    )


def shape_of(text: str, mask_name: str | None = None) -> Shape:
    """Return the shape ``"b,n,h,g,d,mask"``, or ``"b,n,h,g,d"`` with a mask's name."""
    words = [word.strip() for word in text.split(",")]
    numbers, own = words[:5], ",".join(words[5:])
    if (
        len(numbers) != 5
        or not all(x.isdigit() and int(x) for x in numbers)
        or int(numbers[2]) % int(numbers[3])
    ):
        raise ValueError(
            f"shape {text!r}: expected b,n,h,g,d with h a multiple of g, for example "
            "1,16384,32,8,128"
        )
    if bool(own) == bool(mask_name):
        told = f"has the mask {own!r}, and there is {mask_name!r}" if own else "has no mask"
        raise ValueError(f"shape {text!r} {told}: expected one, as b,n,h,g,d,mask or from --mask")
    b, n, h, g, d = map(int, numbers)
    name = own or mask_name or ""
    return Shape(b, n, h, g, d, name, mask_of(n, name))


def shapes_of(texts: Sequence[str], masks: Sequence[str], defaults: Sequence[str]) -> list[Shape]:
    """Return each text with its mask, or with each of ``masks`` (default causal). Without texts,
    use ``defaults``.
    """
    if not texts:
        texts = list(dict.fromkeys(bare(text) for text in defaults)) if masks else defaults
    if masks and any(bare(text) != text for text in texts):
        raise ValueError("--mask is for shapes without a mask: give each shape its own, or none")
    return [
        shape_of(text, mask)
        for text in texts
        for mask in ([None] if bare(text) != text else masks or ["causal"])
    ]


def bare(text: str) -> str:
    """Return the text of a shape without its mask."""
    return ",".join(text.split(",")[:5])


def sweep(widths: Sequence[int]) -> list[Shape]:
    """Return causal shapes of 512 to 131072 tokens at constant tokens and constant h * d."""
    lengths = [512 << i for i in range(9)]
    heads = {d: max(1, SWEEP_WIDTH // d) for d in widths}
    return [
        shape_of(f"{SWEEP_TOKENS // n},{n},{heads[d]},{heads[d]},{d},causal")
        for d in widths
        for n in lengths
    ]


def asked_for(name: str, only: str) -> bool:
    """Return whether a name has one of the texts of ``--only``, separated by "|"."""
    return any(part in name for part in only.split("|"))


def auto() -> list[Shape]:
    """Return the shapes of `AUTO`: causal, four query heads to a key head, 128 wide."""
    sizes = [(rows, n, min(32, rows)) for rows, n in AUTO]
    return [shape_of(f"{rows // h},{n},{h},{h // 4},128,causal") for rows, n, h in sizes]


def partial_pairs(texts: Sequence[str]) -> list[tuple[Shape, Shape]]:
    """Return pairs of a causal mask and a full one of equal area without the diagonal."""
    return [
        (shape_of(text, "causal"), shape_of(text, f"full:{shape_of(text, 'causal').n // 2}"))
        for text in texts
    ]
