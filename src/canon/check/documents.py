"""Read the documents of `canon check`."""

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

TEXT = {".py", ".md", ".txt", ".toml", ".typ", ".cu", ".cfg", ".yml", ".yaml", ".sh", ".rst", ""}
HIDDEN = re.compile(r"(^|/)(\.|__pycache__)")


@dataclass(frozen=True)
class Documents:
    """Documents in a fixed order. A byte is a token."""

    names: tuple[str, ...]
    texts: tuple[bytes, ...]

    @classmethod
    def of(cls, paths: Sequence[Path] = (), budget: int | None = None) -> "Documents":
        """Read files and text files of folders, by default those of this repository, within a
        ``budget`` of tokens. Raises ValueError without text.
        """
        if paths:
            texts = {str(file): file.read_bytes() for file in _text_files(paths)}
        else:
            root = _home()
            files = {x.relative_to(root).as_posix(): x for x in _text_files([root])}
            texts = {name: text for name, x in files.items() if (text := x.read_bytes())}
        if not any(texts.values()):
            raise ValueError(f"no text in {', '.join(map(str, paths)) or 'the repository'}")
        chosen = sorted(texts) if budget is None else sorted(_within(texts, budget))
        return cls(tuple(chosen), tuple(texts[name] for name in chosen))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.texts))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def at_least(self, tokens: int) -> "Documents":
        times = max(1, -(-tokens // self.tokens))
        return Documents(self.names * times, self.texts * times)


def _home() -> Path:
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    return checkout if (checkout / "pyproject.toml").exists() else package


def _text_files(paths: Iterable[Path]) -> list[Path]:
    files = []
    for path in paths:
        if path.is_dir():
            below = _tracked(path) or [
                f for f in path.rglob("*") if not HIDDEN.search(str(f.relative_to(path)))
            ]
            files += sorted(file for file in below if file.is_file() and file.suffix in TEXT)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"no such file or folder: {path}")
    return list(dict.fromkeys(files))


def _tracked(folder: Path) -> list[Path]:
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [folder / name for name in listed.split("\0") if name]


def _within(texts: dict[str, bytes], budget: int) -> list[str]:
    length = {name: len(text) for name, text in texts.items()}
    by_length = sorted(texts, key=lambda name: (length[name], name))
    varied, chosen = by_length[:1], by_length[:1]
    for name in by_length:  # lengths that grow by a quarter come first
        if length[name] >= 1.25 * length[varied[-1]] and name not in varied:
            varied.append(name)
    left = budget - length[chosen[0]]
    for name in [*varied[1:], *(name for name in by_length if name not in varied)]:
        if length[name] <= left:
            chosen.append(name)
            left -= length[name]
    return chosen
