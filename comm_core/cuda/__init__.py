"""The fusion kernel for GPUs: packs a bucket in one launch, however many tensors it has.

The kernel is in kernels.cu and the headers it includes; ``docs/gpu.md`` says how it is built and checked.
"""

from comm_core.cuda.copies import BucketCopy
from comm_core.cuda.launchers import Launcher, gpu_launcher
from comm_core.cuda.tables import Region, chunk_table, one_after_another

__all__ = [
    "BucketCopy",
    "Launcher",
    "Region",
    "chunk_table",
    "gpu_launcher",
    "one_after_another",
]
