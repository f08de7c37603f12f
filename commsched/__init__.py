"""commsched: Horovod's API for PyTorch with scheduled communication; ``import commsched as hvd`` runs a
Horovod script.

Every name is loaded on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsched.collectives.compression import Compression as Compression
    from commsched.collectives.initialization import ccl_built as ccl_built
    from commsched.collectives.initialization import cross_rank as cross_rank
    from commsched.collectives.initialization import cross_size as cross_size
    from commsched.collectives.initialization import cuda_built as cuda_built
    from commsched.collectives.initialization import ddl_built as ddl_built
    from commsched.collectives.initialization import engine_name as engine_name
    from commsched.collectives.initialization import gloo_built as gloo_built
    from commsched.collectives.initialization import gloo_enabled as gloo_enabled
    from commsched.collectives.initialization import init as init
    from commsched.collectives.initialization import is_initialized as is_initialized
    from commsched.collectives.initialization import local_rank as local_rank
    from commsched.collectives.initialization import local_size as local_size
    from commsched.collectives.initialization import mpi_built as mpi_built
    from commsched.collectives.initialization import mpi_enabled as mpi_enabled
    from commsched.collectives.initialization import mpi_threads_supported as mpi_threads_supported
    from commsched.collectives.initialization import nccl_built as nccl_built
    from commsched.collectives.initialization import rank as rank
    from commsched.collectives.initialization import rocm_built as rocm_built
    from commsched.collectives.initialization import shutdown as shutdown
    from commsched.collectives.initialization import size as size
    from commsched.collectives.initialization import start_timeline as start_timeline
    from commsched.collectives.initialization import stop_timeline as stop_timeline
    from commsched.collectives.objects import allgather_object as allgather_object
    from commsched.collectives.objects import broadcast_object as broadcast_object
    from commsched.collectives.objects import broadcast_optimizer_state as broadcast_optimizer_state
    from commsched.collectives.objects import broadcast_parameters as broadcast_parameters
    from commsched.collectives.ops import Adasum as Adasum
    from commsched.collectives.ops import Average as Average
    from commsched.collectives.ops import Max as Max
    from commsched.collectives.ops import Min as Min
    from commsched.collectives.ops import Product as Product
    from commsched.collectives.ops import Sum as Sum
    from commsched.collectives.ops import allgather as allgather
    from commsched.collectives.ops import allgather_async as allgather_async
    from commsched.collectives.ops import allreduce as allreduce
    from commsched.collectives.ops import allreduce_ as allreduce_
    from commsched.collectives.ops import allreduce_async as allreduce_async
    from commsched.collectives.ops import allreduce_async_ as allreduce_async_
    from commsched.collectives.ops import alltoall as alltoall
    from commsched.collectives.ops import alltoall_async as alltoall_async
    from commsched.collectives.ops import barrier as barrier
    from commsched.collectives.ops import broadcast as broadcast
    from commsched.collectives.ops import broadcast_ as broadcast_
    from commsched.collectives.ops import broadcast_async as broadcast_async
    from commsched.collectives.ops import broadcast_async_ as broadcast_async_
    from commsched.collectives.ops import grouped_allgather as grouped_allgather
    from commsched.collectives.ops import grouped_allgather_async as grouped_allgather_async
    from commsched.collectives.ops import grouped_allreduce as grouped_allreduce
    from commsched.collectives.ops import grouped_allreduce_ as grouped_allreduce_
    from commsched.collectives.ops import grouped_allreduce_async as grouped_allreduce_async
    from commsched.collectives.ops import grouped_allreduce_async_ as grouped_allreduce_async_
    from commsched.collectives.ops import grouped_reducescatter as grouped_reducescatter
    from commsched.collectives.ops import grouped_reducescatter_async as grouped_reducescatter_async
    from commsched.collectives.ops import join as join
    from commsched.collectives.ops import poll as poll
    from commsched.collectives.ops import reducescatter as reducescatter
    from commsched.collectives.ops import reducescatter_async as reducescatter_async
    from commsched.collectives.ops import sparse_allreduce_async as sparse_allreduce_async
    from commsched.collectives.ops import synchronize as synchronize
    from commsched.collectives.private_groups import data_group as data_group
    from commsched.collectives.process_sets import ProcessSet as ProcessSet
    from commsched.collectives.process_sets import add_process_set as add_process_set
    from commsched.collectives.process_sets import global_process_set as global_process_set
    from commsched.collectives.process_sets import remove_process_set as remove_process_set
    from commsched.collectives.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from commsched.errors import CommError as CommError
    from commsched.errors import HorovodInternalError as HorovodInternalError
    from commsched.optimizer.deferred_updates import register_separable as register_separable
    from commsched.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
    from commsched.optimizer.explanation import explain as explain
    from commsched.optimizer.explanation import operations as operations
    from commsched.optimizer.shards import register_elementwise as register_elementwise

_HOMES = {
    "commsched.collectives.compression": "Compression",
    "commsched.errors": "CommError HorovodInternalError",
    "commsched.collectives.objects": "allgather_object broadcast_object broadcast_optimizer_state "
    "broadcast_parameters",
    "commsched.optimizer.explanation": "explain operations",
    "commsched.optimizer.shards": "register_elementwise",
    "commsched.optimizer.deferred_updates": "register_separable",
    "commsched.optimizer.distributed": "DistributedOptimizer",
    "commsched.collectives.initialization": "ccl_built cross_rank cross_size cuda_built ddl_built "
    "engine_name gloo_built gloo_enabled init is_initialized local_rank local_size "
    "mpi_built mpi_enabled mpi_threads_supported nccl_built rank "
    "rocm_built shutdown size start_timeline stop_timeline",
    "commsched.collectives.private_groups": "data_group",
    "commsched.collectives.ops": "Adasum Average Max Min Product Sum allgather allgather_async allreduce "
    "allreduce_ "
    "allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ "
    "broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async "
    "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
    "grouped_reducescatter grouped_reducescatter_async join poll reducescatter "
    "reducescatter_async sparse_allreduce_async synchronize",
    "commsched.collectives.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "commsched.collectives.sync_batch_norm": "SyncBatchNorm",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'commsched' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
