"""Horovod's API for PyTorch with scheduled communication; for Horovod scripts, ``import commsched as hvd``.

Every name is imported on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, which read no dictionary; __getattr__ imports at run time
    from commsched import elastic as elastic
    from commsched.checkpoint import Saving as Saving
    from commsched.checkpoint import load as load
    from commsched.checkpoint import save as save
    from commsched.collectives.compression import *
    from commsched.collectives.job import *
    from commsched.collectives.model_state import *
    from commsched.collectives.operations import *
    from commsched.collectives.private_groups import *
    from commsched.collectives.sync_batch_norm import *
    from commsched.errors import *
    from commsched.optimizer.distributed import *
    from commsched.optimizer.planner import register_whole_matrix as register_whole_matrix
    from commsched.optimizer.reports import *
    from commsched.optimizer.sharded_step import register_elementwise as register_elementwise
    from commsched.optimizer.whole_step import register_separable as register_separable

# Module -> the public names that it defines.
_HOMES = {
    "commsched.checkpoint": "Saving load save",
    "commsched.collectives.compression": "Compression",
    "commsched.collectives.job": """
        ProcessSet add_process_set ccl_built cross_rank cross_size cuda_built ddl_built engine_name
        global_process_set gloo_built gloo_enabled init is_initialized local_rank local_size mpi_built
        mpi_enabled mpi_threads_supported nccl_built rank remove_process_set rocm_built shutdown size
        start_timeline stop_timeline
    """,
    "commsched.collectives.joins": "join",
    "commsched.collectives.model_state": "broadcast_optimizer_state broadcast_parameters",
    "commsched.collectives.operations": """
        Adasum Average Max Min Product Sum allgather allgather_async allgather_object allreduce allreduce_
        allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async
        broadcast_async_ broadcast_object grouped_allgather grouped_allgather_async grouped_allreduce
        grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
        grouped_reducescatter_async poll reducescatter reducescatter_async sparse_allreduce_async synchronize
    """,
    "commsched.collectives.private_groups": "data_group",
    "commsched.collectives.sync_batch_norm": "SyncBatchNorm",
    "commsched.errors": "CheckpointError CommError HorovodInternalError SettingsError",
    "commsched.optimizer.distributed": "DistributedOptimizer",
    "commsched.optimizer.reports": "Metrics explain is_settled log_metrics metrics operations",
    "commsched.optimizer.sharded_step": "register_elementwise",
    "commsched.optimizer.planner": "register_whole_matrix",
    "commsched.optimizer.whole_step": "register_separable",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "elastic":  # a module, as in Horovod
        return import_module("commsched.elastic")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'commsched' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
