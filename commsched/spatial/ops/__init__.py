"""The operations on split tiles. Importing a module here registers its operations."""

from commsched.spatial.ops import (
    conv,
    create,
    dropout,
    gradients,
    loss,
    norm,
    pad,
    pointwise,
    pool,
    reduce,
    resize,
    shape,
)

__all__ = [
    "conv",
    "create",
    "dropout",
    "gradients",
    "loss",
    "norm",
    "pad",
    "pointwise",
    "pool",
    "reduce",
    "resize",
    "shape",
]
