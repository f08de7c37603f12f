"""The operations on split tiles. Importing a module here registers its operations."""

from commsched.spatial.ops import (  # noqa: F401 - they register themselves
    contract,
    gradients,
    pointwise,
    reduce,
    shape,
    windows,
)
