"""Horovod's API for PyTorch with scheduled communication; for Horovod scripts, ``import commsched as hvd``.

Every name is imported on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsched.collectives.compression import Compression as Compression
    from commsched.collectives.data_movement import allgather as allgather
    from commsched.collectives.data_movement import allgather_async as allgather_async
    from commsched.collectives.data_movement import alltoall as alltoall
    from commsched.collectives.data_movement import alltoall_async as alltoall_async
    from commsched.collectives.data_movement import broadcast as broadcast
    from commsched.collectives.data_movement import broadcast_ as broadcast_
    from commsched.collectives.data_movement import broadcast_async as broadcast_async
    from commsched.collectives.data_movement import broadcast_async_ as broadcast_async_
    from commsched.collectives.data_movement import grouped_allgather as grouped_allgather
    from commsched.collectives.data_movement import grouped_allgather_async as grouped_allgather_async
    from commsched.collectives.handles import barrier as barrier
    from commsched.collectives.handles import join as join
    from commsched.collectives.handles import poll as poll
    from commsched.collectives.handles import synchronize as synchronize
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
    from commsched.collectives.model_state import broadcast_optimizer_state as broadcast_optimizer_state
    from commsched.collectives.model_state import broadcast_parameters as broadcast_parameters
    from commsched.collectives.objects import allgather_object as allgather_object
    from commsched.collectives.objects import broadcast_object as broadcast_object
    from commsched.collectives.private_groups import data_group as data_group
    from commsched.collectives.process_sets import ProcessSet as ProcessSet
    from commsched.collectives.process_sets import add_process_set as add_process_set
    from commsched.collectives.process_sets import global_process_set as global_process_set
    from commsched.collectives.process_sets import remove_process_set as remove_process_set
    from commsched.collectives.reductions import Adasum as Adasum
    from commsched.collectives.reductions import Average as Average
    from commsched.collectives.reductions import Max as Max
    from commsched.collectives.reductions import Min as Min
    from commsched.collectives.reductions import Product as Product
    from commsched.collectives.reductions import Sum as Sum
    from commsched.collectives.reductions import allreduce as allreduce
    from commsched.collectives.reductions import allreduce_ as allreduce_
    from commsched.collectives.reductions import allreduce_async as allreduce_async
    from commsched.collectives.reductions import allreduce_async_ as allreduce_async_
    from commsched.collectives.reductions import grouped_allreduce as grouped_allreduce
    from commsched.collectives.reductions import grouped_allreduce_ as grouped_allreduce_
    from commsched.collectives.reductions import grouped_allreduce_async as grouped_allreduce_async
    from commsched.collectives.reductions import grouped_allreduce_async_ as grouped_allreduce_async_
    from commsched.collectives.reductions import grouped_reducescatter as grouped_reducescatter
    from commsched.collectives.reductions import grouped_reducescatter_async as grouped_reducescatter_async
    from commsched.collectives.reductions import reducescatter as reducescatter
    from commsched.collectives.reductions import reducescatter_async as reducescatter_async
    from commsched.collectives.reductions import sparse_allreduce_async as sparse_allreduce_async
    from commsched.collectives.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from commsched.errors import CommError as CommError
    from commsched.errors import HorovodInternalError as HorovodInternalError
    from commsched.optimizer.deferred_updates import register_separable as register_separable
    from commsched.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
    from commsched.optimizer.explanation import explain as explain
    from commsched.optimizer.explanation import operations as operations
    from commsched.optimizer.shards import register_elementwise as register_elementwise

# Module -> the public names that it defines, as above.
_HOMES = {
    "commsched.collectives.compression": "Compression",
    "commsched.collectives.data_movement": """
        allgather allgather_async alltoall alltoall_async broadcast broadcast_ broadcast_async
        broadcast_async_ grouped_allgather grouped_allgather_async
    """,
    "commsched.collectives.handles": "barrier join poll synchronize",
    "commsched.collectives.initialization": """
        ccl_built cross_rank cross_size cuda_built ddl_built engine_name gloo_built gloo_enabled init
        is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank
        rocm_built shutdown size start_timeline stop_timeline
    """,
    "commsched.collectives.model_state": "broadcast_optimizer_state broadcast_parameters",
    "commsched.collectives.objects": "allgather_object broadcast_object",
    "commsched.collectives.private_groups": "data_group",
    "commsched.collectives.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "commsched.collectives.reductions": """
        Adasum Average Max Min Product Sum allreduce allreduce_ allreduce_async allreduce_async_
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        grouped_reducescatter grouped_reducescatter_async reducescatter reducescatter_async
        sparse_allreduce_async
    """,
    "commsched.collectives.sync_batch_norm": "SyncBatchNorm",
    "commsched.errors": "CommError HorovodInternalError",
    "commsched.optimizer.deferred_updates": "register_separable",
    "commsched.optimizer.distributed": "DistributedOptimizer",
    "commsched.optimizer.explanation": "explain operations",
    "commsched.optimizer.shards": "register_elementwise",
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
