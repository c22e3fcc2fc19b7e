"""Register classes of Python objects as arguments of custom operators. torch calls them opaque types.

torch 2.15 renames the function, the metaclass and the kind "reference". Both names are private.
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


def registered(kind: type) -> str:
    """Register a class with metaclass `OpaqueMeta`. Return its name in the schemas of operators.

    Its objects become inputs of compiled graphs. A graph depends on the class of such an object, not on its content.
    """
    register = getattr(opaque_object, "register_custom_class", None)
    if register is not None:
        register(kind, typ="symbolic")
    else:
        opaque_object.register_opaque_type(kind, typ="reference")
    return opaque_object.get_opaque_type_name(kind)
