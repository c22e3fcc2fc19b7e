"""Read tile sizes of kernels from text, for ``canon bench kernels --config``.

forward=64,128,4,2,tma              KERNEL=NUMBERS, then any other fields of the backend's
                                    configuration by name
dq=128,64,2,v_stages=1              a kernel of "gluon"
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

# the least numbers of a configuration
NUMBERS = {"triton": 4, "gluon": 3}
FLAGS = "ping_pong", "stale_maximum", "plain"
# fields that kernels of "gluon" do not read
UNREAD = {"forward": ("v_stages",), "dq": ("buffers", *FLAGS)}
OTHERS = *FLAGS, "v_stages"


@dataclass(frozen=True)
class Tiles:
    """A configuration of one kernel of a backend."""

    backend: str
    kernel: str
    config: Any
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def method(self) -> str:
        """The backward method that runs the kernel."""
        return "fused" if self.kernel == "fused" else "split"

    def forced(self) -> AbstractContextManager[None]:
        """Let the kernel use the configuration."""
        return _module(self.backend).forced(**{self.kernel: self.config})


def _module(backend: str) -> Any:
    return import_module(f"canon.fast.kernels.{backend}.config")


def tiles_of(text: str, backend: str) -> Tiles:
    """Return the tiles that a text describes. Raises ValueError."""
    if backend not in NUMBERS:
        raise ValueError(f"--config is for {' and '.join(NUMBERS)}, not for {backend}")
    module = _module(backend)
    names = [field.name for field in fields(module.Config)]
    flags = [field.name for field in fields(module.Config) if field.type is bool]
    kernel, _, rest = text.partition("=")
    words = [word.strip() for word in rest.split(",")]
    numbers = [int(word) for word in words if word.isdigit()]
    options: dict[str, Any] = {}
    for word in words[len(numbers) :]:
        name, _, number = word.partition("=")
        options[name] = int(number) if number.isdigit() else True
    right = all(
        name in names[len(numbers) :] and (value is True) == (name in flags)
        for name, value in options.items()
    )
    if kernel not in module.KERNELS or not (NUMBERS[backend] <= len(numbers) <= 4 and right):
        raise ValueError(
            f"--config {text!r}: expected KERNEL={','.join(names[:4])}, then any of "
            f"{', '.join(names[4:])}; KERNEL is one of {', '.join(module.KERNELS)}"
        )
    config = module.Config(*numbers, **options)
    unread = UNREAD.get(kernel, OTHERS) if backend == "gluon" else ()
    if ignored := [x for x in unread if getattr(config, x) != getattr(module.Config, x)]:
        raise ValueError(f"--config {text!r}: {kernel} does not read {', '.join(ignored)}")
    return Tiles(backend, kernel, config, text)
