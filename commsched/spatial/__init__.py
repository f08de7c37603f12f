"""Exact spatial parallelism: one image split into tiles over ranks, the model unchanged.

>>> from commsched import spatial
>>> model = spatial.shard(model, grid=(2, 2))
>>> loss = criterion(model(spatial.scatter(image)), target)
>>> loss.backward()
>>> spatial.sum_gradients(model.parameters())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commsched.channels import SilentChannel, ThreadHub
from commsched.errors import CommError
from commsched.spatial import ops
from commsched.spatial.api import from_local, gather, regrid, scatter, sum_gradients, tile_bounds
from commsched.spatial.explain import Report, explain
from commsched.spatial.mesh import Mesh, current_mesh, use_mesh
from commsched.spatial.run import run
from commsched.spatial.shard import channel, shard, unshard
from commsched.spatial.tile import Tile
from scheduler.ir.layout import Samples, Tiles

if TYPE_CHECKING:
    from commsched.pipeline.api import Hybrid as Hybrid
    from commsched.pipeline.tiled import StagesReport as StagesReport
    from commsched.pipeline.tiled import explain_stages as explain_stages
    from commsched.spatial.dtensor import from_dtensor as from_dtensor

# Imported on first use: pipelines import this package, and `torch.distributed.tensor` takes a second.
_HOME = {
    "Hybrid": "commsched.pipeline.api",
    "StagesReport": "commsched.pipeline.tiled",
    "explain_stages": "commsched.pipeline.tiled",
    "from_dtensor": "commsched.spatial.dtensor",
}

__all__ = [
    "CommError",
    "Hybrid",
    "Mesh",
    "Report",
    "Samples",
    "SilentChannel",
    "StagesReport",
    "ThreadHub",
    "Tile",
    "Tiles",
    "channel",
    "current_mesh",
    "explain",
    "explain_stages",
    "from_dtensor",
    "from_local",
    "gather",
    "ops",
    "regrid",
    "run",
    "scatter",
    "shard",
    "sum_gradients",
    "tile_bounds",
    "unshard",
    "use_mesh",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
