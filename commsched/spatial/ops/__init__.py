"""The operations on split tiles. Importing a module here registers its operations."""

from commsched.spatial.ops import (
    contract,
    conv,
    create,
    dropout,
    folds,
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
    "contract",
    "conv",
    "create",
    "dropout",
    "folds",
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
