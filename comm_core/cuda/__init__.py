"""The kernels for GPUs: one packs a bucket in one launch, however many tensors it has; others quantise it.

They are in kernels.cu and the headers it includes; ``docs/gpu.md`` says how it is built and checked.
"""

from comm_core.cuda.blocks import BlockCode, message_bytes
from comm_core.cuda.copies import BucketCopy
from comm_core.cuda.launchers import Launcher, gpu_launcher
from comm_core.cuda.tables import Region, chunk_table, one_after_another

__all__ = [
    "BlockCode",
    "BucketCopy",
    "Launcher",
    "Region",
    "chunk_table",
    "gpu_launcher",
    "message_bytes",
    "one_after_another",
]
