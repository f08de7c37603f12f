"""Fusion kernels for GPUs: pack, unpack and update a bucket in one launch each, however many tensors it has.

The kernels are in kernels.cu and the headers it includes; ``docs/gpu.md`` says how they are built and
checked.
"""

from comm_core.cuda.copies import BucketCopy, fills_memory
from comm_core.cuda.launchers import Launcher, gpu_launcher
from comm_core.cuda.tables import Region, chunk_table, one_after_another
from comm_core.cuda.update import Hyper, Part, ShardUpdate

__all__ = [
    "BucketCopy",
    "Hyper",
    "Launcher",
    "Part",
    "Region",
    "ShardUpdate",
    "chunk_table",
    "fills_memory",
    "gpu_launcher",
    "one_after_another",
]
