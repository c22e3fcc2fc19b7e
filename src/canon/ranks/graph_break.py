"""Functions at which a compiled program breaks its graph."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from canon.ranks.profiling import recorded

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that torch.compile must not trace."""

    @wraps(function)
    def _called(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"canon: torch.export cannot record {function.__name__}: export a module without "
                'it, for a model of transformers with attn_implementation="sdpa"'
            )
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                msg=f"canon does not trace {function.__name__}: compile without fullgraph=True"
            )
            return torch.compiler.disable(_called)(*args, **kwargs)
        with recorded(function.__name__):
            return function(*args, **kwargs)

    return _called
