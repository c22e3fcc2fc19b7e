"""Make the types of interpreted tensors once: Triton's interpreter spends a third of its time on
them.
"""

from triton.language import core

PLAIN = {
    int,
    float,
    bool,
    str,
    type(None),
    core.dtype,
    core.pointer_type,
    core.block_type,
    core.tensor,
}


def share_types() -> None:
    """Let tensors of one shape share Triton's results for it. A second call does nothing."""
    if core.block_type.__init__.__module__ == __name__:
        return
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, shapes = {}, {}

    def unwrap_if_constexpr(x):
        return x if x.__class__ in PLAIN else unwrap(x)

    def init_type(self, element_ty, shape):
        key = element_ty.name, tuple([unwrap_if_constexpr(size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)  # raises if the shape is invalid
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def init_tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = lambda self, other: (
        self.name == other.name if other.__class__ is core.dtype else equal(self, other)
    )
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
