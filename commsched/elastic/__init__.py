"""Training that goes on when ranks are lost or hosts come and go: Horovod's elastic API for PyTorch.

state      what is committed, restored and given to new ranks
pipelines  the same for a pipeline, whose stages are cut anew
sampler    a dataset's samples that are left in this epoch, over the ranks there are
recovery   ``run``: restores the last commit after a lost rank, and begins the job's next epoch
virtual    ``run(virtual_ranks=)``: results that do not depend on the ranks there are
guardian   kills a process that is stopped, because the next epoch would wait for it
"""

from commsched.elastic.pipelines import PipelineState
from commsched.elastic.recovery import run
from commsched.elastic.sampler import ElasticSampler
from commsched.elastic.state import ObjectState, State, TorchState
from commsched.elastic.virtual import virtual_ranks
from commsched.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "PipelineState",
    "State",
    "TorchState",
    "run",
    "virtual_ranks",
]
