"""`Immutable`: the base of `Mask` and `Layout`."""

from typing import Any

from canon.masks.opaque import OpaqueMeta

write = object.__setattr__  # to the slots of an immutable object


class Immutable(metaclass=OpaqueMeta):
    """An object that never changes, compared and hashed by ``_content``, a tuple."""

    __slots__ = ("__weakref__", "_content", "_digest", "_hash")
    _content: tuple[Any, ...]
    _digest: str | None
    _hash: int

    def _remember(self, content: tuple[Any, ...]) -> None:
        write(self, "_content", content)
        write(self, "_hash", hash(content))
        write(self, "_digest", None)

    def __setattr__(self, name, value):
        raise AttributeError(f"a {type(self).__name__} is immutable: cannot set {name}")

    def __eq__(self, other) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._content == other._content)

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo):
        return self
