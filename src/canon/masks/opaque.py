"""Register Python classes as arguments of custom operators: torch's opaque types. Its names are
private.
"""

from typing import TYPE_CHECKING

from torch._library import opaque_object

if TYPE_CHECKING:
    OpaqueMeta = type
else:
    try:
        from torch._custom_class_base import CustomClassBaseMeta as OpaqueMeta  # torch >= 2.15
    except ImportError:
        from torch._opaque_base import OpaqueBaseMeta as OpaqueMeta

__all__ = ["OpaqueMeta", "registered"]


def registered(kind: type, methods: tuple[str, ...] = ()) -> str:
    """Register a class with metaclass `OpaqueMeta`. Return its name in schemas. Compiled graphs do
    not depend on its content. torch traces the ``methods``: they must break the graph at once.
    """
    members = dict.fromkeys(methods, opaque_object.MemberType.INLINED)
    register = getattr(opaque_object, "register_custom_class", None)
    if register is not None:
        register(kind, typ="symbolic", members=members)
    else:
        opaque_object.register_opaque_type(kind, typ="reference", members=members)
    return opaque_object.get_opaque_type_name(kind)
