"""Exact spatial parallelism: one image split into tiles over ranks, the model unchanged.

>>> from commsched import spatial
>>> model = spatial.shard(model, grid=(2, 2))
>>> loss = criterion(model(spatial.scatter(image)), target)
>>> loss.backward()
>>> spatial.sum_gradients(model.parameters())
"""

from commsched.errors import CommError
from commsched.spatial import ops
from commsched.spatial.api import from_local, gather, regrid, scatter, sum_gradients, tile_bounds
from commsched.spatial.explain import Report, explain
from commsched.spatial.explain_stages import StagesReport, explain_stages
from commsched.spatial.hybrid import Hybrid
from commsched.spatial.mesh import Mesh, current_mesh, use_mesh
from commsched.spatial.shard import shard, unshard
from commsched.spatial.tile import Tile
from commsched.transport.channel import DistChannel, SilentChannel, ThreadHub
from scheduler.ir.placements import Samples, Tiles

__all__ = [
    "CommError",
    "DistChannel",
    "Hybrid",
    "Mesh",
    "Report",
    "Samples",
    "SilentChannel",
    "StagesReport",
    "ThreadHub",
    "Tile",
    "Tiles",
    "current_mesh",
    "explain",
    "explain_stages",
    "from_local",
    "gather",
    "ops",
    "regrid",
    "scatter",
    "shard",
    "sum_gradients",
    "tile_bounds",
    "unshard",
    "use_mesh",
]
