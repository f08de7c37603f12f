"""commsched has every public name of horovod.torch 0.28.1, with its signature, and loads none early."""

import importlib
import inspect
import subprocess
import sys

import pytest

import commsched
from tests.support.needs import skip_without_horovod

# The parameters of horovod.torch 0.28.1: name=default, in order; what stands after * is commsched's own.
ALLREDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global"
COMPRESSED = ALLREDUCE.replace("name=None, op", "name=None, compression=none, op")
SCATTER_ASYNC = "name=None, op=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0"
SCATTER = SCATTER_ASYNC.replace("name=None, op", "name=None, compression=none, op")
SIGNATURES = {
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_": f"tensor, {ALLREDUCE}",
    "allreduce_async": f"tensor, {ALLREDUCE}",
    "allreduce_async_": f"tensor, {ALLREDUCE}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_async": f"tensors, {ALLREDUCE}",
    "grouped_allreduce_async_": f"tensors, {ALLREDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=global",
    "allgather": "tensor, name=None, process_set=global",
    "allgather_async": "tensor, name=None, process_set=global",
    "grouped_allgather": "tensors, name=None, process_set=global",
    "grouped_allgather_async": "tensors, name=None, process_set=global",
    "broadcast": "tensor, root_rank, name=None, process_set=global",
    "broadcast_": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=global",
    "alltoall": "tensor, splits=None, name=None, process_set=global",
    "alltoall_async": "tensor, splits=None, name=None, process_set=global",
    "reducescatter": f"tensor, {SCATTER}",
    "reducescatter_async": f"tensor, {SCATTER_ASYNC}",
    "grouped_reducescatter": f"tensors, {SCATTER}",
    "grouped_reducescatter_async": f"tensors, {SCATTER_ASYNC}",
    "join": "device=-1",
    "barrier": "process_set=global",
    "poll": "handle",
    "synchronize": "handle",
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "start_timeline": "file_path, mark_cycles=False",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
    "allgather_object": "obj, name=None",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, "
    "backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    "sparse_as_dense=False, process_set=global",
}
WITHOUT_PARAMETERS = [
    *(
        "is_initialized",
        "stop_timeline",
        "rank",
        "size",
        "local_rank",
        "local_size",
        "cross_rank",
        "cross_size",
    ),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built"),
    *("ddl_built", "ccl_built", "cuda_built", "rocm_built"),
]
VALUES = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}
OTHERS = ["Compression", "HorovodInternalError", "global_process_set"]
HOROVOD_NAMES = [*SIGNATURES, *WITHOUT_PARAMETERS, *VALUES, *OTHERS]


def positional(function):
    """The parameters that may be passed by position, as text that does not depend on the package."""
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, parameter
        default = parameter.default
        shown = {"ProcessSet": "global"}.get(
            type(default).__name__, "none" if inspect.isclass(default) else repr(default)
        )
        texts.append(parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={shown}")
    return ", ".join(texts)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert positional(getattr(commsched, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_question(name):
    assert positional(getattr(commsched, name)) == ""


def test_numbers_of_the_reductions():
    assert {name: getattr(commsched, name) for name in VALUES} == VALUES


@pytest.mark.parametrize("name", HOROVOD_NAMES)
def test_same_as_an_installed_horovod(name):
    skip_without_horovod()
    horovod = importlib.import_module("horovod.torch")
    theirs, ours = getattr(horovod, name), getattr(commsched, name)
    if name in ("init", "shutdown"):
        return  # Horovod passes *args on to a function of the same parameters
    if callable(theirs) and not name.endswith("Error") and name != "Compression":
        assert positional(ours) == positional(theirs)
    elif isinstance(theirs, int):
        assert ours == theirs


def test_no_name_of_an_installed_horovod_is_missing():
    skip_without_horovod()
    horovod = importlib.import_module("horovod.torch")
    modules = {"compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm", "mpi_lib_v2"}
    helpers = {"check_extension"}
    names = {name for name in dir(horovod) if not name.startswith("_")} - modules - helpers
    assert names == set(HOROVOD_NAMES)
    assert names <= set(commsched.__all__) and names <= set(dir(commsched))


def test_errors_are_of_horovods_kinds():
    assert issubclass(commsched.HorovodInternalError, RuntimeError)
    assert commsched.CommError is commsched.HorovodInternalError
    commsched.shutdown()  # whatever ran in this process before
    with pytest.raises(ValueError, match="init"):
        commsched.rank()
    assert not commsched.is_initialized()


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'allredcue'"):
        commsched.allredcue  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    program = "import sys, commsched.env, commsched.process.launch; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True
    )
    assert done.stdout.strip() == "False"
